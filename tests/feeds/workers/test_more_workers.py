"""More workers for a loader that does not keep up: when they pay, and that samples, order and random streams stay."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.popen_fork import Popen
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as DataLoaderIter

from fastloop.feeds.lazy_loader import LazyLoader
from fastloop.feeds.workers import more_workers
from fastloop.feeds.workers.ending import end_workers
from fastloop.feeds.workers.more_workers import FoundWorkers, MoreWorkers
from fastloop.feeds.workers.pace import Left, Pace
from fastloop.feeds.workers.pending_indices import PendingIndices
from fastloop.feeds.workers.tried_workers import TriedWorkers

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class Numbers(Dataset):
    """Each sample with its worker and a random number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        return torch.tensor([index, -1 if worker is None else worker.num_workers, random.random(), torch.rand(1)])


class Given(Pace):
    """A pace as the test wants it: more workers once so many batches came, and then the time of a batch."""

    grows_after, to, is_now = 3, 4, True
    took_s: float | None = 0.1

    def begin_epoch(self, batches: int | None) -> None:
        pass

    def note(self, waited_s: float, took_s: float, ready: int | None = None) -> None:
        self.seen = getattr(self, "seen", 0) + 1

    def find_more(self, most: int, left: Left, *, loses: bool, stay: bool) -> tuple[int, bool] | None:
        return (self.to, self.is_now) if self.seen == self.grows_after else None

    @property
    def batch_s(self) -> float | None:
        return (1.0 if self.workers < self.to else self.took_s) if self.seen >= 3 else None


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> type[Given]:
    class Pace(Given):
        pass

    monkeypatch.setattr(more_workers, "Pace", Pace)
    return Pace


def make(more: Callable[..., MoreWorkers] = MoreWorkers, **settings: Any) -> tuple[LazyLoader, MoreWorkers, list[str]]:
    said: list[str] = []
    loader = DataLoader(Numbers(), **{"batch_size": 4, "shuffle": True, "num_workers": 2, **settings})
    workers = more(4, count_left=Left, tell=said.append)
    stand_in = LazyLoader(
        loader, epochs=workers.batches, keeps_iterator=loader.persistent_workers, at_once=lambda: True
    )
    return stand_in, workers, said


def read(loader: Any, epochs: int = 3) -> tuple[list[list[list[float]]], list[int], float]:
    """The samples' numbers in each epoch, the workers there were, and what the process draws next."""
    torch.manual_seed(3)
    rows, order = [], []
    for _ in range(epochs):
        batches = iter(loader)
        torch.rand(1)  # a hook draws between `iter` and the first batch
        rows.append([row for batch in batches for row in batch.tolist()])
        order.append([row[0] for row in rows[-1]])
    workers = [int(row[1]) for epoch in rows for row in epoch]
    return order, sorted(set(workers), key=workers.index), float(torch.rand(1))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("is_now", [True, False])
def test_samples_order_and_streams_stay(given: type[Given], persistent: bool, is_now: bool) -> None:
    given.is_now = is_now
    loader, workers, said = make(persistent_workers=persistent)
    order, counts, drawn = read(loader)
    plain = read(DataLoader(Numbers(), 4, shuffle=True, num_workers=2, persistent_workers=persistent))
    assert (order, drawn) == (plain[0], plain[2])
    assert (counts, plain[1]) == ([2, 4], [2]) and workers.is_faster
    assert said == ["4 workers instead of 2: a batch every 100 ms instead of 1,000 ms"]


