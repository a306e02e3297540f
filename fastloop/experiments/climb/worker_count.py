"""Chooses the number of workers: by timing the loader alone, and by trainings only if loading stays the limit.

One trial measures the loader with several counts. Its times also predict what the rung saves, so no other trial or
search is needed. They are kept: if another rung makes the rest of the step so fast that loading would limit it, that
rung also raises the worker count, since neither would save anything alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb.candidates import Candidate, apply_patch, make_patch
from fastloop.experiments.climb.interface import Result
from fastloop.experiments.climb.prediction import Context, Prediction
from fastloop.experiments.tune.choice import (
    FASTER,
    HEADROOM,
    choose,
    find_loader_rung,
    list_tunables,
    list_values,
    name_tuned_key,
    pick_promising,
    pick_worth_measuring,
)
from fastloop.judge.prediction import predict_saved_ms
from fastloop.records.card import Patch, Stack

FORESIGHT = 4.0
"""Speed-up of the rest of the step by other rungs that is allowed for: larger counts are not measured."""
LOADER_S, LOADER_BATCHES = 4.5, 6
"""Cost of measuring one count, besides the start: seconds, and rounds of all its workers."""


def choose_worker_count(context: Context, candidate: Candidate, at: str) -> Prediction:
    """Return the workers rung with its chosen number and predicted saving."""
    costs, rung, number = context.known.costs, candidate.rung, name_tuned_key(candidate.rung)
    nothing = make_patch(rung)
    if not costs.loaders_ms:
        result = _measure_loaders(context, candidate, at)
        if not result.ok or not (result.loaders_ms or result.skipped):
            return Prediction(patch=nothing, ended="crashed", why=result.cause or "the loader could not be timed")
        if rung in result.skipped:
            return Prediction(patch=nothing, ended="inactive", why=result.skipped[rung])
        costs = costs.but(loaders_ms=tuple(result.loaders_ms.items()), fill_read=result.fill_read)
    loaders_ms = dict(costs.loaders_ms)
    count, why = _choose_count(context, candidate, loaders_ms, at)
    if count is None:
        return Prediction(patch=nothing, ended="crashed", why=why)
    if len(pick_promising(loaders_ms, costs.replayed_ms)) > 1:  # the trainings show that more are no faster
        costs = costs.but(loaders_ms=tuple((each, ms) for each, ms in costs.loaders_ms if each <= count))
    if count == _read_count(context, rung):
        why = f"it already has {count} workers"
        return Prediction(patch=nothing, ended="small", why=why, tuned={number: count})
    then = costs.but(loader_ms=loaders_ms[count], workers=count)
    return Prediction(
        patch=_make_patch(rung, count),
        then=then,
        saved_ms=predict_saved_ms(context.known.costs, then),
        tuned={number: count},
        start_s=context.start_s,
    )


def add_workers(context: Context, prediction: Prediction) -> Prediction:
    """Add to another rung as many workers as the faster step needs."""
    now, then, rung = context.known.costs, prediction.then, find_loader_rung()
    count, loaders_ms = _read_count(context, rung), dict(now.loaders_ms)
    if prediction.ended or rung in prediction.patch["rungs"] or count is None:
        return prediction
    if then is None or then.replayed_ms is None or now.loader_ms is None:
        return prediction
    more = {each: ms for each, ms in loaders_ms.items() if each > count and ms < FASTER * now.loader_ms}
    if not more or now.loader_ms <= HEADROOM * then.replayed_ms:
        return prediction
    enough = pick_promising(more, then.replayed_ms)
    best = enough[0] if len(enough) == 1 else min(more, key=lambda each: more[each])
    rungs = {**prediction.patch["rungs"], rung: {list_tunables()[rung].field: best}}
    then = then.but(loader_ms=more[best], workers=best)
    return dataclasses.replace(
        prediction,
        patch={"rungs": rungs},
        then=then,
        saved_ms=predict_saved_ms(now, then),
        tuned={**(prediction.tuned or {}), name_tuned_key(rung): best},
    )


def _make_patch(rung: str, count: int) -> Patch:
    return make_patch(rung, **{list_tunables()[rung].field: count})


def _read_count(context: Context, rung: str) -> int | None:
    """Return the number that this climb has chosen; None if it has chosen none."""
    count = context.known.stack.get(rung, {}).get(list_tunables()[rung].field)
    return count if isinstance(count, int) else None


def _measure_loaders(context: Context, candidate: Candidate, at: str) -> Result:
    """Time the loader alone, with every promising count."""
    known, costs = context.known, context.known.costs
    one_ms = None if costs.loader_ms is None else costs.loader_ms * max(1, costs.workers)
    enough_ms = None if costs.replayed_ms is None else HEADROOM * costs.replayed_ms
    ample_ms = None if enough_ms is None else enough_ms / FORESIGHT
    counts = pick_worth_measuring(list_values(candidate.rung, cpus=known.start.cpus), one_ms, enough_ms)
    slow_s = LOADER_BATCHES * (one_ms or costs.now_ms) / 1e3 / known.start.batches_per_step
    return context.runner.run(
        f"{at}/predict-1",
        apply_patch(known.stack, make_patch(candidate.rung)),
        Ask(variation="loader", counts=counts, enough_ms=ample_ms),
        what=f"{candidate.key}: predicting",
        need_s=context.start_s + len(counts) * (LOADER_S + slow_s),
    )


def _choose_count(
    context: Context, candidate: Candidate, loaders_ms: Mapping[int, float], at: str
) -> tuple[int | None, str]:
    """Return the count to use, or None and the reason."""
    counts = pick_promising(loaders_ms, context.known.costs.replayed_ms)
    if len(counts) == 1:
        return counts[0], ""
    trained = [_train_with(context, candidate, count, loaders_ms[count], at) for count in counts]
    ms = {count: result.step_ms for count, result in zip(counts, trained, strict=True) if result.ok and result.step_ms}
    causes = [result.cause for result in trained if result.cause]
    why = causes[0] if causes else "the runs were too short to measure a rate"
    return choose(ms, list_tunables()[candidate.rung].tolerance), why


def _train_with(context: Context, candidate: Candidate, count: int, loader_ms: float, at: str) -> Result:
    """Run a training with one count."""
    costs = context.known.costs
    stack: Stack = apply_patch(context.known.stack, _make_patch(candidate.rung, count))
    expected = max(costs.replayed_ms or 0.0, loader_ms) + costs.outside_ms
    took = context.choose_length(expected, expected, stack, count, fill_read=True)
    return context.runner.run(
        f"{at}/count-{count}",
        stack,
        Ask(steps=took.steps, warmup=took.warmup),
        what=f"{candidate.key}: training with {count}",
        need_s=took.seconds(expected, context.start_s),
    )
