"""A verdict may be one outlier: what single long steps may be most of is not called a cost of each step."""

from __future__ import annotations

from collections.abc import Sequence

from fastloop.diagnose.naming import per_step, share_pct
from fastloop.diagnose.reading import garbage_ms, number
from fastloop.diagnose.split import GAPS, WORTH_NAMING_PCT, total
from fastloop.measurement import Measurement
from fastloop.records import Finding

NAME = "pauses"
MOSTLY = 0.5
"""Share of a finding from which on it is not one of each step."""


def told_apart(seen: Measurement, found: Sequence[Finding]) -> list[Finding]:
    """The findings, with one for single pauses in place of all that these may be most of.

    Which part of the step the pauses came in is not known, so each of them is held against the whole.
    """
    paused = pauses_ms(seen)
    share = share_pct(seen, paused)
    if not share:
        return list(found)
    of_each = [finding for finding in found if finding.bottleneck in GAPS or finding.share_pct is None
               or finding.share_pct - share >= max(WORTH_NAMING_PCT, MOSTLY * finding.share_pct)]  # fmt: skip
    if len(of_each) == len(found):
        return of_each
    hidden = [finding.bottleneck for finding in found if finding not in of_each]
    steps, median = (seen.evidence.get(NAME) or {}).get("steps"), number(seen.step_ms.get("median"))
    usual = "" if median is None else f", where the median step takes {median:.2f} ms"
    why = (f"{steps} of {seen.steps} steps took so long that this makes {per_step(seen, paused)}{usual}: that may be"
           f" most of {' and '.join(hidden)}, so no cost of each step is named; no rung helps: run longer, where single"
           " pauses weigh less")  # fmt: skip
    return [*of_each, Finding(bottleneck=NAME, share_pct=share, why=why)]


def pauses_ms(seen: Measurement) -> float:
    """What single long steps add to the mean one, less what is known to come now and then; 0 where there are none.

    Passes of the garbage collector, on whichever rank, are told as such.
    """
    added = number((seen.evidence.get(NAME) or {}).get("ms_per_step")) or 0.0
    garbage = max([garbage_ms(seen), *(number(rank.get("garbage_ms")) or 0.0 for rank in seen.ranks)])
    return max(0.0, added - garbage - (total(seen, GAPS) or 0.0))
