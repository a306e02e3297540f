"""A verdict may be one outlier: what single long steps may be most of is not called a cost of each step."""

from __future__ import annotations

from collections.abc import Sequence

from fastloop import measurement
from fastloop.diagnose.naming import per_step, share_pct
from fastloop.diagnose.reading import garbage_ms, number
from fastloop.diagnose.split import WORTH_NAMING_PCT, part_ms, total
from fastloop.measurement import GAPS, Measurement
from fastloop.records import Finding

NAME = "pauses"
TITLE = "SINGLE PAUSES"
MOSTLY = 0.5
"""Share of a finding from which on it is not one of each step."""


def of_each_step(seen: Measurement, found: Sequence[Finding]) -> list[Finding]:
    """The findings without those that single pauses may be most of.

    Which part of the step the pauses came in is not known, but for what is unexplained: so each finding is held against
    all the rest of them.
    """
    share = share_pct(seen, max(0.0, pauses_ms(seen) - (part_ms(seen, "unexplained") or 0.0))) or 0.0
    return [finding for finding in found if not share or finding.bottleneck in GAPS or finding.share_pct is None
            or finding.share_pct - share >= max(WORTH_NAMING_PCT, MOSTLY * finding.share_pct)]  # fmt: skip


def told(seen: Measurement, hidden: Sequence[Finding]) -> str | None:
    """Words for single pauses that `hidden` findings were mostly made of, or that are worth telling by themselves."""
    paused, names = pauses_ms(seen), [finding.bottleneck for finding in hidden]
    if not names and (share_pct(seen, paused) or 0.0) < WORTH_NAMING_PCT:
        return None
    steps, median = (seen.evidence.get(NAME) or {}).get("steps"), number(seen.step_ms.get("median"))
    usual = "" if median is None else f", where the median step takes {median:.2f} ms"
    most = f"that may be most of {' and '.join(names)}, so no cost of each step is named; " if names else ""
    return (f"{steps} of {seen.steps} steps took so long that this makes {per_step(seen, paused)}{usual}: {most}"
            "no rung helps: run longer, where single pauses weigh less")  # fmt: skip


def uneven(seen: Measurement) -> str | None:
    """Words for a mean step that is that of a few long ones, more than single pauses; None where it is not."""
    times, median = measurement.uneven(seen, _garbage_ms(seen) + pauses_ms(seen)), number(seen.step_ms.get("median"))
    if times is None or median is None:
        return None
    return f"the mean step is {times:.1f} times the median one of {median:.2f} ms: that of a few long ones"


def pauses_ms(seen: Measurement) -> float:
    """What single long steps add to the mean one, less what is known to come now and then; 0 where there are none."""
    added = number((seen.evidence.get(NAME) or {}).get("ms_per_step")) or 0.0
    return max(0.0, added - _garbage_ms(seen) - (total(seen, GAPS) or 0.0))


def _garbage_ms(seen: Measurement) -> float:
    """Passes of the garbage collector, on whichever rank: they are told as such."""
    return max([garbage_ms(seen), *(number(rank.get("garbage_ms")) or 0.0 for rank in seen.ranks)])