def test_the_order_would_differ_if_batches_on_their_way_were_lost(
    given: type[Given], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    fired: list[int] = []

    def forget(self: PendingIndices) -> None:
        fired.append(len(self.pending))
        self._source = iter(list(self._source)[1:])
        hand_over(self)

    hand_over = PendingIndices.hand_over
    monkeypatch.setattr(PendingIndices, "hand_over", forget)
    loader, *_ = make()
    assert read(loader)[0] != read(DataLoader(Numbers(), 4, shuffle=True, num_workers=2))[0] and fired[0] > 1


def test_workers_that_start_again_draw_other_numbers(given: type[Given]) -> None:
    loader, *_ = make()
    rows = [row for batch in loader for row in batch.tolist()]
    assert len({row[2] for row in rows}) == len({row[3] for row in rows}) == 64


def test_the_old_number_returns_if_batches_come_no_faster(given: type[Given]) -> None:
    given.took_s = 1.0
    loader, workers, said = make()
    order, counts, _ = read(loader)
    assert order == read(DataLoader(Numbers(), 4, shuffle=True, num_workers=2))[0]
    assert counts == [2, 4] and loader.num_workers == 2 and workers.is_faster is False
    assert said == ["2 workers again: with 4 it was a batch every 1,000 ms instead of 1,000 ms"]


def refuse_third(worker_id: int) -> None:
    """A function for workers that knows only two of them."""
    if worker_id > 1:
        raise LookupError(f"no data for worker {worker_id}")


def test_workers_that_cannot_start_give_way_to_the_old_ones(given: type[Given]) -> None:
    loader, workers, _ = make(worker_init_fn=refuse_third)
    order, counts, drawn = read(loader)
    plain = read(DataLoader(Numbers(), 4, shuffle=True, num_workers=2))
    assert (order, drawn) == (plain[0], plain[2])
    assert workers.is_faster is False and loader.num_workers == 2 and 2 in counts
    assert (workers.change or "").startswith("2 workers again: LookupError: ")


def test_workers_that_cannot_be_forked_give_way_to_the_old_ones(
    given: type[Given], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, forks = Popen._launch, list[int]()

    def fail(self: Popen, process: Any) -> None:
        forks.append(1)
        if len(forks) == 4:  # the second of four, after the first two
            raise OSError(12, "Cannot allocate memory")
        launch(self, process)

    monkeypatch.setattr(Popen, "_launch", fail)
    monkeypatch.setattr(DataLoaderIter, "_shutdown", True, raising=False)  # which is not there yet, and torch asks for
    kept: list[FoundWorkers] = []
    loader, workers, _ = make(lambda most, **how: MoreWorkers(most, **how, keep=kept.append))
    order, counts, drawn = read(loader)
    monkeypatch.undo()
    plain = read(DataLoader(Numbers(), 4, shuffle=True, num_workers=2))
    assert (order, drawn, counts) == (plain[0], plain[2], [2]) and len(forks) == 2 + 2 + 2 * 2
    assert workers.is_faster is False and "Cannot allocate memory" in (workers.change or "")
    assert [each.workers for each in kept] == [4, 2], "later runs start with the number that works"


@pytest.mark.parametrize(("batches", "counts"), [(1000, [2, 4]), (11, [2])])
def test_more_workers_need_room_in_shared_memory(given: type[Given], batches: int, counts: list[int]) -> None:
    """Twice two and twice four batches of 64 bytes, two more, and a quarter is left free."""
    loader, workers, _ = make(lambda most, **how: MoreWorkers(most, **how, room_bytes=64 * batches))
    assert read(loader, epochs=1)[1] == counts and (workers.change is None) is (counts == [2])


def test_an_epoch_that_begins_before_the_last_one_is_let_go_is_watched(given: type[Given]) -> None:
    """As Lightning does it, which does not read to the end."""
    given.grows_after = 20
    loader, workers, _ = make(lambda most, **how: MoreWorkers(most, **how, is_training=lambda: True))
    kept = []
    for _ in range(2):
        kept.append(iter(loader))
        for _ in range(16):
            next(kept[-1])
    assert loader.inner.num_workers == 4 and workers.change is not None
    del kept[:]


class Rising(Numbers):
    level = 0.0

    def __init__(self) -> None:
        self.level = 0.0


def test_workers_do_not_start_amid_an_epoch_after_a_change_of_the_dataset(given: type[Given]) -> None:
    loader, _, _ = make()
    loader.inner.__dict__["dataset"] = data = Rising()
    batches = iter(loader)
    next(batches)
    data.level = 1.0
    assert {int(row[1]) for batch in batches for row in batch.tolist()} == {2}
    assert {int(row[1]) for batch in loader for row in batch.tolist()} == {4}, "they do with the next one"


MADE = multiprocessing.RawArray("i", 64)


class Counted(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        MADE[index] += 1
        return super().__getitem__(index)


def test_what_the_old_workers_have_begun_is_not_made_again(given: type[Given]) -> None:
    loader, *_ = make()
    loader.inner.__dict__["dataset"] = Counted()
    MADE[:] = [0] * 64
    rows = [row for batch in loader for row in batch.tolist()]
    assert sorted({int(row[1]) for row in rows}) == [2, 4] and list(MADE) == [1] * 64


class Fails(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 40:
            raise KeyError("sample 40")
        return super().__getitem__(index)


def test_what_the_dataset_raises_is_raised(given: type[Given]) -> None:
    loader, workers, _ = make(shuffle=False)
    loader.inner.__dict__["dataset"] = Fails()
    with pytest.raises(KeyError, match="sample 40"):
        list(loader)
    end_workers(loader.live())  # as with a plain loader, the exception holds them
    assert loader.inner.num_workers == 2 and (workers.change or "").startswith("2 workers again: KeyError: 'sample 40'")


class Raises(list):  # type: ignore[type-arg]
    """Indices that end with an error."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        raise LookupError("no more indices")


@pytest.mark.parametrize(("count", "is_found"), [(26, True), (34, False), (42, False)])
def test_what_the_sampler_raises_while_workers_start_is_raised(given: type[Given], count: int, is_found: bool) -> None:
    """Else the epoch would end there, as if these were all batches."""
    found = FOUND if is_found else None
    loader, *_ = make(
        lambda most, **how: MoreWorkers(most, **how, found=found), shuffle=False, sampler=Raises(range(count))
    )
    with pytest.raises(LookupError, match="no more indices"):
        for _ in loader:
            pass


def make_tried(said: list[Any]) -> TriedWorkers:
    return TriedWorkers(
        room_bytes=None, step_down=lambda *given: said.append(given), warn=said.append, turn_off="rungs.x"
    )


def test_workers_of_ours_become_more_too(given: type[Given]) -> None:
    said: list[Any] = []
    tried = make_tried(said)
    loader, workers, _ = make(lambda most, **how: MoreWorkers(most, **how, epochs=tried.batches), shuffle=False)
    order, counts, _ = read(loader)
    assert order == [[float(index) for index in range(64)]] * 3 and counts == [2, 4] and workers.is_faster and not said


FOUND = FoundWorkers(workers=4, before_s=1.0, then_s=0.1, batch_bytes=64)


@pytest.mark.parametrize("found", [None, FOUND])
def test_a_number_of_ours_that_cannot_start_is_not_kept(
    given: type[Given], monkeypatch: pytest.MonkeyPatch, found: FoundWorkers | None
) -> None:
    """The training goes on without workers, and later runs start with the number that works."""
    launch, forks = Popen._launch, list[int]()

    def fail(self: Popen, process: Any) -> None:
        forks.append(1)
        if len(forks) == (3 if found else 5):
            raise OSError(12, "Cannot allocate memory")
        launch(self, process)

    monkeypatch.setattr(Popen, "_launch", fail)
    monkeypatch.setattr(DataLoaderIter, "_shutdown", True, raising=False)  # which is not there yet, and torch asks for
    tried, kept = make_tried([]), list[FoundWorkers]()
    loader, workers, _ = make(
        lambda most, **how: MoreWorkers(most, **how, epochs=tried.batches, found=found, keep=kept.append)
    )
    assert read(loader)[1] == ([-1] if found else [2, -1])
    assert workers.is_faster is False and workers.change == "no workers in the end: 4 could not be used"
    assert [each.workers for each in kept] == ([2] if found else [4, 2])


@pytest.mark.parametrize(("took_s", "last"), [(0.1, FOUND), (1.0, replace(FOUND, workers=2, then_s=1.0)), (None, None)])
def test_what_a_run_finds_is_kept(given: type[Given], took_s: float | None, last: FoundWorkers | None) -> None:
    """At once, since the run may end too early to time it."""
    given.took_s = took_s
    found: list[FoundWorkers] = []
    loader, *_ = make(lambda most, **how: MoreWorkers(most, **how, keep=found.append))
    read(loader)
    assert found == [replace(FOUND, then_s=None), *filter(None, [last])]


@pytest.mark.parametrize(("took_s", "counts"), [(0.1, [4]), (1.0, [4, 2])])
def test_what_was_not_timed_is_timed_by_a_later_run(given: type[Given], took_s: float, counts: list[int]) -> None:
    given.grows_after, given.took_s = 1_000, took_s
    kept: list[FoundWorkers] = []
    found = replace(FOUND, then_s=None)
    loader, workers, said = make(lambda most, **how: MoreWorkers(most, **how, found=found, keep=kept.append))
    assert read(loader)[1] == counts and workers.is_faster is (took_s == 0.1) and len(said) == 1
    assert [each.workers for each in kept] == counts[-1:] and kept[0].then_s is not None


def test_a_number_no_greater_than_the_own_one_is_no_news(given: type[Given]) -> None:
    own = replace(FOUND, workers=2)
    loader, workers, _ = make(lambda most, **how: MoreWorkers(most, **how, found=own))
    assert read(loader)[1] == [2, 4] and workers.is_faster


@pytest.mark.parametrize("persistent", [False, True])
def test_a_later_run_starts_with_what_was_found(given: type[Given], persistent: bool) -> None:
    given.grows_after = 1_000
    loader, workers, said = make(
        lambda most, **how: MoreWorkers(most, **how, found=FOUND), persistent_workers=persistent
    )
    order, counts, drawn = read(loader)
    plain = read(DataLoader(Numbers(), 4, shuffle=True, num_workers=2, persistent_workers=persistent))
    assert (order, drawn, counts) == (plain[0], plain[2], [4]) and workers.is_faster and not said
    why = "4 workers from the start instead of 2, as an earlier run found: a batch every 100 ms instead of 1,000 ms"
    assert workers.change == why


@pytest.mark.parametrize(("batches", "counts"), [(14, [4]), (13, [2])])
def test_what_was_found_needs_room_in_shared_memory(given: type[Given], batches: int, counts: list[int]) -> None:
    """Twice four batches of 64 bytes, two more, and a quarter is left free."""
    given.grows_after = 1_000
    loader, workers, _ = make(lambda most, **how: MoreWorkers(most, **how, found=FOUND, room_bytes=64 * batches))
    assert read(loader, epochs=1)[1] == counts and (workers.change is None) is (counts == [2])


def test_the_own_number_starts_if_what_was_found_cannot(given: type[Given], monkeypatch: pytest.MonkeyPatch) -> None:
    given.grows_after = 1_000
    launch, forks = Popen._launch, list[int]()

    def fail(self: Popen, process: Any) -> None:
        forks.append(1)
        if len(forks) == 3:
            raise OSError(12, "Cannot allocate memory")
        launch(self, process)

    monkeypatch.setattr(Popen, "_launch", fail)
    monkeypatch.setattr(DataLoaderIter, "_shutdown", True, raising=False)  # which is not there yet, and torch asks for
    kept: list[FoundWorkers] = []
    loader, workers, _ = make(lambda most, **how: MoreWorkers(most, **how, found=FOUND, keep=kept.append))
    order, counts, drawn = read(loader)
    monkeypatch.undo()
    plain = read(DataLoader(Numbers(), 4, shuffle=True, num_workers=2))
    assert (order, drawn, counts) == (plain[0], plain[2], [2]) and len(forks) == 3 + 3 * 2
    assert workers.is_faster is None and workers.change is None and [each.workers for each in kept] == [2]


def test_the_own_number_returns_if_one_of_those_found_fails(given: type[Given]) -> None:
    kept: list[FoundWorkers] = []
    loader, workers, _ = make(
        lambda most, **how: MoreWorkers(most, **how, found=FOUND, keep=kept.append), worker_init_fn=refuse_third
    )
    order, counts, drawn = read(loader)
    plain = read(DataLoader(Numbers(), 4, shuffle=True, num_workers=2))
    assert (order, drawn) == (plain[0], plain[2]) and workers.is_faster is False and 2 in counts
    assert (workers.change or "").startswith("2 workers again: LookupError: ")
    assert [each.workers for each in kept] == [2], "later runs start with the number that works"
