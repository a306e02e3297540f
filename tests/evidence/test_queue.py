"""How full a loader's queue is and how many workers live."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fastloop.evidence.queue import batches_ready, live_workers

DATA = TensorDataset(torch.arange(40))


def wait_for(ready: int, iterator: Any) -> int | None:
    end = time.monotonic() + 10
    while (found := batches_ready(iterator)) != ready and time.monotonic() < end:
        time.sleep(0.02)
    return found


def test_without_workers() -> None:
    for kind in (DataLoader, StatefulDataLoader):
        iterator = iter(kind(DATA, batch_size=4))
        assert live_workers(iterator) == 0 and batches_ready(iterator) == 0


def test_with_workers() -> None:
    iterator = iter(DataLoader(DATA, batch_size=4, num_workers=2, prefetch_factor=2))
    assert live_workers(iterator) == 2
    assert wait_for(4, iterator) == 4  # two workers keep two batches each
    next(iterator)
    assert wait_for(4, iterator) == 4
    for _ in range(8):
        next(iterator)
    assert wait_for(1, iterator) == 1  # nine of ten are used
    rest = list(iterator)
    assert len(rest) == 1 and rest[0][0].tolist() == [36, 37, 38, 39]
    assert live_workers(iterator) == 0  # they end with the last batch
    del iterator
    gc.collect()


def test_what_cannot_be_told_is_none() -> None:
    assert live_workers(iter([1])) is None and batches_ready(iter([1])) is None
    worker = SimpleNamespace(is_alive=lambda: True)
    no_size = SimpleNamespace(_workers=[worker], _task_info={}, _data_queue=SimpleNamespace())
    assert live_workers(no_size) == 1 and batches_ready(no_size) is None
