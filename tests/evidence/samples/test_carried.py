"""State that one sample sets for the next, and what only looks like it."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.evidence.samples.dataset import find_worker_hazards
from tests.evidence.samples.test_thread_safety import Items

LAST = 0


class MixesWithPrevious(Items):
    def __getitem__(self, index: int) -> Any:
        previous = index if self.prev is None else self.prev
        self.prev = index
        return index + previous


class Smooths(Items):
    def __getitem__(self, index: int) -> Any:
        before = self.prev
        self.prev = 0.5 * before + index
        return self.prev


class AsksForPrevious(Items):
    def __getitem__(self, index: int) -> Any:
        if self.prev is not None:
            index = index + self.prev
        self.prev, self.last = index, 0
        return index


class ReadsInHelper(Items):
    def __getitem__(self, index: int) -> Any:
        mixed = self.mix(index)
        self.prev = index
        return mixed

    def mix(self, index: int) -> Any:
        return index + self.prev


class SetsInHelper(Items):
    def __getitem__(self, index: int) -> Any:
        mixed = index + self.prev
        self.remember(index)
        return mixed

    def remember(self, index: int) -> Any:
        self.keep(index)

    def keep(self, index: int) -> Any:
        self.prev = index


class CarriesInGlobal(Items):
    def __getitem__(self, index: int) -> Any:
        global LAST
        mixed = index + LAST
        LAST = index
        return mixed


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (MixesWithPrevious, ".prev"),
        (Smooths, ".prev"),
        (AsksForPrevious, ".prev"),
        (ReadsInHelper, ".prev"),
        (SetsInHelper, ".prev"),
        (CarriesInGlobal, " (the outer LAST)"),
    ],
)
def test_what_one_sample_leaves_for_the_next(kind: Any, state: str) -> None:
    found = find_worker_hazards(kind(prev=None))
    assert found == (f"dataset{state} changes between epochs or samples, and workers hold copies of it",)


# -- the controls: set, and the same in every worker ------------------------------------------------------------------


class OpensOnce(Items):
    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = self.open()
        return self.file[index]

    def open(self) -> Any:
        return range(100)


class OpensInHelper(Items):
    def __getitem__(self, index: int) -> Any:
        if not hasattr(self, "file"):
            self.open()
        return self.file[index]

    def open(self) -> None:
        self.pages = range(100)
        self.file = self.pages[:]


class OpensBehindReturn(Items):
    def __getitem__(self, index: int) -> Any:
        if self.file is not None:
            return self.file[index]
        self.file = range(100)
        return self.file[index]


class OpensAfterError(Items):
    def __getitem__(self, index: int) -> Any:
        try:
            return self.file[index]
        except TypeError:
            self.file = range(100)
        return self.file[index]


class KeepsShard(Items):
    def __getitem__(self, index: int) -> Any:
        if self.shard != index // 10:
            self.rows = range(index, index + 10)
            self.shard = index // 10
        return self.rows[index % 10]


class RemembersLast(Items):
    def __getitem__(self, index: int) -> Any:
        if index == self.last:
            return self.sample
        self.sample = index * index
        self.last = index
        return self.sample


class SetsThenReads(Items):
    def __getitem__(self, index: int) -> Any:
        self.size = index + 1
        with self.lock:
            for _ in range(self.size):
                self.size = index
        return self.size if callable(self.make) else None


@pytest.mark.parametrize(
    "kind", [OpensOnce, OpensInHelper, OpensBehindReturn, OpensAfterError, KeepsShard, RemembersLast, SetsThenReads]
)
def test_what_is_only_set_is_no_hazard(kind: Any) -> None:
    assert find_worker_hazards(kind(shard=None, last=None)) == ()
