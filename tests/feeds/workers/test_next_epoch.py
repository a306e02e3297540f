"""The next epoch's first batches, made before it begins: samples, order and random streams are those of a plain run."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastloop.feeds.lazy_loader import LazyLoader, begin_unchanged, clone
from fastloop.feeds.place.draws import Draws
from fastloop.feeds.place.kept_order import KeptOrder
from fastloop.feeds.workers import more_workers, next_epoch
from fastloop.feeds.workers.ending import end_workers
from fastloop.feeds.workers.fresh_workers import FreshWorkers
from fastloop.feeds.workers.more_workers import MoreWorkers
from fastloop.feeds.workers.next_epoch import NextEpoch
from fastloop.feeds.workers.pace import Left, Pace
from fastloop.feeds.workers.tried_workers import TriedWorkers

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore:This DataLoader will create")]

MADE = multiprocessing.RawArray("i", 64)


class Numbers(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        MADE[index] += 1
        return index


class Odd(Sampler):
    """Of no kind that torch knows."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(64).tolist()

    def __len__(self) -> int:
        return 64


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"shuffle": True},
    "in order": dict,
    "by a generator": lambda: {"shuffle": True, "generator": seeded()},
    "by its sampler's own": lambda: {"sampler": RandomSampler(Numbers(), generator=seeded())},
    "a subset": lambda: {"sampler": SubsetRandomSampler(range(40))},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 64, 64)},
    "replaced": lambda: {"sampler": RandomSampler(Numbers(), replacement=True, num_samples=48)},
    "a rank's share": lambda: {"sampler": DistributedSampler(Numbers(), num_replicas=2, rank=1)},
    "short epochs": lambda: {"sampler": SubsetRandomSampler(range(7))},
    "its own batches": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(Numbers()), 3, drop_last=True),
        "batch_size": 1,
    },
    "no batches": lambda: {"shuffle": True, "batch_size": None},
}


def make(inner: Any = None, left: int | None = None, draws: int | None = 0, **settings: Any) -> tuple[Any, NextEpoch]:
    """A stand-in for a loader of which a rung keeps the workers."""
    loader = DataLoader(Numbers(), **{"batch_size": 4, "num_workers": 2, **settings})
    ahead = NextEpoch(count_next=lambda: left, count_draws=lambda: draws, draws_seed=not loader.persistent_workers)
    epochs = FreshWorkers(tell=lambda _: None, epochs=begin_unchanged if inner is None else inner.batches)

    def batches(loader: Any, begin: Any) -> Any:
        return epochs.batches(loader, partial(ahead.begin, loader, begin))

    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    kept = KeptOrder(getattr(loader, name), Draws(loader, 1), take=lambda: None, warn=lambda _: None)
    changed = clone(loader, {"persistent_workers": True, name: kept})
    return LazyLoader(changed, epochs=batches, keeps_iterator=loader.persistent_workers, at_once=lambda: True), ahead


def read(loader: Any, between: Callable[[int], object] = lambda epoch: None, epochs: int = 4) -> tuple[Any, float]:
    """Each epoch's samples, and what the process draws next; `between` is called after each."""
    torch.manual_seed(3)
    order = []
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        order.append([sample for batch in loader for sample in torch.as_tensor(batch).reshape(-1).tolist()])
        between(epoch)
    return order, float(torch.rand(1))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_order_and_streams_stay(kind: str, persistent: bool) -> None:
    loader, ahead = make(persistent_workers=persistent, **LOADERS[kind]())
    plain = DataLoader(
        Numbers(), **{"batch_size": 4, "num_workers": 2, "persistent_workers": persistent, **LOADERS[kind]()}
    )
    assert read(loader, epochs=3) == read(plain, epochs=3)
    assert (ahead.used, ahead.is_wrong) == (2, False)


def test_the_first_batches_are_made_before_their_epoch_begins() -> None:
    loader, _ = make(shuffle=True)
    MADE[:] = [0] * 64
    list(loader)
    until = time.monotonic() + 30
    while sum(MADE) < 80 and time.monotonic() < until:
        time.sleep(0.01)
    assert sum(MADE) == 80, "four batches of four: two of each worker"
    twice = {sample for sample in range(64) if MADE[sample] == 2}
    assert len(twice) == 16 and twice == {sample for batch in list(loader)[:4] for sample in batch.tolist()}


