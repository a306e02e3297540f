"""How far behind a loader's queue is and how many workers live."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fastloop.evidence.queue import batches_owed, live_workers

DATA = TensorDataset(torch.arange(40))


class Slow(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.2)
        return super().__getitem__(index)


def wait_for(owed: int, iterator: Any) -> int | None:
    end = time.monotonic() + 10
    while (found := batches_owed(iterator)) != owed and time.monotonic() < end:
        time.sleep(0.02)
    return found


def test_without_workers() -> None:
    for kind in (DataLoader, StatefulDataLoader):
        iterator = iter(kind(DATA, batch_size=4))
        assert live_workers(iterator) == 0 and batches_owed(iterator) == 0


def test_a_drained_queue_owes_all_it_was_asked_for() -> None:
    iterator = iter(DataLoader(Slow(torch.arange(40)), batch_size=4, num_workers=2, prefetch_factor=2))
    assert live_workers(iterator) == 2 and batches_owed(iterator) == 4  # two workers were asked for two batches each
    assert wait_for(0, iterator) == 0
    next(iterator)
    assert batches_owed(iterator) == 1  # asked for in place of the one that was taken
    del iterator
    gc.collect()


def test_a_full_queue_owes_nothing_also_at_the_end_of_an_epoch() -> None:
    iterator = iter(DataLoader(DATA, batch_size=4, num_workers=2, prefetch_factor=2))
    for _ in range(9):
        next(iterator)
    assert wait_for(0, iterator) == 0  # one of ten is left, and ready
    rest = list(iterator)
    assert len(rest) == 1 and rest[0][0].tolist() == [36, 37, 38, 39]
    assert live_workers(iterator) == 0  # they end with the last batch
    del iterator
    gc.collect()


def test_what_cannot_be_told_is_none() -> None:
    assert live_workers(iter([1])) is None and batches_owed(iter([1])) is None
    worker = SimpleNamespace(is_alive=lambda: True)
    no_size = SimpleNamespace(_workers=[worker], _tasks_outstanding=2, _task_info={}, _data_queue=SimpleNamespace())
    assert live_workers(no_size) == 1 and batches_owed(no_size) is None
