"""The loss rung: cross-entropy over a large vocabulary, as calls of training_step see it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fastloop.errors import ConfigError, NotApplicable
from fastloop.feeds.loss import cross_entropy as losses
from fastloop.records.facts import Facts
from fastloop.rungs.loss import Loss
from tests import models
from tests.rungs.fits import Raises, evidence, fit, loop, same, seeded, verdict

LOSS: dict[str, Any] = {"loss": {}}
USUAL = torch._C._nn.cross_entropy_loss


class Words(models.Regression):
    """A word for each of the 8 numbers, the next one to be told; the embedding is the output layer, too."""

    def __init__(self, words: int = 8200, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(lr=lr)
        self.net: Any = torch.nn.Embedding(words, 16)
        self.words, self.settings = words, settings

    def tell(self, batch: Any) -> torch.Tensor:
        words = (batch[0].abs() * 1000).long() % self.words
        logits = F.linear(self.net(words[:, :-1]), self.net.weight)
        assert logits.shape == (len(words), 7, self.words)
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten(), **self.settings)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.tell(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.tell(batch))


@pytest.mark.parametrize(
    ("settings", "facts", "reason"),
    [
        ({}, {}, None),
        ({"pad_vocabulary": False}, {"device": "cuda", "compiler": "g++"}, None),
        ({}, {"classes": 0}, "no layer has 8,192 outputs or more"),
        ({}, {"device": "cuda"}, "Triton needs a C compiler, and none was found: install gcc or g++"),
        ({"chunks": 4}, {}, "chunks: your module computes the logits before it calls the loss"),
    ],
)
def test_plan(settings: dict[str, Any], facts: dict[str, Any], reason: str | None) -> None:
    rung = Loss(enabled=True, **settings)
    if reason is not None:
        with pytest.raises(NotApplicable, match=re.escape(reason)):
            rung.plan(Facts(**{"classes": 9000, **facts}))
        return
    change = rung.plan(Facts(**{"classes": 9000, **facts}))
    assert [(action.keys, action.when) for action in change.actions] == [(("model.loss",), "model")]
    assert change.parity == "approximate" and change.evaluation


def test_no_piece_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"loss\.chunks"):
        Loss(chunks=0)


def test_takes() -> None:
    watcher, trainer = fit(LOSS, seeded(Words), val=models.loader(16), num_sanity_val_steps=0)
    assert evidence(watcher, "loss")["calls"] == trainer.global_step + 2
    assert verdict(watcher, "loss").took is True
    start = "10 losses over 8,200 classes read and wrote the logits once each; the first deviated by "
    assert verdict(watcher, "loss").why.startswith(start)
    inside = float(trainer.callback_metrics["val_loss"])
    trainer.validate(trainer.lightning_module, models.loader(16), verbose=False)
    assert float(trainer.callback_metrics["val_loss"]) == inside

    rows, _ = fit({"loss": {"pad_vocabulary": True}}, seeded(Words))
    assert "once each, their gradient in rows of 8,256; " in verdict(rows, "loss").why
    off, _ = fit({}, seeded(Words))
    assert not evidence(off, "loss") and torch._C._nn.cross_entropy_loss is USUAL


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"words": 100}, "no layer has 8,192 outputs or more"),
        ({"label_smoothing": 0.1}, "no cross_entropy over a large vocabulary ran: it has class weights"),
    ],
)
def test_says_why_it_does_not_take(settings: dict[str, Any], why: str) -> None:
    ours, plain = seeded(Words, **settings), seeded(Words, **settings)
    watcher, _ = fit(LOSS, ours)
    fit(None, plain)
    assert verdict(watcher, "loss").took is False and verdict(watcher, "loss").why.startswith(why)
    assert same(models.weights(ours), models.weights(plain))


def test_a_shipped_ladder_compiles_no_kernels() -> None:
    """Their seconds need not pay back in the run; losses in compiled graphs are changed all the same."""
    ours, plain = seeded(Words), seeded(Words)
    watcher = loop(LOSS)
    object.__setattr__(watcher.config, "by_ladder", frozenset({"loss"}))
    models.trainer(callbacks=[watcher]).fit(ours, models.loader())
    fit(None, plain)
    assert evidence(watcher, "loss")["calls"] == 0 and verdict(watcher, "loss").took is False
    assert "none inside them qualifies" in verdict(watcher, "loss").why
    assert same(models.weights(ours), models.weights(plain))


def test_parity() -> None:
    def weights(rungs: Any, **settings: Any) -> dict[str, torch.Tensor]:
        module = seeded(Words, **settings)
        fit(rungs, module, max_epochs=2)
        return models.weights(module)

    plain, ours = weights(None), weights(LOSS)
    assert ours.keys() == plain.keys() and models.distance(plain, ours) < 1e-6
    assert models.distance(plain, weights(LOSS, lr=0.1)) > 1e-6


class Inside(Words):
    """The inner module returns the loss."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = torch.nn.Embedding(8200, 16), torch.nn.Linear(16, 8200)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            logits = self.out(self.embed(words[:, :-1]))
            return F.cross_entropy(logits.reshape(-1, 8200), words[:, 1:].reshape(-1))

    def __init__(self) -> None:
        super().__init__()
        self.net = Inside.Net()

    def tell(self, batch: Any) -> torch.Tensor:
        return self.net((batch[0].abs() * 1000).long() % 8200)


def test_compiled_graphs_are_padded_where_they_hold_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compiled: list[str] = []

    def run(graph: Any, _inputs: Any, **_settings: Any) -> Any:
        compiled.append(str(graph.code))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", run)
    ours, plain = seeded(Inside), seeded(Inside)
    watcher, _ = fit({"loss": {}, "compile": {"scope": "model"}}, ours)
    fit(None, plain)
    assert len(compiled) == 1 and "8256" in compiled[0]
    assert evidence(watcher, "loss")["padded"] == 1 and verdict(watcher, "loss").took is True
    assert models.weights(ours).keys() == models.weights(plain).keys()
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-6


def test_a_wrong_kernel_changes_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    really, asked = losses.write_gradient, []

    def wrong(*args: Any) -> None:
        really(*args)
        if not asked:
            args[4].mul_(1.5)
        asked.append(args)

    monkeypatch.setattr(losses, "write_gradient", wrong)
    ours, plain = seeded(Words), seeded(Words)
    watcher, _ = fit(LOSS, ours)
    fit(None, plain)
    assert len(asked) == 2, "once, and once more for this gradient"
    assert verdict(watcher, "loss").took is False
    assert "the first rows deviate by 0.5 from PyTorch's own cross_entropy" in verdict(watcher, "loss").why
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-6


def test_undo() -> None:
    fit(LOSS, seeded(Words))
    assert torch._C._nn.cross_entropy_loss is USUAL
    watcher = loop(LOSS)
    with pytest.raises(RuntimeError, match="planted"):
        models.trainer(callbacks=[watcher, Raises()]).fit(seeded(Words), models.loader())
    assert torch._C._nn.cross_entropy_loss is USUAL and verdict(watcher, "loss").took is True
    watcher, _ = fit(LOSS, seeded(Words))
    assert verdict(watcher, "loss").took is True