@pytest.mark.parametrize(("left", "made"), [(0, 64), (1, 68), (3, 76)])
def test_no_more_than_the_run_takes(left: int, made: int) -> None:
    loader, _ = make(left=left, shuffle=True)
    MADE[:] = [0] * 64
    list(loader)
    until = time.monotonic() + (30 if made > 64 else 0.3)
    while sum(MADE) < 80 and time.monotonic() < until and sum(MADE) != made:
        time.sleep(0.01)
    assert sum(MADE) == made


def draw(count: int) -> Callable[[int], object]:
    """As `count` validation loaders do for their workers."""
    return lambda epoch: [torch.empty((), dtype=torch.int64).random_() for _ in range(count)]


@pytest.mark.parametrize(("counted", "used", "is_wrong"), [(2, 3, False), (None, 0, False), (0, 0, True), (5, 0, True)])
def test_what_others_draw_between_epochs_counts(counted: int | None, used: int, is_wrong: bool) -> None:
    """One order predicted wrong is enough."""
    loader, ahead = make(draws=counted, shuffle=True)
    plain = DataLoader(Numbers(), 4, shuffle=True, num_workers=2)
    assert read(loader, draw(2)) == read(plain, draw(2))
    assert (ahead.used, ahead.is_wrong) == (used, is_wrong)


def test_nothing_is_predicted_where_the_training_draws_too() -> None:
    """Dropout on a CPU: what the next epoch draws from depends on when one looks."""

    def train(loader: Any) -> list[list[int]]:
        torch.manual_seed(3)
        order: list[list[int]] = []
        for _ in range(3):
            for batch in loader:
                order.append(batch.tolist())
                torch.rand(3)
        return order

    loader, ahead = make(shuffle=True)
    assert train(loader) == train(DataLoader(Numbers(), 4, shuffle=True, num_workers=2))
    assert (ahead.used, ahead.is_wrong) == (0, False)


def test_an_order_predicted_wrong_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what was made ahead is taken without a look."""
    monkeypatch.setattr(next_epoch, "_read", lambda order: None)
    loader, ahead = make(shuffle=True)
    plain = DataLoader(Numbers(), 4, shuffle=True, num_workers=2)
    assert read(loader, draw(2)) != read(plain, draw(2)) and ahead.used == 3


def test_only_samplers_of_torch_are_predicted() -> None:
    loader, ahead = make(sampler=Odd())
    assert read(loader) == read(DataLoader(Numbers(), 4, sampler=Odd(), num_workers=2))
    assert (ahead.used, ahead.may_predict) == (0, False)


def test_a_sampler_that_becomes_another_one_is_read() -> None:
    loader, ahead = make(shuffle=True)
    torch.manual_seed(3)
    assert sorted(sample for batch in loader for sample in batch.tolist()) == list(range(64))
    loader.inner.batch_sampler.inner.sampler = Odd()
    for _ in range(2):
        assert sorted(sample for batch in loader for sample in batch.tolist()) == list(range(64))
    assert ahead.used == 0


@pytest.mark.parametrize("rows", [torch.arange(12).reshape(6, 2), [{"at": index} for index in range(6)]])
def test_only_whole_numbers_are_predicted(rows: Any) -> None:
    """Others cannot be compared, or may have changed inside."""

    class Rows(Numbers):
        def __getitem__(self, index: Any) -> int:
            return int(index["at"] if isinstance(index, dict) else index.sum())

    loader, ahead = make(sampler=SubsetRandomSampler(rows))
    loader.inner.__dict__["dataset"] = Rows()
    expected = [row["at"] if isinstance(row, dict) else int(row.sum()) for row in rows]
    assert [sorted(epoch) for epoch in read(loader)[0]] == [expected] * 4 and ahead.used == 0


@pytest.mark.parametrize("kind", [RandomSampler, DistributedSampler])
def test_a_long_order_is_not_drawn_twice(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is what torch draws, not the part of it that is used."""
    monkeypatch.setattr(next_epoch, "_MOST_SAMPLES", 63)
    settings = {"num_samples": 8} if kind is RandomSampler else {"num_replicas": 8, "rank": 0}
    assert next_epoch.find_sampler(kind(Numbers(), **settings)) is None
    monkeypatch.setattr(next_epoch, "_MOST_SAMPLES", 64)
    assert next_epoch.find_sampler(kind(Numbers(), **settings)) is not None


