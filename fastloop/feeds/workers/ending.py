"""Ends the worker processes of a loader's iterator."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Collection, Iterable
from multiprocessing import active_children
from typing import Any


def end_workers(source: Any) -> None:
    """End an iterator's workers."""
    with contextlib.suppress(AttributeError):  # another torch version: they end when the iterator is deleted
        source._shutdown_workers()


def kill_workers(source: Any, wait_s: float) -> None:
    """Kill an iterator's workers, which would not end by themselves."""
    _kill(getattr(source, "_workers", ()), wait_s, lambda: end_workers(source))  # torch then no longer looks for them


def kill_started(others: Collection[Any], wait_s: float) -> None:
    """Kill all child processes but `others`, which were there before: torch forgets the workers of an iterator whose
    start failed."""
    _kill(set(active_children()).difference(others), wait_s, lambda: None)


def _kill(workers: Iterable[Any], wait_s: float, then: Callable[[], None]) -> None:
    """Kill workers while torch's signal handler is off: it would raise an error for each that dies."""
    try:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except ValueError:  # not the main thread: torch terminates them when their iterator is deleted
        return
    try:
        for worker in workers:
            worker.kill()
            worker.join(wait_s)
        then()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
