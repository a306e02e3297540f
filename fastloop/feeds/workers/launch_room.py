"""Worker processes that leave a CPU to the thread that launches the device's work: it must never wait for one.

Nothing of the training process itself is changed, and what is set here ends with the workers.
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
    """A ``worker_init_fn`` that keeps its worker off some CPUs, and then does what the loader's own does.

    Args:
        own: the loader's, or None.
        free_cpus: CPUs that are left to the training processes of this machine. Where there is no affinity to set, the
            worker gives way by its niceness.
    """

    own: Callable[[int], None] | None
    free_cpus: int

    def __call__(self, worker_id: int) -> None:
        if not _keep_off(self.free_cpus):
            with contextlib.suppress(AttributeError, OSError):  # Windows has no niceness
                os.nice(_NICENESS)
        _limit_opencv()
        if self.own is not None:
            self.own(worker_id)


def _keep_off(free_cpus: int) -> bool:
    """Keep this process off the last CPUs of those it may use, the same for all workers; False where that cannot be."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux has affinity, and a sandbox may forbid it
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) > 2 * free_cpus:
            os.sched_setaffinity(0, usable[:-free_cpus])
        return True
    return False


def _limit_opencv() -> None:
    """One thread of OpenCV's in each worker, as torch does with its own, where it would take all CPUs."""
    cv2: Any = sys.modules.get("cv2")
    if cv2 is not None and cv2.getNumThreads() >= (os.cpu_count() or 1):
        cv2.setNumThreads(1)
