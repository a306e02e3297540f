"""Draws from a generator that a sample seeds by its index are the same in every worker; all others are random."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fastloop.evidence.samples.dataset import draws_random
from fastloop.evidence.samples.thread_safety import find_thread_hazards

SHARED = torch.Generator()


class Waves(Dataset[Any]):
    def __init__(self) -> None:
        self.seed = 1

    def __len__(self) -> int:
        return 4


class BySample(Waves):
    def __getitem__(self, index: int) -> Any:
        own = torch.Generator().manual_seed(self.seed * 100_000 + index)
        kind = torch.randint(1, 9, (1,), generator=own).item()
        return kind * torch.randn(8, generator=own)


class OneUnseeded(Waves):
    def __getitem__(self, index: int) -> Any:
        own = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=own) + torch.randn(8)


class Outer(Waves):
    def __getitem__(self, index: int) -> Any:
        return torch.randn(8, generator=SHARED)


class ByClock(Waves):
    def __getitem__(self, index: int) -> Any:
        own = torch.Generator().manual_seed(time.time_ns())
        return torch.randn(8, generator=own)


class ByProcess(Waves):
    def __getitem__(self, index: int) -> Any:
        index = torch.initial_seed()
        own = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=own)


class Computed(BySample):
    @property
    def seed(self) -> int:
        return torch.initial_seed()

    @seed.setter
    def seed(self, value: int) -> None:
        pass


class Replaced(Waves):
    def __getitem__(self, index: int) -> Any:
        own = torch.Generator().manual_seed(index)
        if index:
            own = SHARED
        return torch.randn(8, generator=own)


class SeededAnew(Waves):
    def __getitem__(self, index: int) -> Any:
        own = torch.Generator().manual_seed(index)
        own.seed()
        return torch.randn(8, generator=own)


class Helped(Waves):
    def __getitem__(self, index: int) -> Any:
        return self.draw(time.time_ns())

    def draw(self, index: int) -> Any:
        own = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=own)


def test_a_sample_that_seeds_its_own_generator_draws_nothing_random() -> None:
    assert draws_random(BySample()) == () and find_thread_hazards(BySample()) == ()
    assert torch.equal(BySample()[3], BySample()[3])


@pytest.mark.parametrize(
    "kind",
    [OneUnseeded, Outer, ByClock, ByProcess, Computed, Replaced, SeededAnew, Helped],
    ids=lambda kind: kind.__name__,
)
def test_what_is_not_certain_counts_as_random(kind: type[Waves]) -> None:
    assert len(draws_random(kind())) == 1
