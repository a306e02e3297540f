"""How far behind a loader's queue is and how many workers live."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fastloop.evidence import loader_queue
from fastloop.evidence.loader_queue import (
    count_live_workers,
    count_owed,
    count_ready,
    find_awaited_worker,
    find_death,
    is_next_ready,
)

DATA = TensorDataset(torch.arange(40))


class Held(TensorDataset):
    """Makes a batch of four when its gate is opened, and not before."""

    def __init__(self, gates: list[Any]) -> None:
        super().__init__(torch.arange(40))
        self.gates = gates

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.gates[indices[0] // 4].wait()
        return [self[index] for index in indices]


@contextlib.contextmanager
def held_loader() -> Iterator[tuple[Any, Callable[..., None]]]:
    """The iterator of a loader with two workers, and what opens the gates of batches; both are gone afterwards."""
    gates = [torch.multiprocessing.get_context().Event() for _ in range(10)]

    def let(*batches: int) -> None:
        for batch in batches:
            gates[batch].set()

    iterator = iter(DataLoader(Held(gates), batch_size=4, num_workers=2, prefetch_factor=2))
    try:
        yield iterator, let
    finally:
        let(*range(10))  # a worker that waits at a gate hears of no end
        iterator._shutdown_workers()


def wait_for(owed: int, iterator: Any) -> int | None:
    end = time.monotonic() + 100
    while (found := count_owed(iterator)) != owed and time.monotonic() < end:
        time.sleep(0.02)
    return found


def test_without_workers() -> None:
    for kind in (DataLoader, StatefulDataLoader):
        iterator = iter(kind(DATA, batch_size=4))
        assert count_live_workers(iterator) == 0 and count_owed(iterator) == 0


def test_a_drained_queue_owes_all_it_was_asked_for() -> None:
    with held_loader() as (iterator, let):
        assert count_live_workers(iterator) == 2 and count_owed(iterator) == 4  # each worker was asked for two batches
        let(0, 1, 2, 3)
        assert wait_for(0, iterator) == 0
        next(iterator)
        assert count_owed(iterator) == 1  # asked for in place of the one that was taken
        let(4)
        assert wait_for(0, iterator) == 0


def test_batches_that_came_too_early_are_not_owed_and_count_once() -> None:
    with held_loader() as (iterator, let):
        let(1, 3)  # the second worker is done, and its batches cannot be used yet
        assert wait_for(2, iterator) == 2
        let(0)
        next(iterator)
        assert count_owed(iterator) == 2  # the third one still, and the one asked for in place of the first


def test_a_test_that_fails_leaves_no_worker_behind(newborns: Any) -> None:
    with pytest.raises(ZeroDivisionError), held_loader() as (iterator, _):
        assert len(newborns()) == 2 == count_live_workers(iterator)
        raise ZeroDivisionError
    assert newborns() == []


def test_a_full_queue_owes_nothing_also_at_the_end_of_an_epoch() -> None:
    iterator = iter(DataLoader(DATA, batch_size=4, num_workers=2, prefetch_factor=2))
    for _ in range(9):
        next(iterator)
    assert wait_for(0, iterator) == 0  # one of ten is left, and ready
    rest = list(iterator)
    assert len(rest) == 1 and rest[0][0].tolist() == [36, 37, 38, 39]
    assert count_live_workers(iterator) == 0  # they end with the last batch
    del iterator
    gc.collect()


def test_what_cannot_be_told_is_none() -> None:
    assert count_live_workers(iter([1])) is None and count_owed(iter([1])) is None
    worker = SimpleNamespace(is_alive=lambda: True)
    no_size = SimpleNamespace(_workers=[worker], _tasks_outstanding=2, _task_info={}, _data_queue=SimpleNamespace())
    assert count_live_workers(no_size) == 1 and count_owed(no_size) is None


def test_what_is_ready_is_what_is_not_owed_of_a_queue_that_was_asked_for() -> None:
    iterator = iter(DataLoader(DATA, batch_size=4, num_workers=2, prefetch_factor=2))
    assert wait_for(0, iterator) == 0 and count_ready(iterator) == 4
    next(iterator)
    assert wait_for(0, iterator) == 0 and count_ready(iterator) == 4  # another is made in its place
    del iterator
    gc.collect()
    assert count_ready(iter(DataLoader(DATA, batch_size=4))) == 0
    worker = SimpleNamespace(is_alive=lambda: True)
    assert count_ready(SimpleNamespace(_workers=[worker], _task_info={}, _data_queue=SimpleNamespace())) is None


def test_the_next_batch_is_ready_if_it_came_early_or_nothing_is_owed() -> None:
    with held_loader() as (iterator, let):
        let(1)
        assert wait_for(3, iterator) == 3 and count_ready(iterator) == 1
        assert not is_next_ready(iterator)  # it is the other worker's
        let(0)
        next(iterator)
        assert is_next_ready(iterator)  # it came with the first
        next(iterator)
        assert not is_next_ready(iterator)
        let(2, 3, 4, 5)
        assert wait_for(0, iterator) == 0 and is_next_ready(iterator)  # behind the other's or not
    assert not is_next_ready(iter(DataLoader(DATA))) and not is_next_ready(iter([1]))


# -- workers that let the training wait -----------------------------------------------------------------------------


def test_the_worker_that_was_asked_for_the_batch_that_is_due() -> None:
    with held_loader() as (iterator, _):
        assert find_awaited_worker(iterator) is iterator._workers[0]
    assert find_awaited_worker(iter(DataLoader(DATA))) is None


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConnectionResetError(), -9, "DataLoader worker (pid 7) is killed by signal: Killed. "),
        (EOFError(), -7, "DataLoader worker (pid 7) is killed by signal: Bus error. "),
        (RuntimeError("Pin memory thread exited unexpectedly"), 3, "DataLoader worker (pid 7) exited with code 3. "),
        (ConnectionResetError(), None, None),
        (ConnectionResetError(), 0, None),
        (ValueError("of the user's"), -9, None),
        (RuntimeError("of the user's"), -9, None),
    ],
)
def test_a_broken_connection_is_told_as_a_death(
    error: Exception, code: int | None, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_queue, "_DEATH_S", 0.1)
    workers = [SimpleNamespace(pid=6, exitcode=None), SimpleNamespace(pid=7, exitcode=code)]
    assert find_death(SimpleNamespace(_workers=workers), error) == sentence
    assert find_death(iter(DataLoader(DATA)), error) is None
