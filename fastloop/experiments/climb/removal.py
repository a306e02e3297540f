"""Checks whether a rung at the top is still worthwhile, by training the stack without it.

A rung that came with others may do nothing, and one that paid early may no longer pay. All comparisons are with the top
before any removal, so that many small losses cannot add up.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb.candidates import WITHOUT, apply_patch
from fastloop.experiments.climb.interface import Result
from fastloop.experiments.climb.prediction import Context
from fastloop.ladder import collect_cards
from fastloop.records.climb import Attempt, Rates

CLEAR = 1.1
"""If one pair of runs differs by more than this factor, a second pair would change nothing."""
NOT_SLOWER = 1.01
"""Largest mean ratio of two pairs that still counts as not slower: less cannot be distinguished from noise."""
PAIRS = 2


def try_without(context: Context, rung: str, at: str, run_top: Callable[[int], Result]) -> Attempt:
    """Train without a rung, and remove it if that is not slower.

    Args:
        at: the folder of its runs.
        run_top: returns the run of the whole top with this number; each is made once and serves all rungs.
    """
    known, patch = context.known, {"rungs": {rung: {"enabled": False}}}
    stack, key = apply_patch(known.stack, patch), f"{WITHOUT}{rung}"
    now_ms = known.costs.now_ms
    took = context.choose_length(now_ms, now_ms, known.stack, known.costs.workers, fill_read=known.costs.fill_read)
    pairs: list[tuple[float, float]] = []
    steps_ms: list[tuple[float, float]] = []
    cause = None
    for number in range(PAIRS):
        top = run_top(number)
        result = context.runner.run(
            f"{at}/run-{number}",
            stack,
            Ask(seed=number, steps=took.steps, warmup=took.warmup),
            what=f"{key}: run {number + 1} of {PAIRS}",
            need_s=took.seconds(now_ms, context.top_start_s),
        )
        if not result.is_measured:
            cause = result.fault
            break
        pairs.append((result.samples_per_s or 0.0, top.samples_per_s or 0.0))
        steps_ms.append((top.step_ms or 0.0, result.step_ms or 0.0))
        if pairs[0][1] > CLEAR * pairs[0][0]:
            break
    ratio = geometric_mean([high / low for low, high in pairs]) if pairs else None
    goes = cause is None and ratio is not None and ratio <= NOT_SLOWER
    change = "" if ratio is None else f"{100 * (1 / ratio - 1):+.1f} %"
    before, after = (geometric_mean(each) for each in zip(*steps_ms, strict=True)) if steps_ms else (None, None)
    return Attempt(
        rung=rung,
        family=collect_cards()[rung].family,
        patch=patch,
        key=key,
        step_ms_before=before,
        step_ms_after=after,
        measured_saved_ms=None if before is None or after is None else before - after,
        kept=goes,
        ended="kept" if goes else "needed",
        why=f"without it: {cause or change}",
        runs=len(pairs),
        rates=Rates(base=tuple(top for _, top in pairs), arm=tuple(without for without, _ in pairs)),
        at=known.height,
        costs=known.costs.but(now_ms=after) if goes and after else None,
    )
