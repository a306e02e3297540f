"""The few steps that are far longer than all others: a pause that came once says nothing of what a step costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

MOST = 3
"""Steps; what makes more of them long comes again, and its mean is what it costs."""
FAR = 4.0
"""Times the longest of all other steps."""


class Pauses(NamedTuple):
    """How many steps, and what they add to the mean step beyond the median one, in seconds."""

    steps: int
    s_per_step: float


def pauses(step_s: Sequence[float]) -> Pauses | None:
    """The single long steps among these; None where there are none."""
    ordered = sorted(step_s, reverse=True)
    if len(ordered) <= 2 * MOST:
        return None
    long = [step for step in ordered[:MOST] if step > FAR * ordered[MOST]]
    median = statistics.median(ordered)
    return Pauses(len(long), sum(step - median for step in long) / len(ordered)) if long else None
