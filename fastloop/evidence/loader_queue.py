"""How many batches a loader's queue lacks, and which workers are alive. Reads torch's private fields, each guarded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil

_BUSY_SHARE = 0.25
"""A thread counts as busy if it used at least this share of the busiest thread's CPU time."""
_DEATH_S = 2.0
"""How long after a broken connection the death of the process at the other end may go unreported."""


def count_batches(loader: Any) -> int | None:
    """Batches per epoch; None for a loader without a length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a sampler without a length
        return None


def count_live_workers(iterator: Any) -> int | None:
    """Living worker processes of a DataLoader iterator; 0 for a single-process one, None if unknown."""
    workers = getattr(iterator, "_workers", None)
    if workers is not None:
        return sum(bool(worker.is_alive()) for worker in workers)
    return 0 if hasattr(iterator, "_dataset_fetcher") else None


def count_worker_cpus(iterator: Any) -> int | None:
    """The fewest CPUs that any living worker process of an iterator may run on; None if there is none or that is
    unknown."""
    pids = [worker.pid for worker in getattr(iterator, "_workers", None) or () if worker.is_alive()]
    found = (_read(lambda pid=pid: len(os.sched_getaffinity(pid))) for pid in pids)  # type: ignore[misc]
    return min((cpus for cpus in found if cpus is not None), default=None)


def count_busy_threads(worker: Any) -> int | None:
    """Threads that a worker process computes on; None if it has ended, or if its threads cannot be read."""
    try:
        used_s = [each.user_time + each.system_time for each in psutil.Process(worker.pid).threads()]
    except (psutil.Error, NotImplementedError, OSError):
        return None
    return sum(each > _BUSY_SHARE * max(used_s) for each in used_s)


def count_owed(iterator: Any) -> int | None:
    """Batches that a multi-process DataLoader iterator has requested from its workers and that are not finished.

    0 while the queue is as full as possible, also near the end of an epoch, when few batches are left to request; up to
    ``num_workers * prefetch_factor`` when it is drained. None if unknown.
    Source: torch/utils/data/dataloader.py, _MultiProcessingDataLoaderIter: `_tasks_outstanding` are requested and not
    received (a batch that arrives before its turn is received), `_data_queue` holds what the pin thread or the workers
    have delivered.
    """
    if count_live_workers(iterator) == 0:
        return 0
    return _read(lambda: max(0, int(iterator._tasks_outstanding) - int(iterator._data_queue.qsize())))


def count_ready(iterator: Any) -> int | None:
    """Finished batches of an iterator's workers that are still in the queue; 0 if it has no workers, None if unknown.

    Source: as above; of `_task_info`, early arrivals are those that carry their data.
    """
    early = _read(lambda: sum(len(info) == 2 for info in iterator._task_info.values()))
    queued = _read(lambda: int(iterator._data_queue.qsize()))
    if early is None or queued is None:
        return None if count_live_workers(iterator) else 0
    return early + queued


def is_next_ready(iterator: Any) -> bool:
    """Whether an iterator's workers have finished the next batch; False if unknown.

    They have if it arrived early, or if everything requested is finished: the batches in the queue cannot be inspected.
    """
    is_early = _read(lambda: len(iterator._task_info[iterator._rcvd_idx]) == 2)
    return bool(is_early) or (bool(count_ready(iterator)) and count_owed(iterator) == 0)


def find_awaited_worker(iterator: Any) -> Any:
    """The worker process that must deliver the next batch; None if unknown."""
    try:
        return iterator._workers[iterator._task_info[iterator._rcvd_idx][0]]
    except (AttributeError, KeyError, IndexError, TypeError):  # another torch
        return None


def find_death(iterator: Any, error: Exception) -> str | None:
    """torch's own message about a dead worker if `error` is a connection that broke because of it; otherwise None.

    torch reports the death itself if its SIGCHLD handler or its own check of the workers comes first. If the connection
    breaks earlier, or the pin-memory thread ends with it, a ConnectionResetError does not mention a worker.
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
    except (AttributeError, KeyError, NotImplementedError, OSError):  # another torch, or macOS, which has no qsize
        return None
