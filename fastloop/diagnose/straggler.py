"""Finds the rank that makes the others wait. A rank's own time is its step without the waits for slower ranks.

A rank waits in its backward and in ``host_other``, where Lightning checks after every batch whether any rank must stop.
Python's garbage collection counts as such a wait too: in a short fit, a single pass would make its rank look slow.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from fastloop.records.measurement import PARTS, Measurement
from fastloop.records.readings import CPU_WORTH_PCT, Rank, read_ranks, read_step_ms, to_number

WORTH_SHARE = 0.05
WAITS = ("backward", "comm_exposed", "host_other")
"""Parts in which a rank waits for others; the exchange is a separate part only if that rank was traced."""
COVERS = 1.5
"""A wait is blamed on the slow rank's slowest part if it is at most this many times that part's excess."""
RANK_0_ALONE = ("callbacks_logging", "validation", "checkpoint", "epoch_gap")
"""Logging and saving happen on rank 0 by design: other rules name them."""


class Straggler(NamedTuple):
    """The slow rank, how much slower it is than the median of the others, and in which part."""

    rank: int
    host: str
    excess_ms: float
    part: str
    part_ms: float
    others_part_ms: float


def find_straggler(seen: Measurement) -> Straggler | None:
    """Find the rank that the others wait for; None if all keep pace, or if it is unknown."""
    step = read_step_ms(seen)
    found = [rank for rank in read_ranks(seen) if _read_ms(rank, "backward") is not None]
    if step is None or len(found) < 2 or len(found) < len(seen.ranks):
        return None
    least = min(_waits(rank) for rank in found)
    own = [max(0.0, (to_number(rank.mean_ms) or step) - (_waits(rank) - least)) for rank in found]
    at = max(range(len(own)), key=own.__getitem__)
    excess = min(step, own[at] - statistics.median(own[:at] + own[at + 1 :]))
    if excess < (WORTH_SHARE if seen.device == "cuda" else CPU_WORTH_PCT / 100) * step:
        return None
    part, mine, theirs = _find_slow_part(found, at)
    if excess > COVERS * (mine - theirs):
        return None
    slow = found[at]
    rank = at if slow.rank is None else slow.rank
    if rank == 0 and part in RANK_0_ALONE:
        return None
    return Straggler(rank, slow.host or "?", excess, part, mine, theirs)


def _find_slow_part(found: list[Rank], at: int) -> tuple[str, float, float]:
    """Return the part in which one rank is furthest above the median of the others, with both times."""
    others = [rank for index, rank in enumerate(found) if index != at]

    def gap(part: str) -> tuple[float, float]:
        mine = _read_ms(found[at], part) or 0.0
        return mine, statistics.median(_read_ms(rank, part) or 0.0 for rank in others)

    own = [name for name in PARTS if name not in WAITS]
    part = max(own, key=lambda name: gap(name)[0] - gap(name)[1])
    return part, *gap(part)


def _read_ms(rank: Rank, part: str) -> float | None:
    return to_number(rank.part_ms(part))


def _waits(rank: Rank) -> float:
    """Return a rank's milliseconds in the parts where it waits for others."""
    return sum(_read_ms(rank, part) or 0.0 for part in WAITS)
