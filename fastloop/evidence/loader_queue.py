"""How far behind a loader's queue is, and which of its workers live. Reads torch's private fields, each guarded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

_DEATH_S = 2.0
"""How long after a broken connection the process at its other end may take to be reported dead."""


def live_workers(iterator: Any) -> int | None:
    """Living worker processes of a DataLoader iterator; 0 for a single-process one, None where it cannot be told."""
    workers = getattr(iterator, "_workers", None)
    if workers is not None:
        return sum(bool(worker.is_alive()) for worker in workers)
    return 0 if hasattr(iterator, "_dataset_fetcher") else None


def worker_cpus(iterator: Any) -> int | None:
    """The fewest CPUs that one of its living worker processes may run on; None where it has none or nobody can tell."""
    pids = [worker.pid for worker in getattr(iterator, "_workers", None) or () if worker.is_alive()]
    found = (_read(lambda pid=pid: len(os.sched_getaffinity(pid))) for pid in pids)  # type: ignore[misc]
    return min((cpus for cpus in found if cpus is not None), default=None)


def batches_owed(iterator: Any) -> int | None:
    """Batches a multi-process DataLoader iterator has asked its workers for and that are not finished.

    0 while the queue is as full as it can be, also near the end of an epoch, when there is little left to ask for; up
    to ``num_workers * prefetch_factor`` when it is drained. None where it cannot be told.
    Source: torch/utils/data/dataloader.py, _MultiProcessingDataLoaderIter: `_tasks_outstanding` are asked for and not
    received (a batch that comes before its turn is received), `_data_queue` holds what the pin thread or the workers
    have delivered.
    """
    if live_workers(iterator) == 0:
        return 0
    return _read(lambda: max(0, int(iterator._tasks_outstanding) - int(iterator._data_queue.qsize())))


def batches_ready(iterator: Any) -> int | None:
    """Batches that its workers have made and nobody has taken yet, 0 where it has no workers; None where it cannot be
    told.

    Source: as above; of `_task_info`, early arrivals are those that carry their data.
    """
    early = _read(lambda: sum(len(info) == 2 for info in iterator._task_info.values()))
    queued = _read(lambda: int(iterator._data_queue.qsize()))
    if early is None or queued is None:
        return None if live_workers(iterator) else 0
    return early + queued


def find_awaited_worker(iterator: Any) -> Any:
    """The process that was asked for the batch that is due; None where it cannot be told."""
    try:
        return iterator._workers[iterator._task_info[iterator._rcvd_idx][0]]
    except (AttributeError, KeyError, IndexError, TypeError):  # another torch
        return None


def find_death(iterator: Any, error: Exception) -> str | None:
    """torch's own sentence about a worker that has died, where `error` is a connection that broke with it.

    torch says so itself where its SIGCHLD handler, or its own look at the workers, comes first. Where the connection
    breaks before, or the thread that pins breaks with it, a ConnectionResetError says nothing of a worker.
    Source: torch/utils/data/dataloader.py, _try_get_data; torch/csrc/DataLoader.cpp, THPModule_errorIfAnyWorkerFails.
    """
    workers = getattr(iterator, "_workers", None)
    pin_thread_ended = str(error) == "Pin memory thread exited unexpectedly"
    if not workers or not (pin_thread_ended or isinstance(error, (OSError, EOFError))):
        return None
    end = time.monotonic() + _DEATH_S
    while time.monotonic() < end:
        for worker in workers:
            if code := worker.exitcode:
                how = f"is killed by signal: {signal.strsignal(-code)}. " if code < 0 else f"exited with code {code}. "
                return f"DataLoader worker (pid {worker.pid}) {how}"
        time.sleep(0.02)
    return None


def _read(count: Callable[[], int]) -> int | None:
    try:
        return count()
    except (AttributeError, NotImplementedError, OSError):  # another torch, or macOS, which has no qsize
        return None
