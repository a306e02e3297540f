"""Batches that wait on the device: made anew once the training has changed what their samples are read from."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from fastloop.feeds.device_prefetcher import DeviceFeed
from fastloop.feeds.lazy_loader import clone
from fastloop.feeds.made_anew import DrawnIndices, watch_loader
from fastloop.feeds.workers.next_epoch import find_sampler


class Levels(Dataset[Any]):
    """Samples read a level and a table, which the training may change."""

    def __init__(self, rows: int = 22) -> None:
        self.level, self.table, self.notes = 0, np.zeros(rows), dict[int, int]()

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        self.notes[index] = self.notes.get(index, 0) + 1  # left behind by a sample: no change
        return torch.tensor(index + self.level + self.table[index])


class Together(Levels):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] + 0.5 for index in indices]


class Stream(IterableDataset[Any]):
    level = 0

    def __iter__(self) -> Any:
        return (torch.tensor(index + self.level) for index in range(22))


def make_feed(loader: Any, watched: bool = True) -> tuple[Any, list[tuple[str, int]]]:
    told = list[tuple[str, int]]()
    ours = clone(loader, {})
    watch = watch_loader(ours, loader) if watched else None
    feed = DeviceFeed(
        ours,
        depth=2,
        device=torch.device("cpu"),
        stage=lambda batch: batch,
        watch=watch,
        step_down=lambda *how: told.append(how),
    )
    return feed, told


def train(loader: Any, dataset: Any, change: Any) -> list[Any]:
    """Two epochs; after the second batch of the first, the training changes the dataset."""
    torch.manual_seed(3)
    seen: list[Any] = []
    for _ in range(2):
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == 2:
                change(dataset)
    return seen


def set_level(dataset: Any) -> None:
    dataset.level = 100


def set_table(dataset: Any) -> None:
    dataset.table[:] = 100


@pytest.mark.parametrize("kind", [Levels, Together])
@pytest.mark.parametrize("change", [set_level, set_table])
@pytest.mark.parametrize("whole", [False, True])
def test_waiting_batches_are_made_anew(kind: Any, change: Any, whole: bool) -> None:
    def make(dataset: Any) -> Any:
        sampler = RandomSampler(dataset)
        return DataLoader(dataset, batch_size=None, sampler=sampler) if whole else DataLoader(dataset, 4, shuffle=True)

    expected = train(make(again := kind()), again, change)
    feed, told = make_feed(make(dataset := kind()))
    assert train(feed, dataset, change) == expected and feed.depth == 0
    place = "dataset" if change is set_level else "dataset.table"
    assert told == [(f"{place} changed while batches waited on the device", 0)]
    unwatched, _ = make_feed(make(dataset := kind()), watched=False)
    assert train(unwatched, dataset, change) != expected, "else this test shows nothing"


def test_what_samples_leave_behind_is_no_change() -> None:
    feed, told = make_feed(DataLoader(dataset := Levels(), 4))
    train(feed, dataset, lambda _: None)
    assert told == [] and feed.depth == 2 and feed.seen["ahead_batches"] > 0
    assert set(dataset.notes.values()) == {2}, "no sample was made once more"


def test_what_cannot_be_made_anew_is_owned_up() -> None:
    feed, told = make_feed(DataLoader(dataset := Levels(10**5), 4))
    train(feed, dataset, set_table)
    ((why, outdated),) = told
    assert why.startswith("dataset.table changed") and outdated >= 4, "a large table may have changed earlier"
    feed, told = make_feed(DataLoader(stream := Stream(), 4))
    train(feed, stream, set_level)
    assert told == [("dataset changed while batches waited on the device", 2)], "a stream has no indices"


def test_a_callback_that_reads_the_loader_meanwhile_does_not_mix_them_up() -> None:
    def read_and_change(dataset: Any) -> None:
        next(iter(reads[0]))
        set_level(dataset)

    reads: list[Any] = [DataLoader(again := Levels(), 4)]
    expected = train(reads[0], again, read_and_change)
    reads[0], told = make_feed(DataLoader(dataset := Levels(), 4))
    assert train(reads[0], dataset, read_and_change) == expected and len(told) == 1


def test_the_users_loader_stays_and_looks_the_same() -> None:
    own = DataLoader(Levels(), 4)
    ours = clone(own, {})
    assert watch_loader(ours, own) is not None
    assert type(own.batch_sampler) is BatchSampler and type(ours.batch_sampler) is DrawnIndices
    assert isinstance(ours.batch_sampler, BatchSampler) and type(copy.copy(ours).batch_sampler) is DrawnIndices
    assert type(copy.deepcopy(ours.batch_sampler)) is BatchSampler
    assert find_sampler(ours.batch_sampler) is own.batch_sampler, "whose order can be predicted"


def test_loaders_whose_batches_cannot_be_outdated_or_are_unknown_are_left_alone() -> None:
    own = DataLoader(Levels(), 4)
    assert watch_loader(own, own) is None, "it is the user's"
    theirs = DataLoader(Levels(), 4, num_workers=1)
    assert watch_loader(clone(theirs, {}), theirs) is None and watch_loader([1], [1]) is None
