"""Finds the line at which a worker process or thread is stuck. The process reports it, even from native code."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_ASK = getattr(signal, "SIGRTMAX", None)
"""A signal that is otherwise unused; macOS has none, so workers' locations are unknown there."""
_ANSWER_S = 1.0
_MARK = "started "
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')


class Whereabouts:
    """Asks worker processes for their current line, through a pipe that they inherit."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._heard = ""

    def make_init(self, own: Callable[[int], None] | None) -> Callable[[int], None]:
        """Return a ``worker_init_fn`` that enables the worker to answer, and then calls the loader's own function."""
        return _Init(own, self._writer)

    def find(self, pid: int) -> str | None:
        """Return a worker's location in the user's code, with its ``__getitem__``; None if it does not answer."""
        self._heard += self._hear(0.0)
        if _ASK is None or f"{_MARK}{pid}\n" not in self._heard:
            return None  # without our handler, the signal would kill it
        os.kill(pid, _ASK)
        return describe(self._hear(_ANSWER_S))

    def _hear(self, patience_s: float) -> str:
        """Read from the pipe until nothing more comes."""
        parts = []
        while select.select([self._reader], [], [], patience_s)[0]:
            parts.append(os.read(self._reader.fileno(), 65536))
            patience_s = 0.2
        return b"".join(parts).decode(errors="replace")


class _Init:
    def __init__(self, own: Callable[[int], None] | None, writer: Any) -> None:
        self.own, self.writer = own, writer

    def __call__(self, worker_id: int) -> None:
        if _ASK is not None:
            faulthandler.register(_ASK, file=self.writer.fileno(), all_threads=True)
            os.write(self.writer.fileno(), f"{_MARK}{os.getpid()}\n".encode())
        if self.own is not None:
            self.own(worker_id)


def describe(dump: str) -> str | None:
    """Find the loading thread in a faulthandler dump; return its ``__getitem__`` and innermost line."""
    for thread in re.split(r"\n\s*\n", dump):
        frames = list(_read_frames(thread))
        if any(name == "_worker_loop" for _, name in frames):
            return _name_place(frames)
    return None


def find_thread(ident: int) -> str | None:
    """Return the ``__getitem__`` and innermost line of a thread of this process; None if it has ended."""
    frame = sys._current_frames().get(ident)
    frames = reversed(traceback.extract_stack(frame)) if frame is not None else ()
    return _name_place([(f"{each.filename}:{each.lineno}", each.name) for each in frames])


def _name_place(frames: list[tuple[str, str]]) -> str | None:
    if not frames:
        return None
    place, inner = frames[0]
    for where, name in frames:
        if name in ("__getitem__", "__getitems__") and "/torch/utils/data/" not in where:
            return f"__getitem__ at {where}" + ("" if where == place else f", which is at {place} in {inner}")
    return f"{inner} at {place}"


def _read_frames(thread: str) -> Iterator[tuple[str, str]]:
    """Yield file:line and function, innermost first."""
    for found in _FRAME.finditer(thread):
        yield f"{found['file']}:{found['line']}", found["name"]