@pytest.mark.parametrize("taken", [1, 9, 15, 16])
def test_an_epoch_that_is_left_early(taken: int) -> None:
    def leave(loader: Any) -> list[list[int]]:
        torch.manual_seed(3)
        order = []
        for _ in range(3):
            batches = iter(loader)
            order.append([next(batches).tolist() for _ in range(taken)])
        return order

    loader, ahead = make(shuffle=True)
    assert leave(loader) == leave(DataLoader(Numbers(), 4, shuffle=True, num_workers=2))
    assert ahead.used == (2 if taken == 16 else 0)


class Fails(Numbers):
    """A sample can be made once."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __getitem__(self, index: int) -> int:
        if index == self.at and MADE[index]:
            raise KeyError(f"sample {index}")
        return super().__getitem__(index)


def test_an_error_of_a_batch_made_ahead_is_raised_where_it_comes() -> None:
    order = RandomSampler(Numbers(), generator=seeded())
    second = [list(order) for _ in range(2)][1]
    loader, ahead = make(sampler=RandomSampler(Numbers(), generator=seeded()))
    loader.inner.__dict__["dataset"] = Fails(at=second[5])
    MADE[:] = [0] * 64
    list(loader)
    seen = []
    with pytest.raises(KeyError, match=f"sample {second[5]}"):
        for batch in loader:
            seen.append(batch.tolist())
    assert seen == [second[:4]] and ahead.used == 1
    end_workers(loader.live())  # as with a plain loader, the exception holds them


def test_a_batch_that_raises_is_one_of_its_epoch() -> None:
    """For those who go on after it."""
    MADE[:] = [1] * 64
    loader, ahead = make(sampler=SubsetRandomSampler(range(64), generator=seeded()))
    loader.inner.__dict__["dataset"] = Fails(at=7)
    counts = []
    for _ in range(2):
        batches, count = ahead.begin(loader.inner, lambda: iter(loader.inner)), 0
        with contextlib.suppress(StopIteration):
            while True:
                with contextlib.suppress(KeyError):
                    next(batches)
                    count += 1
        counts.append(count)
    assert counts == [15, 15] and ahead.used == 1
    end_workers(loader.inner._iterator)


def test_a_changed_dataset_is_read_anew() -> None:
    class Levels(Numbers):
        def __init__(self) -> None:
            self.level = 0

        def __getitem__(self, index: int) -> int:
            return index + 100 * self.level

    loader, ahead = make()
    loader.inner.__dict__["dataset"] = data = Levels()
    order, _ = read(loader, lambda epoch: setattr(data, "level", int(epoch > 0)))
    assert order == [list(range(64))] * 2 + [list(range(100, 164))] * 2
    assert (ahead.used, ahead.is_wrong) == (2, False)


@pytest.mark.parametrize("is_now", [True, False])
def test_beside_more_workers(is_now: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def find_more(self: Pace, most: int, left: Left, *, loses: bool, stay: bool) -> tuple[int, bool] | None:
        asked.append(self.workers)
        return (4, is_now) if len(asked) == 20 else None  # in the second epoch

    monkeypatch.setattr(Pace, "find_more", find_more)
    monkeypatch.setattr(more_workers, "LEAST_GAIN", 0.0)
    more = MoreWorkers(4, count_left=Left, tell=lambda _: None)
    loader, ahead = make(more, shuffle=True)
    assert read(loader) == read(DataLoader(Numbers(), 4, shuffle=True, num_workers=2))
    assert loader.inner.num_workers == 4 and (ahead.used, ahead.is_wrong) == (3 if is_now else 2, False)


def test_beside_workers_on_trial() -> None:
    said: list[Any] = []
    tried = TriedWorkers(room_bytes=None, step_down=lambda *given: said.append(given), warn=said.append, turn_off="x")
    loader, ahead = make(tried, shuffle=True)
    assert read(loader) == read(DataLoader(Numbers(), 4, shuffle=True, num_workers=2))
    assert (ahead.used, ahead.is_wrong, said) == (3, False, [])


def test_without_workers_nothing_changes() -> None:
    loader, ahead = make(shuffle=True)
    loader.inner.num_workers, loader.inner.prefetch_factor = 0, None
    loader.inner.__dict__["persistent_workers"] = False
    assert read(loader) == read(DataLoader(Numbers(), 4, shuffle=True)) and ahead.used == 0
