"""A call that fails inside an activation checkpoint leaves nothing behind that later checkpoints would trip over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fastloop import FastLoop
from fastloop.bridge.apply.state import untouched
from fastloop.bridge.apply.state.checkpoints import end_checkpoints
from tests.torch_version import TORCH


class Refused(ValueError):
    """Stays, and with it its frames, as errors of a compile do, which refer to each other."""

    every: ClassVar[list[Refused]] = []

    def __init__(self) -> None:
        super().__init__("no 16-bit numbers here")
        Refused.every.append(self)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """What the controls leave behind is ended before other tests."""
    yield
    while Refused.every:
        end_checkpoints(Refused.every.pop())


def refuse(_: torch.Tensor) -> torch.Tensor:
    raise Refused


def train() -> None:
    """A backward pass whose forward is run again."""
    inner, numbers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.ones(2, 4, requires_grad=True)
    checkpoint(inner, numbers, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("depth", [1, 2])
def test_later_checkpoints_work(depth: int) -> None:
    def fail(numbers: torch.Tensor, left: int = depth) -> Any:
        if left == 0:
            return refuse(numbers)
        return checkpoint(lambda given: fail(given, left - 1), numbers, use_reentrant=False)

    with pytest.raises(Refused) as raised:
        fail(torch.ones(2, 4, requires_grad=True))
    if TORCH < (2, 14):  # control; later ones end them by themselves
        with pytest.raises((CheckpointError, Refused)):
            train()
    end_checkpoints(raised.value)
    train()
    end_checkpoints(raised.value)
    train()


class Block(torch.nn.Module):
    """Is run again in the backward pass; takes no 16-bit numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, numbers: torch.Tensor) -> Any:
        return checkpoint(self.run, numbers, use_reentrant=False)

    def run(self, numbers: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(numbers)
        return refuse(out) if out.dtype == torch.bfloat16 else out.tanh()


class Stacked(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(Block(), Block())
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(*callbacks: Any) -> list[float]:
    torch.manual_seed(0)
    module = Stacked()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[*callbacks], **quiet)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(12, 4)), 2))
    return module.losses


def test_a_rung_that_fails_inside_one_ends_no_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loop = FastLoop({"rungs": {"amp": {"enabled": True}}}, quiet=True)
    assert fit(loop) == fit()
    assert "no 16-bit numbers" in str(loop.plan)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where it is not known to fail
    monkeypatch.setattr(untouched, "end_checkpoints", lambda error: None)  # control
    with pytest.raises((CheckpointError, Refused)) if TORCH < (2, 14) else contextlib.nullcontext():
        fit(FastLoop({"rungs": {"amp": {"enabled": True}}}, quiet=True))
