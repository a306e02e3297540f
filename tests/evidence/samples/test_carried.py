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


class Swaps(Items):
    def __getitem__(self, index: int) -> Any:
        mixed = index
        match index % 2:
            case 0:
                mixed = index + self.prev
        (self.prev, self.last), self.seen = (index, index), True
        return mixed


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
        (Swaps, ".prev"),
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


class KeepsShardInHelper(Items):
    def __getitem__(self, index: int) -> Any:
        return self.read(index)

    def read(self, index: int) -> Any:
        if index // 10 != self.shard:
            self.rows = range(index, index + 10)
            self.shard = index // 10
        return self.rows[index % 10]


class KeepsReader(Items):
    def __getitem__(self, index: int) -> Any:
        reader = self.file if self.shard == index // 10 else None
        if reader is None:
            reader = self.file = range(100)
            self.shard = index // 10
        return reader[index]


class ReplacesFile(Items):
    def __getitem__(self, index: int) -> Any:
        self.open(index // 10)
        return self.file[index]

    def open(self, shard: int) -> None:
        if self.file is not None:
            self.file.close()
        self.file = range(shard, 100)


class OpensByFlag(Items):
    def __getitem__(self, index: int) -> Any:
        return self.open()[index]

    def open(self) -> Any:
        if not self.opened:
            self.file = range(100)
            self.opened = True
        return self.file


class OpensPerSample(Items):
    def __getitem__(self, index: int) -> Any:
        try:
            self.file = range(100)
            return self.file[index]
        finally:
            self.file.close()
            self.file = None


class StoresParameters(Items):
    def __getitem__(self, index: int) -> Any:
        return self.apply(self.draw(index)), self.apply(self.draw(index))

    def draw(self, index: int) -> Any:
        self.angle = index
        return self.angle

    def apply(self, angle: int) -> Any:
        return angle + self.angle


class EnsuresTwice(Items):
    def __getitem__(self, index: int) -> Any:
        self.ensure()
        row = self.file[index]
        self.ensure()
        return row

    def ensure(self) -> None:
        if self.file is None:
            self.file = range(100)
            self.view = self.file[:]


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
    "kind",
    [
        *(OpensOnce, OpensInHelper, OpensBehindReturn, OpensAfterError, OpensByFlag, OpensPerSample, ReplacesFile),
        *(KeepsShard, KeepsShardInHelper, KeepsReader, RemembersLast, SetsThenReads, StoresParameters, EnsuresTwice),
    ],
)
def test_what_is_only_set_is_no_hazard(kind: Any) -> None:
    assert find_worker_hazards(kind(shard=None, last=None)) == ()
