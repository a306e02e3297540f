"""Time a thread spends off the processor of its own accord: asleep, reading, waiting for a lock."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_own = threading.local()


def off_cpu_s() -> float | None:
    """Seconds since some moment in which this thread neither ran nor stood in line for a processor; differences count.

    Linux' scheduler statistics tell waiting from having been pushed aside; None where there are none. They lag by up to
    a scheduler tick, so means over many stretches count, and a single one may even be negative.
    """
    file: int | None = getattr(_own, "file", -1)
    if file == -1 or getattr(_own, "process", None) != os.getpid():
        file = _opened()
    if file is None:
        return None
    try:
        queued = int(os.pread(file, 64, 0).split()[1])
    except (OSError, ValueError, IndexError):
        _own.file = None
        return None
    return time.perf_counter() - time.thread_time() - queued / 1e9


def _opened() -> int | None:
    _own.process = os.getpid()
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    try:
        _own.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        _own.file = None
    opened: int | None = _own.file
    return opened
