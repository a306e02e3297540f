"""Plays modules again to see how rounding and other random numbers change their results."""

from __future__ import annotations

import time

from fastloop.bridge.apply.rehearse.played import RunResults, compare_results
from fastloop.bridge.apply.rehearse.recorded_calls import CallReplayer
from fastloop.judge.parity import RESOLUTION
from fastloop.judge.rehearsal import Deviation

FEWEST_DRAWS, MOST_DRAWS, ENOUGH_S = 4, 32, 0.3
"""Plays with other random numbers: many where a play is short, because the results of small modules scatter widely."""


def measure_rounding(replayer: CallReplayer, usual: RunResults, precision: str, *, dropout: bool) -> Deviation:
    """The deviation that rounding causes in the modules as they are now."""
    with replayer.perturbed(RESOLUTION[precision]):
        return compare_results(usual, replayer.replay(dropout=dropout))


def draw(replayer: CallReplayer, usual: RunResults, *, dropout: bool, count: int | None = None) -> list[Deviation]:
    """Play the modules as they are now with other random numbers, the same ones each time this is called.

    Args:
        count: number of plays; None: as many as the time allows.
    """
    began = time.perf_counter()
    found: list[Deviation] = []

    def wants_more() -> bool:
        if count is not None:
            return len(found) < count
        return len(found) < FEWEST_DRAWS or (len(found) < MOST_DRAWS and time.perf_counter() - began < ENOUGH_S)

    while wants_more():
        found.append(compare_results(usual, replayer.replay(seed=1 + len(found), dropout=dropout)))
    return found
