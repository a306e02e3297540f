"""Time a thread spends off the CPU voluntarily: asleep, reading, waiting for a lock."""

from __future__ import annotations

import contextlib
import os
import threading
import time

_own = threading.local()


def read_off_cpu_s() -> float | None:
    """Seconds in which this thread neither ran nor was queued for a CPU; only differences are meaningful.

    Linux' scheduler statistics distinguish waiting from preemption; None if unavailable. They lag by up to a scheduler
    tick, so only means over many intervals are reliable, and a single difference may even be negative.
    """
    if getattr(_own, "process", None) != os.getpid():
        _open_statistics()
    if _own.file is None:
        return None
    try:
        queued = int(os.pread(_own.file, 64, 0).split()[1])
    except (OSError, ValueError, IndexError):
        _own.file = None
        return None
    return time.perf_counter() - time.thread_time() - queued / 1e9


def _open_statistics() -> None:
    _own.process, _own.file = os.getpid(), None
    with contextlib.suppress(OSError):
        _own.file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
