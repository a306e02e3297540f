"""Costs that occur once per fit: compiles, worker start-up, rehearsals. By cause, and as spans of host time.

The code that causes or observes such a cost records it here: the watch, the applier, a rung's action. A `Clock` that
receives the ledger removes the spans from its steps, so that no step is charged for a cost that does not recur.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

now = time.perf_counter


TRIALS = "rehearsal"
OURS = (TRIALS, "first_calls")
"""Causes that never recur, however many steps they fall into: our own trials, which are limited in number."""


class Span(NamedTuple):
    """Begin and end, in seconds on the clock of the steps, `now`."""

    cause: str
    began: float
    ended: float


class OneTime:
    """The ledger of one fit on one rank."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """In the order in which they became known; they may be nested."""
        self._unplaced: defaultdict[str, float] = defaultdict(float)
        """Seconds by cause that belong to no step."""
        self._followed: list[tuple[str, Callable[[], tuple[float, float]], tuple[float, float]]] = []

    def add_span(self, cause: str, began: float, ended: float) -> None:
        """Add a cost with its begin and end, which may be in the past."""
        self.spans.append(Span(cause, began, max(began, ended)))

    def follow(self, cause: str, read_s: Callable[[], tuple[float, float]]) -> None:
        """Follow a cost that counts its own seconds: those that the loop waited for, and those in parallel."""
        self._followed.append((cause, read_s, read_s()))

    def note(self) -> None:
        """Call when the loop has its batch: seconds that it waited since the last call are placed right before now;
        those in parallel belong to no step."""
        for place, (cause, read_s, before) in enumerate(self._followed):
            waited_s, beside_s = found = read_s()
            if waited_s > before[0]:
                self.add_span(cause, now() - (waited_s - before[0]), now())
            self._unplaced[cause] += beside_s - before[1]
            self._followed[place] = cause, read_s, found

    @contextlib.contextmanager
    def span(self, cause: str) -> Iterator[None]:
        """Record the body of ``with`` as such a cost, even if it raises."""
        began = now()
        try:
            yield
        finally:
            self.add_span(cause, began, now())

    def count(self, cause: str) -> int:
        """Number of finished spans of this cause."""
        return sum(span.cause == cause for span in self.spans)

    def sum_by_cause(self) -> dict[str, float]:
        """Seconds by cause. A nested cost, such as a compile in a rehearsal, counts only under its own cause."""
        found = defaultdict(float, self._unplaced)
        around: list[Span] = []
        for span in sorted(self.spans, key=lambda each: (each.began, -each.ended)):
            while around and around[-1].ended <= span.began:
                around.pop()
            found[span.cause] += span.ended - span.began
            if around:
                found[around[-1].cause] -= min(span.ended, around[-1].ended) - span.began
            around.append(span)
        return dict(found)

    @property
    def spent_s(self) -> float:
        """Host time in all spans."""
        return sum(self.sum_by_cause().values()) - sum(self._unplaced.values())


class Reader:
    """Passes the spans of a ledger to one clock, which goes through them once, in order of time."""

    def __init__(self, ledger: OneTime) -> None:
        self._spans = ledger.spans
        self._taken = 0
        self._pending: list[tuple[float, float, bool]] = []

    def skip(self) -> None:
        """Ignore all spans recorded so far."""
        self._taken = len(self._spans)
        self._pending = []

    def take(self, began: float, ended: float) -> tuple[float, float]:
        """Return how many seconds of this interval spans cover, and how many of these may recur. Pass the intervals in
        order, each once."""
        if self._taken == len(self._spans) and not self._pending:
            return 0.0, 0.0  # nearly always
        self._pending += [(span.began, span.ended, span.cause not in OURS) for span in self._spans[self._taken :]]
        self._pending.sort()
        self._taken = len(self._spans)
        covered = _measure_cover(self._pending, began, ended)
        recurring = _measure_cover([span for span in self._pending if span[2]], began, ended)
        self._pending = [span for span in self._pending if span[1] > ended]
        return covered, recurring


def _measure_cover(spans: list[tuple[float, float, bool]], began: float, ended: float) -> float:
    covered, until = 0.0, began
    for begins, ends, _ in spans:
        if min(ends, ended) > max(begins, until):
            covered += min(ends, ended) - max(begins, until)
            until = min(ends, ended)
    return covered
