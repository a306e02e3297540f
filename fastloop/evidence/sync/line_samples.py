"""The lines of the user's code that take the host's time: the training thread's stack, looked at during a few steps."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import CodeType
from typing import Any

from fastloop.evidence.sync.call_site import UserStack, name_place, read_user_stack
from fastloop.records.readings import LOADING

FIRST_STEP = 6
"""Steps before it have one-time costs, and other looks at them."""
EVERY_S = 0.002
SWITCH_S = 0.0005
"""Python's switch interval meanwhile. With its usual 5 ms, most looks would come where NumPy or torch let go of the
interpreter, and few in pure Python."""
RARER_AFTER = 500
"""After every so many looks, the time between two grows by EVERY_S: a step of seconds needs no more of them."""
LEAST_LOOKS = 20
"""Fewer looks show no shares."""
WORTH_PCT = 5.0
"""Smallest share of all looks for naming a line."""
MOSTLY = 2 / 3
"""A line is named instead of those that led to it if it has at least this share of the looks at the outermost one. Were
it a share of its caller's, deep calls would end at a line with little of the time."""


class LineSamples:
    """Looks at the stack of the thread that created this, from another thread."""

    def __init__(self) -> None:
        self._watched, self._done = threading.get_ident(), threading.Event()
        self._thread: threading.Thread | None = None
        self._looks, self._stacks = 0, Counter[UserStack]()
        self._since_step = Counter[UserStack]()
        """Looks since a step ended. They count once the next one has: a fit may do other things after its last step."""
        self._steps = self._counted_steps = 0

    def note_step(self, step: int, last: int) -> None:
        """Note that this many steps of the fit are over: look from `FIRST_STEP` until the `last` one is over."""
        self._steps = step
        if step == FIRST_STEP < last and self._thread is None:
            self._thread = threading.Thread(target=self._look, name="fastloop-lines", daemon=True)
            self._thread.start()
        elif step >= last:
            self.stop()

    def stop(self) -> None:
        """Stop looking."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._count_ended()

    def _look(self) -> None:
        with contextlib.suppress(Exception), _switching_often():
            while not self._done.wait(EVERY_S * (1 + self._looks // RARER_AFTER)):
                stack = read_user_stack(sys._current_frames().get(self._watched))
                if stack is not None:
                    self._count_ended()
                    self._looks += 1
                    self._since_step[stack] += 1

    def _count_ended(self) -> None:
        """Count the looks that waited, if a step has ended meanwhile. Only one thread at a time may do so."""
        if self._counted_steps != self._steps:
            self._counted_steps = self._steps
            self._stacks.update(self._since_step)
            self._since_step.clear()

    def describe(self, hooks: Collection[str] = ()) -> Mapping[str, Any]:
        """The line that takes most of the time of each group: of loading, or else of the hook or other function of the
        user that Lightning called. Empty after too few looks.

        Args:
            hooks: the names of Lightning's hooks.

        Returns:
            ``looks``, and ``lines``: ``of`` (the group), ``where``, ``function``, ``share_pct`` of all looks.
        """
        if (all_looks := sum(self._stacks.values())) < LEAST_LOOKS:
            return {}
        groups: dict[str, Counter[UserStack]] = {}
        for stack, looks in self._stacks.items():
            if not stack.lines:
                continue
            of = LOADING if stack.is_loading else _name_call(stack, hooks)
            groups.setdefault(of, Counter())[stack] += looks
        found = [{"of": of, **_find_hot_line(stacks, all_looks)} for of, stacks in groups.items()]
        lines = sorted(found, key=lambda line: -line["share_pct"])
        return {"looks": all_looks, "lines": [line for line in lines if line["share_pct"] >= WORTH_PCT]}


def _name_call(stack: UserStack, hooks: Collection[str]) -> str:
    """The name of the hook that runs, even if Lightning called a decorator's wrapper, or a hook of its own that called
    the user's function (a scheduler's step); without one, the name of the outermost function."""
    names = [function.co_name for function, _ in stack.lines]
    return next((name for name in (*names, stack.caller) if name in hooks), names[0])


def _find_hot_line(stacks: Counter[UserStack], all_looks: int) -> dict[str, Any]:
    """Follow the calls that take most of the time to the innermost line that still has most of it."""
    path, looks, whole = tuple[tuple[CodeType, int], ...](), 0, 0
    while True:
        inner = Counter[tuple[CodeType, int]]()
        for stack, times in stacks.items():
            if stack.lines[: len(path)] == path and len(stack.lines) > len(path):
                inner[stack.lines[len(path)]] += times
        line, most = max(inner.items(), key=lambda item: item[1], default=(None, 0))
        if line is None or most < MOSTLY * whole:
            break
        path, looks, whole = (*path, line), most, whole or most
    function, number = path[-1]
    return {
        "where": name_place(function.co_filename, number),
        "function": function.co_name,
        "share_pct": 100 * looks / all_looks,
    }


_usual_s: float | None = None
"""The switch interval that a process forked meanwhile gets back."""


@contextlib.contextmanager
def _switching_often() -> Iterator[None]:
    """Shorten Python's switch interval; it is not put back if somebody else has set it since."""
    global _usual_s
    _register_at_fork()
    _usual_s = sys.getswitchinterval()
    sys.setswitchinterval(min(_usual_s, SWITCH_S))
    ours = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours:
            sys.setswitchinterval(_usual_s)
        _usual_s = None


@functools.cache
def _register_at_fork() -> None:
    os.register_at_fork(after_in_child=_restore_in_child)


def _restore_in_child() -> None:
    if _usual_s is not None:
        sys.setswitchinterval(_usual_s)
