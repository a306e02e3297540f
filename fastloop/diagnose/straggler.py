"""Which rank makes the others wait? A rank's own time is its step without the wait for slower ranks in its backward.

Passes of Python's garbage collector are left out of it: in a short fit one of them would name the rank it came to.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastloop.diagnose.reading import number, step_ms
from fastloop.measurement import PARTS, Measurement

WORTH_SHARE = 0.05
RANK_0_ALONE = ("callbacks_logging", "validation", "checkpoint", "epoch_gap")
"""Logging and saving are rank 0's by design: a rule names them as what they are."""


class Straggler(NamedTuple):
    """The slow rank, by how much it is slower than the median of the others, and in which part."""

    rank: int
    host: str
    excess_ms: float
    part: str
    part_ms: float
    others_part_ms: float


def straggler(seen: Measurement) -> Straggler | None:
    """The rank that the others wait for; None where all keep pace, or where it cannot be told."""
    step = step_ms(seen)
    found = [rank for rank in seen.ranks if number(_parts(rank).get("backward")) is not None]
    if step is None or len(found) < 2 or len(found) < len(seen.ranks):
        return None
    least = min(_backward(rank) for rank in found)
    own = [max(0.0, (_step(rank) or step) - (_backward(rank) - least) - _garbage(rank))
           for rank in found]  # fmt: skip
    at = max(range(len(own)), key=own.__getitem__)
    excess = min(step, own[at] - statistics.median(own[:at] + own[at + 1 :]))
    if excess < WORTH_SHARE * step:
        return None
    part, mine, theirs = _slow_part(found, at)
    rank = int(found[at].get("rank", at))
    if rank == 0 and part in RANK_0_ALONE:
        return None
    return Straggler(rank, str(found[at].get("host") or "?"), excess, part, mine, theirs)


def _slow_part(found: list[Mapping[str, Any]], at: int) -> tuple[str, float, float]:
    """The part in which one rank is furthest above the median of the others, with both times."""
    others = [rank for index, rank in enumerate(found) if index != at]

    def gap(part: str) -> tuple[float, float]:
        mine = number(_parts(found[at]).get(part)) or 0.0
        return mine, statistics.median(number(_parts(rank).get(part)) or 0.0 for rank in others)

    part = max((name for name in PARTS if name != "comm_exposed"), key=lambda name: gap(name)[0] - gap(name)[1])
    return part, *gap(part)


def _parts(rank: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = rank.get("parts_ms") or {}
    loop = number(parts.get("host_other"))
    return parts if loop is None else {**parts, "host_other": max(0.0, loop - _garbage(rank))}


def _backward(rank: Mapping[str, Any]) -> float:
    """With the exchange, as far as a trace of that rank told it apart: who waits for others does it in there."""
    return float(_parts(rank)["backward"]) + (number(_parts(rank).get("comm_exposed")) or 0.0)


def _garbage(rank: Mapping[str, Any]) -> float:
    return number(rank.get("garbage_ms")) or 0.0


def _step(rank: Mapping[str, Any]) -> float | None:
    step = rank.get("step_ms")
    return number(step.get("mean") if isinstance(step, Mapping) else step)
