"""Whether real steps are as fast as a rehearsal promised, and whether a rung makes them slower. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastloop.numbers import format_short
from fastloop.records.plan import Rehearsed

FEWEST = 5
"""Fewest batches of each kind for a comparison."""
OVER_PROMISE, OVER_MS = 1.5, 1.0
"""Forward and backward are checked again if they exceed the rehearsed time by this factor and these milliseconds: a
training_step also computes losses and metrics."""
OVER_IN_LONG_RUNS, LONG_STEPS = 1.15, 1_000
"""The factor in runs with at least this many steps left, where checking costs next to nothing."""
GAINED = 0.7
"""Batches that take less than this share of the unchanged modules' time have gained from their rungs, whatever was
promised."""
MARGIN, MARGIN_MS = 0.1, 0.5
"""The whole interval must exceed the time without a rung by this share of it and by these milliseconds."""


class Timed(NamedTuple):
    """One batch: milliseconds of its forward and backward, and elements of its tensors; 0 = it has none."""

    ms: float
    size: int


@dataclass(frozen=True, kw_only=True)
class TimedComparison:
    """Forward and backward of batches with rungs and without."""

    with_ms: float
    without_ms: float
    low_ms: float
    """Lower bound of how much slower batches are with the rungs, by a 95 % interval; negative: faster."""
    high_ms: float
    n: int
    """Batches of each kind."""

    @property
    def is_slower(self) -> bool:
        return self.low_ms > max(MARGIN * self.without_ms, MARGIN_MS)

    def __str__(self) -> str:
        times = f"{format_short(self.with_ms, 'ms')} with it, {format_short(self.without_ms, 'ms')} without it"
        slower = f"slower by {format_short(self.low_ms)} to {format_short(self.high_ms, 'ms')}, 95 %"
        return f"forward and backward take {times} ({self.n} batches each, {slower})"


def is_suspicious(seen: Sequence[Timed], promised: Rehearsed, first_size: int, steps_left: int | None = None) -> bool:
    """Whether batches take clearly longer than the first one did in the rehearsal.

    A larger batch may take proportionally longer; a smaller one is allowed the same time. Single pauses do not count,
    nor does a device queue that had to fill first: both the median and the mean must be too long.
    """
    if not promised.of_batch or promised.changed_ms is None or promised.eager_ms is None or len(seen) < FEWEST:
        return False
    taken = [each.ms / max(1.0, each.size / first_size if first_size else 1.0) for each in seen]
    typical = min(statistics.median(taken), statistics.mean(taken))
    over = OVER_IN_LONG_RUNS if steps_left is not None and steps_left >= LONG_STEPS else OVER_PROMISE
    return typical > max(over * promised.changed_ms, promised.changed_ms + OVER_MS, GAINED * promised.eager_ms)


def compare(with_it: Sequence[Timed], without: Sequence[Timed]) -> TimedComparison | None:
    """Compare batches with a rung to batches without it; None if there are too few.

    If batches differ in size, they are also compared with times scaled in proportion to size. The truth lies between
    the two, so the comparison more favorable to the rung counts.
    """
    if min(len(with_it), len(without)) < FEWEST:
        return None
    every = [*with_it, *without]
    found = [_compare_ms([each.ms for each in with_it], [each.ms for each in without])]
    if all(each.size for each in every) and len({each.size for each in every}) > 1:
        usual = statistics.mean(each.size for each in every)
        scaled = [[each.ms * usual / each.size for each in kind] for kind in (with_it, without)]
        found.append(_compare_ms(*scaled))
    return min(found, key=lambda each: each.low_ms - MARGIN * each.without_ms)


def _compare_ms(with_ms: Sequence[float], without_ms: Sequence[float]) -> TimedComparison:
    """Compare with the Hodges-Lehmann interval for a shift, which is robust to single pauses."""
    differences = sorted(a - b for a in with_ms for b in without_ms)
    n, m = len(with_ms), len(without_ms)
    beyond = max(0, math.floor(n * m / 2 - 0.5 - 1.96 * math.sqrt(n * m * (n + m + 1) / 12)))
    return TimedComparison(
        with_ms=statistics.median(with_ms),
        without_ms=statistics.median(without_ms),
        low_ms=differences[beyond],
        high_ms=differences[-1 - beyond],
        n=min(n, m),
    )
