"""Watching leaves every kind of model as it is, bit for bit: those whose attributes compute, or whose backward torch
writes in several ways."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fastloop import FastLoop
from fastloop.bridge.apply import read_training
from fastloop.evidence.work import flops
from tests import models
from tests.torch_version import TORCH


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have compiled something; then nothing is counted, and nothing could differ."""
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        monkeypatch.setattr(dynamo, "counters", {})


class Spectral(nn.Module):
    """Each look at a weight trains its spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            parametrizations.spectral_norm(nn.Conv2d(1, 4, 2)),
            nn.Flatten(),
            parametrizations.spectral_norm(nn.Linear(12, 1)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x.view(-1, 1, 2, 4))
        return out


class Products(nn.Module):
    """A radiance field's transmittance: a cumulative product."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        let_through = torch.cumprod(1 - 0.1 * self.net(x).sigmoid(), 1)
        return let_through.sum(1, keepdim=True)


class Module(L.LightningModule):
    def __init__(self, kind: Callable[[], nn.Module], by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.losses = kind(), list[float]()
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(kind: Callable[[], nn.Module], by_hand: bool, *callbacks: L.Callback) -> tuple[list[float], Any]:
    module = Module(kind, by_hand)
    models.trainer(callbacks=list(callbacks), max_epochs=2).fit(module, models.loader(96))
    return module.losses, models.weights(module)


def is_same(kind: Callable[[], nn.Module], by_hand: bool) -> bool:
    (losses, weights), (others, expected) = (
        train(kind, by_hand, *each) for each in ((FastLoop({"watch": {"warmup_steps": 4}}, quiet=True),), ())
    )
    assert len(others) == 24
    return losses == others and all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("by_hand", [False, True], ids=["", "by hand"])
@pytest.mark.parametrize("kind", [Spectral, Products])
def test_watching_changes_nothing(kind: Callable[[], nn.Module], by_hand: bool) -> None:
    assert is_same(kind, by_hand)


def test_the_same_with_these_looks_is_another_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: counting in such a backward, and reading such a weight."""
    with monkeypatch.context() as patch:
        patch.setattr(flops, "_REFORMED", ())
        assert is_same(Products, by_hand=False) == (TORCH >= (2, 14))  # later ones take the same formula
    usual = read_training.read_evidence

    def look(trainer: Any, *rest: Any) -> dict[str, Any]:
        for part in trainer.lightning_module.modules():
            getattr(part, "weight", None)
        return usual(trainer, *rest)

    monkeypatch.setattr(read_training, "read_evidence", look)
    assert not is_same(Spectral, by_hand=False)


def test_work_that_cannot_be_counted_exactly_is_not_counted() -> None:
    for by_hand, why in (
        (False, "the backward of prod, cumprod or masked_fill"),
        (True, "training_step runs its own backwards"),
    ):
        watch = FastLoop({"watch": {"warmup_steps": 4}}, quiet=True)
        train(Products, by_hand, watch)
        assert watch.measurement is not None
        assert watch.measurement.flops["per_sample"] is None and why in watch.measurement.flops["why"]
