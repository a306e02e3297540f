"""What a loader gave to a whole epoch, and whose random numbers have a say in its order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastloop.bridge.trials.drawn_samples import Drawn, Epoch, listen
from fastloop.feeds.lazy_loader import Bounded, clone
from fastloop.feeds.window_batches import WindowSampler
from tests.bridge.trials.test_drawn_samples import Ids, all_of, shuffled


def epoch_of(loader: Any, take: int | None = None) -> tuple[Epoch, Drawn]:
    """What a fresh loader gave to its first epoch, of which so many batches were used."""
    heard, drawn = listen(loader, loader)
    iterator = iter(heard)
    for _ in range(len(loader) if take is None else take):
        next(iterator)
        drawn.take()
    return drawn.epoch(), drawn


def test_an_epoch_in_whatever_order() -> None:
    whole, drawn = epoch_of(shuffled())
    assert whole.complete and whole.again == 0 and drawn.dataset == 20
    assert whole == epoch_of(DataLoader(Ids(), batch_size=3))[0]
    for less in (2, 0):
        cut, _ = epoch_of(shuffled(), less)
        assert not cut.complete and cut.digest != whole.digest and cut.again == 0
    assert drawn.epoch() == epoch_of(shuffled(), 0)[0], "it begins anew"
    dropping, _ = epoch_of(DataLoader(Ids(), batch_size=8, drop_last=True))
    assert dropping.complete and dropping.digest != whole.digest and dropping.again == 0
    twice, _ = epoch_of(DataLoader(Ids(), batch_size=4, sampler=[1, 2, 3, 1, 2, 1]))
    assert twice.complete and twice.again == 3
    assert epoch_of(DataLoader(Ids(), batch_size=4, sampler=[1, -2]))[0].again is None


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_read_ahead_are_not_of_the_epoch(workers: int) -> None:
    heard, drawn = listen(given := DataLoader(Ids(), batch_size=2, num_workers=workers), given)
    iterator = iter(heard)
    for _ in range(8):
        next(iterator)
        drawn.take()
    assert drawn.epoch() == epoch_of(DataLoader(Ids(), batch_size=2), 8)[0]
    del iterator
    list(heard), all_of(drawn)
    assert drawn.epoch().complete


def test_merged_windows_are_complete_without_their_limit() -> None:
    for limit, complete in ((None, True), (3, True), (2, False)):
        given = shuffled()
        windows = WindowSampler(given.batch_sampler, 2, limit)  # type: ignore[arg-type]
        loader, drawn = listen(clone(given, {"batch_sampler": windows}), given)
        list(loader), all_of(drawn)
        assert drawn.epoch().complete == complete, limit


def test_a_batch_sampler_without_a_length_is_complete_at_its_end() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            yield from ([1, 2], [3])

    for ask, complete in ((2, False), (3, True)):
        heard, drawn = listen(given := DataLoader(Ids(), batch_sampler=Endless()), given)  # type: ignore[arg-type]
        iterator = iter(heard)
        used = [next(iterator, None) for _ in range(ask)]
        assert used[1] is not None and len(all_of(drawn)) == 2 and drawn.epoch().complete == complete


GENERATOR = torch.Generator()
SAMPLERS = [
    (RandomSampler(Ids()), False),
    (RandomSampler(Ids(), generator=GENERATOR), True),
    (SubsetRandomSampler([1, 2]), False),
    (WeightedRandomSampler([1.0, 1.0], 2, generator=GENERATOR), True),
    (SequentialSampler(Ids()), True),
    (DistributedSampler(Ids(), 2, 0), True),
    ([1, 2], None),
]


@pytest.mark.parametrize(
    ("sampler", "own"),
    SAMPLERS,
    ids=["random", "own", "subset", "weighted, own", "in order", "distributed", "somebody's"],
)
def test_whose_random_numbers_have_a_say_in_the_order(sampler: Any, own: bool | None) -> None:
    given = DataLoader(Ids(), batch_size=8, sampler=sampler)
    for inner in (given.batch_sampler, WindowSampler(Bounded(given.batch_sampler, lambda: None), 2)):
        assert listen(clone(given, {"batch_sampler": inner}), given)[1].own_order is own
    single = DataLoader(Ids(), batch_size=None, sampler=sampler)
    assert listen(single, single)[1].own_order is own
