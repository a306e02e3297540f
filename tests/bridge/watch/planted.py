"""A training of two layers with a nap planted in a place of the test's choice.

Naps and arithmetic pass on a clock of their own: what other processes do to this one takes none of its time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, Dataset

from fastloop import FastLoop
from fastloop.records.measurement import Measurement
from tests.models import Regression, trainer

NAP_MS = 20.0
STEPS = 24
"""Optimizer steps of a fit, in epochs of `EPOCH` steps, the first two of them warm-up."""
EPOCH, BATCH = 8, 8

slept_s = 0.0
"""By the clock of this file."""
begun_s = 0.0
"""`slept_s` when the last fit began."""
places: set[str] = set()
"""Where to sleep."""


def nap(place: str) -> None:
    if place in places:
        sleep(NAP_MS / 1e3)


def count_naps() -> int:
    """Of the last fit. From the time, as `batch` refuses a training_step that counts its calls."""
    return round((slept_s - begun_s) / (NAP_MS / 1e3))


def sleep(seconds: float) -> None:
    """Let this time pass at once."""
    global slept_s
    slept_s += seconds


def read_slept_s() -> float:
    return slept_s


def read_clock_s() -> float:
    """The seconds of naps and of arithmetic."""
    return time.process_time() + slept_s


def use_clock(patch: pytest.MonkeyPatch) -> None:
    """Let what watches a fit read this clock."""
    for name in ("evidence.clock.step_clock", "evidence.clock.one_time", "bridge.watch.drift_checks"):
        patch.setattr(f"fastloop.{name}.now", read_clock_s)
    for name in ("window", "phases", "log_marks"):
        clocks = SimpleNamespace(monotonic=read_clock_s, perf_counter=read_clock_s)
        patch.setattr(f"fastloop.bridge.watch.{name}.time", clocks)
    patch.setattr("fastloop.evidence.clock.step_clock.read_off_cpu_s", read_slept_s)


class Data(Dataset[Any]):
    """Sleeps once a batch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if index % BATCH == 0:
            nap("dataset")
        x = torch.arange(8.0) + index
        return x.cos(), x.sum().sin()[None]


def collate(samples: Sequence[Any]) -> Any:
    nap("collate")
    return torch.utils.data.default_collate(samples)


class Sleepy(Regression):
    """Sleeps in its steps, its hooks, its backward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        list(self.net.parameters())[-1].register_hook(lambda _: nap("backward"))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        nap("training_step")
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        nap("validation_step")
        super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        nap("on_train_epoch_end")

    def on_after_backward(self) -> None:
        nap("module.on_after_backward")

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        nap("transfer_batch_to_device")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def configure_optimizers(self) -> Any:
        return SleepySgd(self.parameters(), lr=0.01)


class SleepySgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        nap("optimizer")
        return out


class SleepyCallback(L.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        nap("on_train_batch_start")

    def on_before_zero_grad(self, *_: Any) -> None:
        nap("on_before_zero_grad")

    def on_train_batch_end(self, *_: Any) -> None:
        nap("on_train_batch_end")

    def on_train_epoch_start(self, *_: Any) -> None:
        nap("on_train_epoch_start")


class SleepyLogger(Logger):
    name = version = None

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        nap("logger")

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


class SleepyIO(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        nap("save_checkpoint")
        super().save_checkpoint(*args, **kwargs)


def batches(count: int = EPOCH) -> DataLoader[Any]:
    return DataLoader(Data(count * BATCH), batch_size=BATCH, collate_fn=collate)


def watched(
    place: str | None = None,
    module: L.LightningModule | None = None,
    train: Any = None,
    *,
    val: Any = None,
    config: Mapping[str, Any] | None = None,
    callbacks: Sequence[Any] = (),
    hunt_syncs: bool = False,
    **settings: Any,
) -> Measurement:
    """What FastLoop measured in a fit that sleeps in one place."""
    global begun_s
    begun_s = slept_s
    places.clear()
    places.update([place] if place else [])
    loop = FastLoop({"watch": {"warmup_steps": 2}, **(config or {})}, quiet=True)
    loop.hunt_syncs = hunt_syncs
    settings = {"max_epochs": -1, "max_steps": STEPS, **settings}
    try:
        with pytest.MonkeyPatch.context() as patch:
            use_clock(patch)
            made = trainer(callbacks=[SleepyCallback(), *callbacks, loop], **settings)
            made.fit(module or Sleepy(), train if train is not None else batches(), val)
    finally:
        places.clear()
    assert place is None or count_naps() > 0, f"nothing slept in {place}"
    assert loop.measurement is not None and not loop._stopped
    return loop.measurement
