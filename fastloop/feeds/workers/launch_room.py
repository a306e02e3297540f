"""Keeps worker processes off a CPU, so that the thread that launches the device's work never waits for one.

The training process itself does not change, and these settings end with the workers.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_NICENESS = 5


@dataclass(frozen=True)
class LeavesRoom:
    """A ``worker_init_fn`` that keeps its worker off some CPUs, and then calls the loader's own function.

    Args:
        own: the loader's ``worker_init_fn``, or None.
        free_cpus: CPUs reserved for the training processes on this machine. If affinity cannot be set, the worker
            raises its niceness instead.
    """

    own: Callable[[int], None] | None
    free_cpus: int

    def __call__(self, worker_id: int) -> None:
        if not _keep_off(self.free_cpus):
            with contextlib.suppress(OSError):
                os.nice(_NICENESS)
        _limit_opencv()
        if self.own is not None:
            self.own(worker_id)


def _keep_off(free_cpus: int) -> bool:
    """Keep this process off the last of its allowed CPUs, the same for all workers; return False if impossible."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux has affinity, and a sandbox may forbid it
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) > 2 * free_cpus:
            os.sched_setaffinity(0, usable[:-free_cpus])
        return True
    return False


def _limit_opencv() -> None:
    """Limit OpenCV to one thread in each worker, like torch's threads, if it would use all CPUs."""
    cv2: Any = sys.modules.get("cv2")
    if cv2 is not None and cv2.getNumThreads() >= (os.cpu_count() or 1):
        cv2.setNumThreads(1)
