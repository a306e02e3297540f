"""Detects whether a long training got slower, by short checks of the step long after the first window. Pure arithmetic.

One check proves nothing: the mean of fifty uneven steps sometimes varies by more than ten percent. The step counts as
slower if two checks in a row, the second soon after the first, are both slower than the reference by at least 10 % and
by more than three standard errors of the difference, if the spread of the steps is known. Step times exclude
validation, checkpoints and the gap between epochs, which occur in one check and not in the next.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fastloop.numbers import format_short

EVERY_S = 15 * 60.0
RECHECK_S = 60.0
"""Delay from a slow check to the next: short, so that a warning still helps, but long enough for a hiccup to pass."""
CHECK_STEPS = 50
SLOWER_PCT = 10.0
STANDARD_ERRORS = 3.0
MOST_CHECKS = 400
_CLOCK_PCT = 3.0
_SHARE_OF_SLOWDOWN = 0.25


@dataclass(frozen=True, kw_only=True)
class StepCheck:
    """The mean step of one window. None = unknown."""

    step: int
    """Optimizer steps of the fit when the window ended."""
    step_ms: float
    """Mean, without validation, checkpoints and epoch gaps."""
    steps: int = CHECK_STEPS
    step_std_ms: float | None = None
    """Standard deviation of single steps."""
    data_wait_ms: float | None = None
    sm_clock_mhz: float | None = None
    memory_bytes: int | None = None
    foreign_processes: Collection[object] | None = None
    """Other processes on the GPU, by ids or names that are stable from check to check."""


class Drift:
    """Compares later checks with the first window. Times are seconds on any monotonic clock."""

    def __init__(self, every_s: float = EVERY_S, recheck_s: float = RECHECK_S) -> None:
        self.every_s, self.recheck_s = every_s, recheck_s
        self._reference: StepCheck | None = None
        self._began_s = self._last_s = 0.0
        self._slow = self._recheck = False
        self._entries: list[dict[str, Any]] = []
        self._warned_of: dict[str, Any] | None = None

    def due(self, now_s: float) -> bool:
        """Whether the next check is due; never before there is a reference."""
        pause = self.recheck_s if self._recheck else self.every_s
        return self._reference is not None and now_s - self._last_s >= pause

    def add(self, now_s: float, seen: StepCheck) -> str | None:
        """Add a window that has just ended: the first is the reference.

        Returns:
            The only warning of a fit, at the check that confirms a slower step; else None.
        """
        if not (math.isfinite(seen.step_ms) and seen.step_ms > 0):
            return None
        self._last_s = now_s
        if self._reference is None:
            self._reference, self._began_s = seen, now_s
            return None
        return self._compare(now_s, self._reference, seen)

    @property
    def entries(self) -> tuple[Mapping[str, Any], ...]:
        """The checks for ``Measurement.drift``; ``at_s`` counts from the end of the first window. Above 400, every
        second check is dropped, except the one that caused the warning. ``why`` is None unless a check proves a slower
        step."""
        return tuple(self._entries)

    def _compare(self, now_s: float, before: StepCheck, seen: StepCheck) -> str | None:
        slower, change_pct = is_slower(before, seen), 100 * (seen.step_ms / before.step_ms - 1)
        proven, warned = slower and self._slow, self._warned_of is not None
        self._slow, self._recheck = slower, slower and not self._slow and not warned
        why = explain_change(before, seen) if proven else None
        entry = {
            "at_s": now_s - self._began_s,
            "step": seen.step,
            "step_ms": seen.step_ms,
            "change_pct": change_pct,
            "why": why,
            "memory_mib": None if seen.memory_bytes is None else seen.memory_bytes / 2**20,
        }
        self._entries.append(entry)
        if proven and not warned:
            self._warned_of = entry
        if len(self._entries) > MOST_CHECKS:
            kept = enumerate(self._entries)
            self._entries = [each for index, each in kept if index % 2 == 0 or each is self._warned_of]
        if not proven or warned:
            return None
        now_ms, first_ms = (format_short(each.step_ms, "ms", digits=4) for each in (seen, before))
        return (
            f"the step has become {change_pct:.0f} % slower than at the start: {now_ms} instead of {first_ms}, "
            f"{(now_s - self._began_s) / 60:.0f} minutes later: {why}"
        )


def is_slower(before: StepCheck, seen: StepCheck) -> bool:
    """Whether a single check is slower; uses the spread if both windows have one."""
    gained_ms = seen.step_ms - before.step_ms
    if gained_ms < before.step_ms * SLOWER_PCT / 100:
        return False
    if before.step_std_ms is None or seen.step_std_ms is None:
        return True
    error_ms = math.sqrt(before.step_std_ms**2 / max(1, before.steps) + seen.step_std_ms**2 / max(1, seen.steps))
    return gained_ms > STANDARD_ERRORS * error_ms


def explain_change(before: StepCheck, seen: StepCheck) -> str:
    """Return all changes observed together with the slower step, since each may be the cause."""
    found = []
    if before.sm_clock_mhz and seen.sm_clock_mhz is not None:
        down_pct = 100 * (1 - seen.sm_clock_mhz / before.sm_clock_mhz)
        if down_pct >= _CLOCK_PCT:
            found.append(
                f"the SM clock is down by {down_pct:.0f} % ({before.sm_clock_mhz:.0f} to {seen.sm_clock_mhz:.0f} MHz)"
            )
    if before.data_wait_ms is not None and seen.data_wait_ms is not None:
        more_ms = seen.data_wait_ms - before.data_wait_ms
        if more_ms > 0 and more_ms >= _SHARE_OF_SLOWDOWN * (seen.step_ms - before.step_ms):
            found.append(f"waiting for data is up by {format_short(more_ms, 'ms')}")
    if before.foreign_processes is not None and seen.foreign_processes is not None:
        came = sorted(set(map(str, seen.foreign_processes)) - set(map(str, before.foreign_processes)))
        found += [f"new processes on the GPU: {', '.join(came)}"] if came else []
    return "; ".join(found) or "cause unknown"
