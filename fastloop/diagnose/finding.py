"""Turns a cost into a finding: its share, its text, and the most that removing it can gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastloop.diagnose.attribution import WORTH_NAMING_PCT, StepParts
from fastloop.diagnose.remedies import Remedy
from fastloop.records.plan import Finding

ORDINARY_MS = 0.25
"""Milliseconds per step that any loop needs to fetch a batch, move it, or update progress bar and logger. A smaller
cost is not named."""
NO_GAIN_PCT = 3.0
"""If a trial without a cost is at most this much faster, the cost is not a bottleneck."""
TITLES = {
    "data_wait": "STARVED BY DATA",
    "h2d": "WAITING FOR COPIES",
    "launch_bound": "LAUNCH-BOUND",
    "host_other": "HELD UP BY THE HOST",
    "callbacks_logging": "HELD UP BY HOOKS, LOGGING",
    "sync": "STALLED BY SYNCS",
    "comm_exposed": "WAITING FOR GRADIENTS",
    "straggler": "WAITING FOR A SLOW RANK",
    "memory_bound": "BUSY, NOT FAST: MEMORY-BOUND",
    "compute_bound": "BUSY",
    "fp32_math": "BUSY, NOT FAST: FP32 MATH",
    "validation": "HELD UP BY VALIDATION",
    "checkpoint": "HELD UP BY CHECKPOINTS",
    "epoch_gap": "HELD UP BETWEEN EPOCHS",
}
"""A bottleneck's default headline. Short enough for a terminal with 40 columns, in most cases together with the share
after it."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A cost that is worth naming: a finding without its text."""

    bottleneck: str
    time: str
    """Its milliseconds as text: ``60.0 of 100.0 ms a step``."""
    share_pct: float
    gain_pct: float | None
    is_estimate: bool

    def explain(self, facts: str, remedy: Remedy, *, title: str = "", detail: Sequence[str] = ()) -> Finding:
        """Make the finding: facts, and what to do about it. `title` replaces the default headline."""
        return Finding(
            bottleneck=self.bottleneck,
            share_pct=self.share_pct,
            why=f"{facts}; {remedy.says}",
            patch=remedy.patch,
            ceiling_gain_pct=self.gain_pct,
            ceiling_is_estimate=self.is_estimate,
            detail=tuple(detail),
            title=title or TITLES[self.bottleneck],
        )


def weigh(
    step: StepParts,
    bottleneck: str,
    ms: float | None,
    *,
    measured_pct: float | None = None,
    most_pct: float | None = None,
    bound: bool = False,
    worth_pct: float = WORTH_NAMING_PCT,
    least_ms: float = 0.0,
) -> Cost | None:
    """Weigh a cost of `ms` milliseconds a step; returns None if it is not worth naming or was not measured.

    Args:
        measured_pct: the gain of a trial without the cost; 3 % or less means that it is not a bottleneck.
        most_pct: upper limit of the estimated gain: the gain of a trial that removed more than this cost, or the gain
            from removing only a part of it.
        bound: `ms` is only an upper bound, from which no gain can be derived.
        worth_pct, least_ms: smallest share of the step and smallest time to name.
    """
    if ms is None or ms < least_ms or (share := step.to_pct(ms)) < worth_pct:
        return None
    if measured_pct is not None and measured_pct <= NO_GAIN_PCT:
        return None
    bounds = [gain for gain in (compute_gain_bound_pct(share), most_pct) if gain is not None]
    estimate = min(bounds) if bounds and not bound else None
    return Cost(
        bottleneck=bottleneck,
        time=step.format_ms(ms),
        share_pct=share,
        gain_pct=estimate if measured_pct is None else measured_pct,
        is_estimate=measured_pct is None,
    )


def compute_gain_bound_pct(share: float) -> float | None:
    """Return the gain without a serial part of the step; None if nothing is left. An estimate, since loops overlap."""
    return 100 * share / (100 - share) if share < 100 else None


def format_factor(gain_pct: float) -> str:
    """Format a gain as a factor: 8.3x."""
    factor = 1 + gain_pct / 100
    return f"{factor:.1f}x" if factor >= 2 else f"{factor:.2f}x"
