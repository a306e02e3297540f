"""Keeps a fork from catching another thread inside a C library.

A forked child (a loader's worker) has only the thread that forked. If another thread was inside NVML at that moment,
the library's locks stay locked in the child for ever, and a child that asks NVML anything (torch counts devices that
way) hangs. So a fork waits until the call in progress is over, some milliseconds, and never longer than ``LIMIT_S``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

LIMIT_S = 1.0
"""A fork waits no longer than this, even if the library never comes back."""

_gate = threading.Lock()
_forking = threading.local()
_registered = False


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Inside it no other thread of this process forks. Keep it short, and do not fork inside it."""
    _register()
    gate = _gate
    with gate:
        yield


def _register() -> None:
    global _registered  # Python keeps such hooks for the life of the process: once is enough
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
    _registered = True


def _before() -> None:
    _forking.waited_for = _gate if _gate.acquire(timeout=LIMIT_S) else None


def _in_parent() -> None:
    if _forking.waited_for is not None:
        _forking.waited_for.release()


def _in_child() -> None:
    global _gate  # whoever may have held the old one does not exist here
    _gate = threading.Lock()
