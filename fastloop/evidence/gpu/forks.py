"""What forked children (a loader's workers) must not inherit from a process that uses a GPU.

**Locks.** A child has only the thread that forked. If another thread was inside NVML at that moment, the library's
locks stay locked in the child forever, and a child that calls NVML (torch counts devices that way) hangs. So a fork
waits until the current call is over, a few milliseconds, and never longer than ``LIMIT_S``.

**Garbage.** An object that is garbage in the parent is garbage in the child too. If the child's garbage collector finds
a CUDA event, its destructor asks CUDA for the device, which a forked process must not use, and torch ends the worker:
"DataLoader worker is killed by signal: Aborted". So children never collect what they inherited.

**Pace.** If this process collects garbage at chosen steps only, a child has no such steps: it keeps Python's own pace.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

LIMIT_S = 1.0
"""A fork waits no longer than this, even if the library call never returns."""

_gate = threading.Lock()
_forking = threading.local()
_registered = False
_thresholds: tuple[int, int, int] | None = None


def set_thresholds_of_children(thresholds: tuple[int, int, int] | None) -> None:
    """Set how often children collect garbage, as for ``gc.set_threshold``; None = as often as this process."""
    global _thresholds
    protect_children()
    _thresholds = thresholds


def protect_children() -> None:
    """From now on, children forked by this process start with no garbage and no locked gate.

    Call it before the first CUDA event is made.
    """
    global _registered  # Python keeps such hooks for the life of the process: once is enough
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_pause_before_fork, after_in_parent=_go_on_in_parent, after_in_child=_let_go_in_child
        )
    _registered = True


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Inside ``with``, no other thread of this process forks. Keep the body short, and do not fork in it."""
    protect_children()
    gate = _gate
    with gate:
        yield


def _pause_before_fork() -> None:
    _forking.waited_for = _gate if _gate.acquire(timeout=LIMIT_S) else None


def _go_on_in_parent() -> None:
    if _forking.waited_for is not None:
        _forking.waited_for.release()


def _let_go_in_child() -> None:
    global _gate  # a thread that may have held the old lock does not exist here
    _gate = threading.Lock()
    gc.freeze()
    if _thresholds is not None:
        gc.set_threshold(*_thresholds)
