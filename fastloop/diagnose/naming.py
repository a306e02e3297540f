"""How a cost becomes a finding: its share, its words, and what would be gained at most if it were gone."""

from __future__ import annotations

from collections.abc import Sequence

from fastloop.diagnose.reading import step_ms
from fastloop.diagnose.remedies import Remedy
from fastloop.diagnose.split import WORTH_NAMING_PCT
from fastloop.measurement import Measurement
from fastloop.records import Finding

ORDINARY_MS = 0.25
"""What any loop pays a step for fetching a batch, moving it, or its progress bar and logger: not named."""
NO_GAIN_PCT = 3.0
"""A trial without a cost that is not faster by more than this says that the cost holds nothing up."""


def named(seen: Measurement, bottleneck: str, ms: float | None, facts: str, remedy: Remedy, *,
          measured_pct: float | None = None, most_pct: float | None = None, bound: bool = False,
          worth_pct: float = WORTH_NAMING_PCT, least_ms: float = 0.0,
          detail: Sequence[str] = ()) -> Finding | None:  # fmt: skip
    """The finding for a cost of so many milliseconds a step; None where it is not worth naming or was not measured.

    Args:
        measured_pct: the gain that a trial without the cost had; 3 % or less means that it holds nothing up.
        most_pct: a gain that the estimate may not exceed: of a trial that took away more than this cost, or of a part.
        bound: `ms` is nothing but an upper bound, from which no gain can be derived.
        worth_pct, least_ms: from which share of the step and which time on it is named.
    """
    share = share_pct(seen, ms)
    if ms is None or share is None or share < worth_pct or ms < least_ms:
        return None
    if measured_pct is not None and measured_pct <= NO_GAIN_PCT:
        return None
    bounds = [gain for gain in (serial_gain_pct(share), most_pct) if gain is not None]
    gain = min(bounds) if bounds and not bound else None
    return Finding(bottleneck=bottleneck, share_pct=share, why=f"{facts}; {remedy.says}", patch=remedy.patch,
                   ceiling_gain_pct=gain if measured_pct is None else measured_pct,
                   ceiling_is_estimate=measured_pct is None, detail=tuple(detail))  # fmt: skip


def share_pct(seen: Measurement, ms: float | None) -> float | None:
    """Per cent of the step, at most 100; None where either is unknown."""
    step = step_ms(seen)
    return None if ms is None or step is None else min(100.0, 100 * ms / step)


def serial_gain_pct(share: float) -> float | None:
    """Gain if a serial part of the step were gone; None where nothing would be left. An estimate, for loops overlap."""
    return 100 * share / (100 - share) if share < 100 else None


def gain_pct(seen: Measurement, ms: float) -> float | None:
    """Gain if so many milliseconds of the step were gone."""
    share = share_pct(seen, ms)
    return None if share is None else serial_gain_pct(share)


def per_step(seen: Measurement, ms: float | None) -> str:
    """``60.0 of 100.0 ms a step``, with a second digit where steps are short."""
    step = step_ms(seen) or 0.0
    digits = 1 if step >= 10 else 2
    return f"{ms or 0.0:.{digits}f} of {step:.{digits}f} ms a step"


def device(seen: Measurement) -> str:
    return "GPU" if seen.device == "cuda" else "device"


def times(gain_pct: float) -> str:
    """A gain as a factor: 8.3x."""
    factor = 1 + gain_pct / 100
    return f"{factor:.1f}x" if factor >= 2 else f"{factor:.2f}x"
