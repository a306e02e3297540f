"""Passes of Python's garbage collector: adds the time each one held up the host to a clock.

A pass over all objects takes a tenth of a second or more if there are millions of them. An allocation anywhere in the
loop can trigger it, so the place where it happens is not its cause.
Source: https://docs.python.org/3/library/gc.html#gc.callbacks
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from fastloop.evidence.clock import step_clock

WHOLE = 2
"""The generation of a full pass, as requested by ``gc.collect()``."""


class Garbage:
    """Adds the host time of passes to a clock's `collected_s`, from ``start`` to ``stop``.

    An explicit ``gc.collect()`` is charged to the hook or phase that calls it, and its time is noted by its line.

    Args:
        name_caller: returns the line to blame for a call from this frame, such as ``train.py:42``; None if nobody is.
    """

    def __init__(
        self, clock: step_clock.Clock, name_caller: Callable[[FrameType | None], str | None] = lambda _: None
    ) -> None:
        self.passes = 0
        self.requested_s: defaultdict[str, float] = defaultdict(float)
        """Host time of explicit passes, by the line that calls for them."""
        self._name_caller = name_caller
        self._clock, self._since = clock, 0.0

    def start(self) -> None:
        if self._note_pass not in gc.callbacks:
            gc.callbacks.append(self._note_pass)

    def stop(self) -> None:
        if self._note_pass in gc.callbacks:
            gc.callbacks.remove(self._note_pass)

    def _note_pass(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._since = step_clock.now()
        elif self._since:
            took, self._since = step_clock.now() - self._since, 0.0
            caller = sys._getframe().f_back
            if info.get("generation") != WHOLE or not _was_requested(caller):
                self.passes += 1
                self._clock.collected_s += took
            elif (line := self._name_caller(caller)) is not None:
                self.requested_s[line] += took


def _was_requested(frame: FrameType | None) -> bool:
    """Whether the running Python code calls something whose name contains ``collect``."""
    return frame is not None and "collect" in frame.f_code.co_names
