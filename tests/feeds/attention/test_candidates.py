"""Which modules may hold attention by hand: by what their code does, not by what they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.feeds.attention.candidates import list_candidates, list_sdpa, switch_back_for_weights, switch_models
from tests.feeds.attention import spellings


class Ready(spellings.Spelling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(torch.nn.functional.scaled_dot_product_attention(*self.split(x), is_causal=True))


class Around(torch.nn.Module):
    """Calls others, and takes a softmax without a product."""

    def __init__(self, *inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.inner:
            x = each(x)
        return x.softmax(-1)


def test_modules_are_found_by_their_own_code() -> None:
    model = Around(*(kind() for kind in spellings.SPELLINGS), Ready(), torch.nn.MultiheadAttention(16, 2))
    places = [f"inner.{place}" for place in range(len(spellings.SPELLINGS))]
    assert list_candidates(torch.nn.Sequential(model)) == [f"0.{place}" for place in places]
    ready = len(spellings.SPELLINGS)
    assert list_sdpa(model) == [f"inner.{ready}", f"inner.{ready + 1}"]


class Config:
    _attn_implementation = "eager"


class Switchable(torch.nn.Module):
    """As Hugging Face's models are switched."""

    def __init__(self, *, refuses: bool = False, inner: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.config, self.refuses, self.inner = Config(), refuses, inner

    def set_attn_implementation(self, name: str) -> None:
        if self.refuses:
            raise ValueError("does not support it yet")
        self.config._attn_implementation = name

    def forward(self, *, output_attentions: bool = False) -> str:
        return self.config._attn_implementation


def test_models_with_a_switch_are_switched_once_where_they_can_be() -> None:
    outer, stubborn = Switchable(inner=Switchable()), Switchable(refuses=True)
    assert switch_models(torch.nn.ModuleList([outer, stubborn])) == [outer]
    assert outer.config._attn_implementation == "sdpa" and stubborn.config._attn_implementation == "eager"
    assert switch_models(outer) == []


def test_models_that_give_their_weights_out_run_by_hand() -> None:
    gives, model = Switchable(), Switchable(inner=Switchable())
    gives.config.output_attentions = True  # type: ignore[attr-defined]
    assert switch_models(gives) == [] and switch_models(model) == [model] and model.inner is not None
    undo = switch_back_for_weights(model)
    assert model(output_attentions=False) == "sdpa"
    model.inner(output_attentions=True)
    assert model() == "eager", "sdpa gives no weights"
    undo()
    assert not any(each._forward_pre_hooks for each in model.modules())


def test_hugging_faces_own_switch() -> None:
    transformers: Any = pytest.importorskip("transformers")
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    config = transformers.GPT2Config(**settings, attn_implementation="eager", resid_pdrop=0, attn_pdrop=0, embd_pdrop=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.arange(8)[None]
    before = model(tokens).logits
    assert switch_models(torch.nn.Sequential(model)) == [model]
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-5)
