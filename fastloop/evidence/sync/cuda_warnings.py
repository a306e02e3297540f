"""Finds the lines of a live CUDA process that make the host wait, by CUDA's sync debug mode: no times, almost no
cost."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch

from fastloop.evidence.sync import table
from fastloop.evidence.sync.call_site import find_site
from fastloop.evidence.sync.tally import Tally

Entered = TypeVar("Entered", bound="SyncWarnings")
_WARNING = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode is a prototype"


class SyncWarnings:
    """Inside ``with``, calls `heard` with the frame of every synchronization that CUDA's debug mode warns about.

    All other warnings go where they went before, from any thread. Synchronizations in Python threads other than the
    entering one are dropped: they do not hold up the step. (The autograd engine's threads are not Python threads.)
    """

    def __init__(self, heard: Callable[[FrameType], None]) -> None:
        self._heard = heard
        self._thread = 0
        self._mode: int | None = None
        self._shown: Callable[..., None] = warnings.showwarning
        self._filter = ("always", re.compile(_WARNING), UserWarning, None, 0)

    def __enter__(self: Entered) -> Entered:
        self._thread = threading.get_ident()
        self._shown, warnings.showwarning = warnings.showwarning, self._show
        # Not with `filterwarnings`: it makes Python forget which warnings it has shown, and show them again.
        _read_filters().insert(0, self._filter)
        try:
            self._mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            torch.cuda.set_sync_debug_mode(self._mode)
            self._mode = None
        # If other code has replaced the hook since, ours stays below it and passes everything on.
        if warnings.showwarning == self._show:
            warnings.showwarning = self._shown
        with contextlib.suppress(ValueError):
            _read_filters().remove(self._filter)

    def _show(self, message: Any, *rest: Any, **named: Any) -> None:
        text = str(message)
        if self._mode is None or not text.startswith((_WARNING, _PROTOTYPE)):
            self._shown(message, *rest, **named)
            return
        if text.startswith(_WARNING) and not self._is_elsewhere():
            with contextlib.suppress(Exception):  # observing must never break the step
                self._heard(sys._getframe(1))

    def _is_elsewhere(self) -> bool:
        here = threading.get_ident()
        dummy = threading._DummyThread
        return here != self._thread and any(
            thread.ident == here and not isinstance(thread, dummy) for thread in threading.enumerate()
        )


def _read_filters() -> list[Any]:
    return warnings.filters  # type: ignore[return-value]


class SyncMarks(SyncWarnings):
    """Finds the lines that synchronize inside ``with``: for a warm-up step of a user's real CUDA run.

    It changes no state that torch.compile guards on. The debug mode does not cover ``torch.cuda.synchronize()`` and
    ``torch.distributed`` (https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html). If torch
    lacks the mode (a build without CUDA), it finds nothing.
    """

    def __init__(self) -> None:
        super().__init__(self._note)
        self._tally = Tally()

    def __enter__(self: Entered) -> Entered:
        with contextlib.suppress(AttributeError, AssertionError, RuntimeError):
            super().__enter__()
        return self

    def result(self, steps: int = 1) -> tuple[Mapping[str, Any], ...]:
        """The lines, in the form of ``Measurement.syncs`` but without times, for this many optimizer steps."""
        return self._tally.rows(steps)

    def _note(self, frame: FrameType) -> None:
        found = find_site(frame)
        self._tally.add(found, table.guess(found.text, found.through), None)
