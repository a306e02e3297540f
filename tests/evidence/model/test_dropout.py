"""Dropout off, and nothing else."""

from __future__ import annotations

import torch
from torch.nn import functional

from fastloop.evidence.model.dropout import switch_off_dropout, without_functional_dropout

X = torch.arange(1.0, 65.0).reshape(2, 4, 8)


def test_attention_keeps_its_other_arguments() -> None:
    plain = functional.scaled_dot_product_attention(X, X, X, is_causal=True)
    with without_functional_dropout():
        assert torch.equal(functional.scaled_dot_product_attention(X, X, X, None, 0.9, True), plain)
        assert not torch.equal(functional.scaled_dot_product_attention(X, X, X), plain)


class StochasticDepth(torch.nn.Module):
    """As torchvision has it."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 0.5


def test_layers_that_ask_no_function() -> None:
    held = functional.dropout  # as `from torch.nn.functional import dropout` does
    module = torch.nn.ModuleList(
        [
            torch.nn.LSTM(8, 8, 2, dropout=0.5),
            torch.nn.Dropout(0.3),
            StochasticDepth(),
            torch.nn.MultiheadAttention(8, 2, 0.5),
            torch.nn.Linear(8, 8),
        ]
    )
    undo = switch_off_dropout(module)
    lstm: torch.nn.LSTM = module[0]  # type: ignore[assignment]
    assert torch.equal(lstm(X)[0], lstm(X)[0]) and torch.equal(module[1](X), X) and module[2].p == 0
    undo()
    assert lstm.dropout == 0.5 and module[1].p == 0.3 and module[2].p == 0.5
    with without_functional_dropout():
        attention = module[3]
        assert torch.equal(attention(X, X, X)[0], attention(X, X, X)[0])
    assert functional.dropout is held
