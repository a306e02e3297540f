"""A run with rungs and the plain run beside it: one module that records everything two runs can differ in."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fastloop import FastLoop, Verdict
from fastloop.feeds.batch_tree import count_rows
from fastloop.rungs.prefetch import Prefetch
from tests import models

Rungs = Mapping[str, Mapping[str, Any]] | None


class KeepsTrainers(L.Callback):
    """Keeps the trainers of the fits that it is in, also of those that raise."""

    def __init__(self) -> None:
        self.trainers: list[Any] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainers.append(trainer)


def numbered(samples: int = 20, seed: int = 0) -> TensorDataset:
    """`samples` of x [8], y [1] and their own number."""
    x, y = models.pairs(samples, seed).tensors
    return TensorDataset(x, y, torch.arange(samples))


def batches(samples: int = 20, batch_size: int = 8, **settings: Any) -> DataLoader[Any]:
    return DataLoader(numbered(samples), batch_size=batch_size, **settings)


class Holds(Dataset[Any]):
    """Forty numbered samples in an object with these attributes."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)
        self.rows = numbered(40)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Counts(Holds):
    """Counts its samples: ``count`` must be given."""

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return super().__getitem__(index)


class Net(L.LightningModule):
    """Regression on numbered samples.

    Args:
        optimizer: its class; `options` are its arguments.
        schedule: called with the optimizer and the module, returns a scheduler or Lightning's dictionary for one.
    """

    def __init__(
        self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, schedule: Any = None, **options: Any
    ) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer, self.schedule, self.options = optimizer, schedule, {"lr": 0.05, **options}
        self.samples: list[list[int]] = []
        """Numbers of the samples of each optimizer step."""
        self._since_step: list[int] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._since_step += batch[2].tolist()
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.samples.append(self._since_step)
        self._since_step = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), **self.options)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer, self)}


class Record(L.Callback):
    """What a user's callback sees, in order."""

    def __init__(self) -> None:
        self.hooks: list[tuple[Any, ...]] = []
        self.rates: list[float] = []
        """Learning rate of each optimizer step."""
        self.validated: list[int] = []
        """Optimizer steps done at each validation."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.hooks.append(("start", batch_idx, count_rows(batch), trainer.global_step))

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.hooks.append(("zero_grad", trainer.global_step))

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.hooks.append(("backward", trainer.global_step))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.hooks.append(("step", trainer.global_step))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooks.append(("end", batch_idx, trainer.global_step, sorted(outputs or {})))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)
            self.hooks.append(("validation", trainer.global_step))

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.hooks.append(("save", trainer.global_step))


@dataclass
class Run:
    """One finished fit."""

    loop: FastLoop | None
    trainer: L.Trainer
    module: Any
    record: Record

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return models.weights(self.module)

    def verdict(self, rung: str) -> Verdict:
        assert self.loop is not None
        return next(verdict for verdict in self.loop.verdicts if verdict.rung == rung)

    def seen(self, rung: str) -> Mapping[str, Any]:
        assert self.loop is not None and self.loop.measurement is not None
        return self.loop.measurement.evidence.get(rung, {})

    def reason(self, rung: str) -> str | None:
        """Why a rung was skipped; None where it was not."""
        assert self.loop is not None
        step = self.loop.plan.step(rung)
        assert step is not None
        return step.reason if step.status == "skipped" else None


def watching(rungs: Rungs, *, rehearsal: str = "on", **settings: Any) -> FastLoop:
    config = {
        "rehearsal": rehearsal,
        "rungs": {name: {"enabled": True, **keys} for name, keys in (rungs or {}).items()},
    }
    return FastLoop({**config, "watch": {"warmup_steps": 1}}, quiet=True, **settings)


def run(
    rungs: Rungs,
    train: Any,
    module: Any = None,
    *,
    val: Any = None,
    ckpt: Any = None,
    datamodule: Any = None,
    callbacks: tuple[Any, ...] = (),
    strict: bool | None = None,
    **settings: Any,
) -> Run:
    """Fit from the same seeds; ``rungs=None`` is the plain run, without our callback."""
    loop = None if rungs is None else watching(rungs, strict=strict)
    torch.manual_seed(0)
    made = Net() if module is None else module() if callable(module) and not isinstance(module, Net) else module
    record = Record()
    trainer = models.trainer(callbacks=[record, *callbacks, *([loop] if loop else [])], **settings)
    torch.manual_seed(1)
    trust = {"weights_only": False} if ckpt and "weights_only" in inspect.signature(trainer.fit).parameters else {}
    trainer.fit(made, train, val, datamodule=datamodule, ckpt_path=ckpt, **trust)
    return Run(loop, trainer, made, record)


def both(rungs: Rungs, train: Any, module: Any = None, **settings: Any) -> tuple[Run, Run]:
    """The plain run and the run with rungs. `train` and `module` are called anew for each."""

    def fit(which: Rungs) -> Run:
        anew = {name: value() if name in ("val", "callbacks") else value for name, value in settings.items()}
        return run(which, train(), module, **anew)

    return fit(None), fit(rungs)


def distance(a: Run, b: Run) -> float:
    """Largest per-tensor relative difference of the weights, ||a - b|| / ||a||."""
    first, second = (
        {name: tensor for name, tensor in run.weights.items() if tensor.is_floating_point()} for run in (a, b)
    )
    return models.distance(first, second)


def feed_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the prefetch rung apply on the CPU, where it has nothing to copy, to try everything around it."""
    planned = Prefetch.plan
    monkeypatch.setattr(Prefetch, "plan", lambda rung, facts: planned(rung, dataclasses.replace(facts, device="cuda")))
