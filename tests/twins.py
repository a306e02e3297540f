"""Two trainings that should be the same one, in this process: their ledgers, gradients and losses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Sampler

from fastloop.bridge.trials.gradient_probe import GradientProbe
from fastloop.bridge.trials.sample_ledger import Ledger
from fastloop.judge import parity
from fastloop.records import store, trial
from fastloop.records.experiment import Gate
from fastloop.records.store import read
from tests import models, runs

PLAIN: dict[str, Any] = {"regrouped": False, "reshuffled": False, "parity_class": "exact"}
"""What the judge of ledgers is told of a rung that leaves batches and draws alone."""


class Twin(L.LightningModule):
    """Regression with dropout, AdamW and a learning rate that falls; its losses are kept."""

    fired = 0
    """How often a planted wrong struck."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 32)
        self.second = torch.nn.Linear(32, 16)
        self.drop = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(16, 1)
        self.losses: list[float] = []

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(out, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.last(self.drop(torch.tanh(self.hidden(batch[0])))), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Order(Sampler[int]):
    """Another order each epoch, whatever else draws random numbers."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed, self.epoch = samples, seed, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        generator = torch.Generator().manual_seed(100 * self.seed + self.epoch)
        yield from torch.randperm(self.samples, generator=generator).tolist()


def shuffled(samples: int = 96, batch_size: int = 8, seed: int = 3, **settings: Any) -> DataLoader[Any]:
    return DataLoader(models.pairs(samples), batch_size=batch_size, sampler=Order(samples, seed), **settings)


def made(kind: Any, rungs: runs.Rungs, **settings: Any) -> tuple[Any, L.Trainer]:
    """A module with the weights that this seed gives, and a Trainer with these rungs."""
    torch.manual_seed(0)
    module = kind()
    loop = [] if rungs is None else [runs.watching(rungs, rehearsal="off")]  # as trials have it
    return module, models.trainer(callbacks=loop, **{"accumulate_grad_batches": 4, **settings})


def ledger(
    out: Path, kind: Any = Twin, train: Any = shuffled, rungs: runs.Rungs = None, **settings: Any
) -> tuple[dict[str, Any], Any]:
    """What a fit wrote down, and its module."""
    module, trainer = made(kind, rungs, **settings)
    Ledger.into(trainer, out)
    torch.manual_seed(1)
    trainer.fit(module, train())
    return json.loads((out / "ledger.json").read_text()), module


def judge_ledgers(base: Mapping[str, Any], arm: Mapping[str, Any], **settings: Any) -> Gate:
    """The ledger gate between what two fits wrote down."""
    first, second = (store.decode(content, trial.Ledger) for content in (base, arm))
    assert first is not None and second is not None
    return parity.judge_ledger([(first, second)], **{**PLAIN, **settings})


def gradient(
    out: Path,
    reference: Path | None = None,
    kind: Any = Twin,
    train: Any = shuffled,
    rungs: runs.Rungs = None,
    **settings: Any,
) -> tuple[dict[str, Any], Any]:
    """What a probe answered, as it reads in answer.json, and its module."""
    module, trainer = made(kind, rungs, **settings)
    probe = GradientProbe.into(trainer, out, reference)
    torch.manual_seed(1)
    trainer.fit(module, train())
    store.write(out, {"answer.json": store.dump(probe.answer)})
    return read(out / "answer.json") or {}, module


def losses(kind: Any = Twin, rungs: runs.Rungs = None, runs: int = 3, **settings: Any) -> list[list[float]]:
    """The losses of so many fits, each with a seed of its own."""
    found = []
    for seed in range(runs):
        module, trainer = made(kind, rungs, **settings)
        torch.manual_seed(100 + seed)
        trainer.fit(module, shuffled(seed=seed))
        found.append(module.losses)
    return found
