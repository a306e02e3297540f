"""A vocabulary padded inside a captured graph: equal loss and gradients, only where the loss alone takes the logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastloop.feeds.loss import padding
from fastloop.feeds.loss.padding import PadVocabulary

CLASSES = 8200


class Model(nn.Module):
    """Tokens [B, T] and answers [B, T] to the loss."""

    bias, settings = True, dict[str, Any]()

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES, bias=self.bias)

    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        return F.cross_entropy(self.out(self.embed(tokens)).view(-1, CLASSES), answers.view(-1), **self.settings)


class Tied(Model):
    bias, settings = False, {"ignore_index": 5, "reduction": "sum"}

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = self.embed.weight


class Shifted(Model):
    """The last token has no answer."""

    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        logits = F.linear(self.embed(tokens), self.out.weight, self.out.bias).double()
        return nn.CrossEntropyLoss()(logits[:, :-1, :].contiguous().flatten(0, 1), answers[:, 1:].reshape(-1))


class Shown(Model):
    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        logits = self.out(self.embed(tokens))
        return F.cross_entropy(logits.view(-1, CLASSES), answers.view(-1)), logits


class Smoothed(Model):
    settings = {"label_smoothing": 0.1}


class Turned(Model):
    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        return F.cross_entropy(self.out(self.embed(tokens)).transpose(1, 2), answers)


def run(call: Any, module: nn.Module) -> list[torch.Tensor]:
    tokens = torch.arange(12).view(3, 4) % 7
    found = call(tokens, tokens.flip(1))
    loss = found[0] if isinstance(found, tuple) else found
    return [loss.detach(), *torch.autograd.grad(loss, list(module.parameters()))]


def compiled(module: nn.Module) -> tuple[Any, PadVocabulary]:
    torch._dynamo.reset()
    pad = PadVocabulary()
    return torch.compile(module.forward, backend=lambda graph, _inputs: pad(graph).forward), pad


@pytest.mark.parametrize("kind", [Model, Tied, Shifted])
def test_loss_and_gradients_stay(kind: type[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = kind().double()
    ours = copy.deepcopy(plain)
    call, pad = compiled(ours)
    expected = run(plain, plain)
    for a, b in zip(expected, run(call, ours), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-15)
    assert pad.padded == 1

    monkeypatch.setattr(padding, "BARRED", 0.0)  # what is added would take its share
    call, _ = compiled(ours)
    assert float(run(call, ours)[0] - expected[0]) > 1e-4


def test_a_target_that_is_no_class_stays_an_error() -> None:
    """The first of the classes that were added; as what is ignored it may stand for anything."""
    tokens, answers = torch.arange(12).view(3, 4), torch.full((3, 4), CLASSES)
    call, pad = compiled(Model())
    with pytest.raises(IndexError, match="out of bounds"):
        call(tokens, answers)
    assert pad.padded == 1
    ignoring = Model()
    ignoring.settings = {"ignore_index": CLASSES}
    answers[0, 1] = 5
    expected = ignoring(tokens, answers)
    call, pad = compiled(ignoring)
    torch.testing.assert_close(call(tokens, answers), expected)
    assert pad.padded == 1


@pytest.mark.parametrize("kind", [Shown, Smoothed, Turned])
def test_others_stay_as_they_are(kind: type[Model]) -> None:
    torch.manual_seed(0)
    plain = kind().double()
    call, pad = compiled(copy.deepcopy(plain))
    tokens = torch.arange(12).view(3, 4)
    ours, theirs = call(tokens, tokens), plain(tokens, tokens)
    torch.testing.assert_close(ours, theirs)
    assert pad.padded == 0
