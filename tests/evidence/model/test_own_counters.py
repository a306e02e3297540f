"""What a module counts for itself in each training_step, where that has an effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.evidence.model.own_counters import list_step_counters


class Base(torch.nn.Module):
    n = 0
    total = 0.0
    steps = torch.zeros(())

    def log(self, *_: Any) -> None:
        pass


class Anneals(Base):
    def training_step(self, batch: Any) -> Any:
        self.n += 1
        return batch * (self.n > 800)


class InHelper(Base):
    def beta(self) -> float:
        self.n = self.n + 1
        return min(1.0, self.n / 100)

    def training_step(self, batch: Any) -> Any:
        return batch * self.beta()


class InBuffer(Base):
    def training_step(self, batch: Any) -> Any:
        self.steps.add_(1)
        return batch * self.steps


class TakesNext(Base):
    def training_step(self, batch: Any) -> Any:
        return batch * next(self.schedule)


class OnlyLogs(Base):
    def training_step(self, batch: Any) -> Any:
        self.n += 1
        self.log("n", self.n)
        return batch


class LogsMean(Base):
    def training_step(self, batch: Any) -> Any:
        self.n += 1
        mean = self.total / self.n
        self.log("mean", mean)
        return batch


class Sums(Base):
    def training_step(self, batch: Any) -> Any:
        self.total += batch.sum()
        return batch * self.total


class Elsewhere(Base):
    def training_step(self, batch: Any) -> Any:
        return batch * self.n

    def on_train_epoch_end(self) -> None:
        self.n += 1


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Anneals, ("self.n",)),
        (InHelper, ("self.n",)),
        (InBuffer, ("self.steps",)),
        (TakesNext, ("self.schedule",)),
        (OnlyLogs, ()),
        (LogsMean, ()),
        (Sums, ()),
        (Elsewhere, ()),
        (Base, ()),
    ],
)
def test_counters(kind: type[Base], found: tuple[str, ...]) -> None:
    assert list_step_counters(kind()) == found
