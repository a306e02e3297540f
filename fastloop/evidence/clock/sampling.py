"""Splits the work of all steps into phases, although only some steps record their phases.

Steps marked in detail are drawn at random, and their split is applied to the sum of all: the ratio estimator of survey
sampling. It is valid for steps similar to those marked. Steps longer than `FAR` times the usual one are handled
separately: the split of a marked one is known; the excess time of the others is split only if enough such steps were
marked. The rest belongs to no phase; a report calls it unexplained.

`find_pauses` finds the few steps that are far longer than all others.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

FAR = 3.0
"""A step longer than this many times the median of the steps in detail is not a usual one."""
LATELY = 64
"""Number of latest steps in detail that this median covers."""
FIRST = 6
"""The first steps are buffered until there are this many, so that they too can be compared with a median."""
ALIKE = 2
"""Number of far steps in detail needed to represent those that were not marked."""

Phases = defaultdict[str, float]


class Sampled:
    """Seconds, by phase if known. Fixed memory."""

    def __init__(self) -> None:
        self._detail, self._far, self._between = Phases(float), Phases(float), Phases(float)
        self._usual_s = self._unseen_s = 0.0
        """``_usual_s``: time of usual steps; ``_unseen_s``: excess over a usual step of far steps not in detail."""
        self._marked = self._far_marked = 0
        self._step_s, self._step = 0.0, Phases(float)
        self._lately: deque[float] = deque(maxlen=LATELY)
        self._typical_s = float("inf")
        self._first: list[tuple[float, Phases, bool]] | None = []

    def add(self, phase: str, seconds: float, detailed: bool) -> None:
        """Add an interval of the current step's work."""
        self._step_s += seconds
        if detailed:
            self._step[phase] += seconds

    def between(self, phase: str, seconds: float) -> None:
        """Add work between two steps, the first of which was in detail."""
        self._usual_s += seconds
        self._between[phase] += seconds

    def step_ends(self, detailed: bool) -> None:
        """Complete the current step."""
        step_s, phases, self._step_s = self._step_s, self._step, 0.0
        if not (detailed or phases) and self._first is None and step_s <= FAR * self._typical_s:  # nearly all
            self._usual_s += step_s
            return
        self._step = Phases(float)
        if detailed:
            self._lately.append(step_s)
            self._typical_s = statistics.median(self._lately) or float("inf")
        if self._first is None:
            self._take(step_s, phases, detailed)
            return
        self._first.append((step_s, phases, detailed))
        if not detailed or len(self._first) >= FIRST:
            self._take_first()

    def means(self, steps: int, steps_between: int) -> dict[str, float]:
        """Seconds per step by phase, for time with a known phase.

        Args:
            steps: the number of all steps; `steps_between`: the number of those whose predecessor was in detail.
        """
        self._take_first()
        split = Phases(float, {phase: seconds / self._marked for phase, seconds in self._detail.items()})
        for phase, seconds in self._between.items():
            split[phase] += seconds / max(1, steps_between)
        split_s = sum(split.values())
        scale = self._usual_s / steps / split_s if split_s > 0 else 0.0
        means = Phases(float, {phase: scale * seconds for phase, seconds in split.items()})
        scale = self.far_s / sum(self._far.values()) / steps if self._far else 0.0
        for phase, seconds in self._far.items():
            means[phase] += scale * seconds
        return means

    @property
    def detailed_s(self) -> float:
        """Time of all steps in detail."""
        return sum(self._detail.values()) + sum(self._far.values())

    @property
    def known_s(self) -> float:
        """Time of all steps, without time that belongs to no phase."""
        return self._usual_s + self.far_s

    @property
    def far_s(self) -> float:
        """Time of far steps with known phases."""
        return sum(self._far.values()) + (self._unseen_s if self._far_marked >= ALIKE else 0.0)

    def of_detailed(self, steps: int) -> float:
        """Work of a usual step relative to one in detail; 1 if no step was in detail."""
        detail_s = sum(self._detail.values())
        return self._usual_s / steps / (detail_s / self._marked) if detail_s > 0 else 1.0

    def _take_first(self) -> None:
        first, self._first = self._first, None
        for step in first or ():
            self._take(*step)

    def _take(self, step_s: float, phases: Phases, detailed: bool) -> None:
        far = step_s > FAR * self._typical_s
        if detailed:
            self._marked += not far
            self._far_marked += far
            known = self._far if far else self._detail
            for phase, seconds in phases.items():
                known[phase] += seconds
        if far and not detailed:
            self._unseen_s += step_s - self._typical_s
            self._usual_s += self._typical_s
        elif not far:
            self._usual_s += step_s


# The few steps that are far longer than all others: a pause that happened once is not part of a step's cost.

MOST_PAUSES = 3
"""Limit on the number of such steps; if there are more, the cause recurs, and its mean is its cost."""
PAUSE = 4.0
"""Ratio to the longest of all other steps."""


class Pauses(NamedTuple):
    """The number of pauses, and the seconds they add to the mean step beyond the median one."""

    steps: int
    s_per_step: float


def find_pauses(step_s: Sequence[float]) -> Pauses | None:
    """The few isolated long steps; None if there are none."""
    ordered = sorted(step_s, reverse=True)
    if len(ordered) <= 2 * MOST_PAUSES:
        return None
    long = [step for step in ordered[:MOST_PAUSES] if step > PAUSE * ordered[MOST_PAUSES]]
    median = statistics.median(ordered)
    return Pauses(len(long), sum(step - median for step in long) / len(ordered)) if long else None
