"""Predicts what a rung saves before it is screened, from a trial of the cost that it changes, with its number tuned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb.budget import Length, choose_length
from fastloop.experiments.climb.candidates import (
    CHANGES_TRAINING,
    Candidate,
    Position,
    apply_patch,
    count_batches_per_step,
    count_queued,
    estimate_first_start_s,
    make_patch,
)
from fastloop.experiments.climb.interface import HOPELESS, Result, Runner
from fastloop.experiments.tune.choice import list_tunables
from fastloop.experiments.tune.search import KnownTimes
from fastloop.judge.prediction import NEAR, WORTH_PCT, predict_saved_ms
from fastloop.judge.statistics import Pool
from fastloop.ladder import Ladder
from fastloop.records.card import Patch, SearchSpace, Stack, read_int
from fastloop.records.climb import Costs, End
from fastloop.records.plan import PARITY_ORDER, Parity
from fastloop.records.trial import Variation

Top = tuple[Stack, Costs]
"""A stack, and what its steps cost."""
LADDER_TIMES = 4.0
"""Speed-up of a ladder that its window allows for."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Everything that an attempt needs."""

    runner: Runner
    known: Position
    warmup: int
    """The configured warm-up steps."""
    start_s: float
    """Seconds that a training without rungs takes besides its steps."""
    pool: Pool
    ends_at: int | None = None
    """Optimizer steps after which the training ends by itself; None if it trained all requested steps."""
    estimate_proof_s: Callable[[Top], float] = lambda _top: math.inf
    """Seconds that the confirmation of a stack takes."""
    hurried_start: Result | None = None
    """The start as it was measured, if nothing is kept yet and the budget is too short for careful screens."""

    @property
    def top_start_s(self) -> float:
        """Seconds that a further training of the current stack takes besides its steps: it may load compiled code."""
        return self.known.costs.start_s or self.start_s

    def choose_length(
        self,
        fast_ms: float,
        slow_ms: float,
        stack: Stack,
        workers: int,
        *,
        screen: bool = True,
        fill_read: bool = False,
    ) -> Length:
        """Choose the length for trainings with these step times; `stack` is the one with the longest queues."""
        return choose_length(
            fast_ms,
            slow_ms,
            queued=count_queued(stack, workers),
            warmup=self.warmup,
            screen=screen,
            batches_per_step=count_batches_per_step(self.known, stack),
            fill_read=fill_read,
        ).up_to(self.ends_at)

    def choose_ladder_length(self, stack: Stack) -> Length:
        """Choose the length for a ladder on the start, which may be several times as fast and may add workers."""
        now_ms, workers = self.known.costs.now_ms, max(self.known.costs.workers, self.known.start.cpus)
        return self.choose_length(now_ms / LADDER_TIMES, now_ms, stack, workers, fill_read=True)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted saving of one way to set a rung, from a trial of the cost that it changes."""

    patch: Patch
    then: Costs | None = None
    saved_ms: float | None = None
    ended: End | None = None
    """What rules it out; None if nothing has so far."""
    why: str = ""
    tuned: Mapping[str, int] | None = None
    parity_class: Parity = "exact"
    start_s: float = 0.0


# -- predicting -------------------------------------------------------------------------------------------------------


def predict(context: Context, candidate: Candidate, at: str) -> Prediction:
    """Predict the most promising way to set a candidate."""
    predictions = []
    for number, each in enumerate(candidate.patches, 1):
        predictions.append(_predict_one(context, candidate, each, f"{at}/predict-{number}"))
        if predictions[-1].ended is None and not candidate.way.every:
            break
    usable = [prediction for prediction in predictions if prediction.ended is None]
    return max(
        usable,
        key=lambda prediction: math.inf if prediction.saved_ms is None else prediction.saved_ms,
        default=predictions[0],
    )


def _predict_one(context: Context, candidate: Candidate, settings: Patch, at: str) -> Prediction:
    """Measure the cost that the rung changes."""
    known, costs = context.known, context.known.costs
    if candidate.way.changes == "gap":
        then = costs.but(outside_ms=costs.outside_ms - costs.gap_ms, gap_ms=0.0)
        return Prediction(patch=settings, then=then, saved_ms=predict_saved_ms(costs, then), start_s=context.start_s)
    first_start_s = estimate_first_start_s(settings["rungs"])
    if candidate.way.changes == "engine":
        return Prediction(patch=settings, start_s=context.start_s + first_start_s)
    stack, expected = apply_patch(known.stack, settings), costs.replayed_ms or costs.now_ms
    variation: Variation = candidate.way.changes
    took = context.choose_length(expected, expected, {}, 0)
    if costs.beside:  # idle workers would leave the training thread more CPU than it will have
        variation, expected = "as_it_is", costs.now_ms
        took = context.choose_length(expected, expected, stack, costs.workers, fill_read=True)
    need_s = took.seconds(expected, context.start_s) + first_start_s
    result = context.runner.run(
        at,
        stack,
        Ask(variation=variation, steps=took.steps, warmup=took.warmup),
        what=f"{candidate.key}: predicting",
        need_s=need_s,
        slowest_ms=HOPELESS * expected,
    )
    if result.too_slow:
        lost_ms = (HOPELESS - 1) * costs.now_ms  # at least
        return Prediction(patch=settings, ended="small", why=result.cause or "", saved_ms=-lost_ms)
    if not result.ok:
        return Prediction(patch=settings, ended="crashed", why=result.cause or "it failed")
    rungs = list(settings["rungs"])
    if reasons := [result.skipped[rung] for rung in rungs if rung in result.skipped]:
        return Prediction(patch=settings, ended="inactive", why=reasons[0])
    then = costs.but(
        replayed_ms=result.rest_ms if costs.beside else result.core_ms,
        resident_ms=costs.resident_ms if candidate.family == "feed" else None,
        alone_ms=costs.alone_ms if candidate.family == "sync" else None,
        mfu=result.mfu,
        launch_bound=result.launch_bound,
    )
    weakest = max((result.classes.get(rung, "exact") for rung in rungs), key=PARITY_ORDER.index)
    barred = weakest == CHANGES_TRAINING and weakest not in known.start.allow
    return Prediction(
        patch=settings,
        then=then,
        saved_ms=predict_saved_ms(costs, then),
        ended="class" if barred else None,
        why="it changes the training, which needs --allow changes-training" if barred else "",
        start_s=max(context.start_s, result.start_s),
        parity_class=weakest,
    )


# -- tuning -----------------------------------------------------------------------------------------------------------


def tune_number(context: Context, candidate: Candidate, prediction: Prediction, at: str) -> Prediction:
    """Tune the candidate's number by measured step time, if another value could matter."""
    known, then, rung = context.known, prediction.then, candidate.tunes
    if rung is None or then is None or prediction.ended or not _is_worth_tuning(context, candidate, then):
        return prediction
    if list_tunables()[rung].by_trial:
        return _compare_with_largest(context, candidate, rung, prediction, at)
    stack, now_ms = apply_patch(known.stack, prediction.patch), known.costs.now_ms
    took = context.choose_length(now_ms, now_ms, stack, then.workers)
    found = context.runner.tune(
        f"{at}/tune",
        stack,
        rung,
        took,
        _list_known_times(known, rung, prediction),
        what=f"{candidate.key}: tuning",
        need_s=took.seconds(now_ms, prediction.start_s or context.start_s),
    )
    if not found.patch:
        return prediction
    number = None if found.best is None else {found.key: found.best}
    tuned = found.patch["rungs"]
    best = {
        "rungs": {each: {**settings, **tuned.get(each, {})} for each, settings in prediction.patch["rungs"].items()}
    }
    if apply_patch(known.stack, best) in (known.stack, stack):
        return dataclasses.replace(prediction, tuned=number)
    return dataclasses.replace(_predict_one(context, candidate, best, f"{at}/predict-tuned"), tuned=number)


def _list_known_times(known: Position, what: str, prediction: Prediction) -> KnownTimes:
    """Return known times that a search need not train: the stack without the rung, and the predicted micro-batch."""
    costs, start, then, number = known.costs, known.start, prediction.then, list_tunables()[what]
    if number.trained != "replayed":
        return KnownTimes(ms={0: costs.now_ms})
    micro = start.micro_batch or 1
    size = read_int(prediction.patch["rungs"][what], number.field, 0)
    known_ms = {micro: costs.replayed_ms, size: None if then is None else then.replayed_ms}
    loader_ms = costs.loader_ms if costs.beside and costs.loader_ms is not None else 0.0
    ms = {
        value: max(each, loader_ms) + costs.outside_ms for value, each in known_ms.items() if value and each is not None
    }
    return KnownTimes(ms=ms, micro=micro, window=round(start.batches_per_step), beside=costs.beside)


def _compare_with_largest(
    context: Context, candidate: Candidate, rung: str, prediction: Prediction, at: str
) -> Prediction:
    """Take the largest value of the rung's number if that saves more than the default."""
    number = list_tunables()[rung]
    value = max(number.values(SearchSpace()))
    large = _predict_one(context, candidate, make_patch(rung, **{number.field: value}), f"{at}/predict-deeper")
    rest, large_rest = (each.then.replayed_ms if each.then is not None else None for each in (prediction, large))
    better = (
        large.ended is None
        and rest is not None
        and large_rest is not None
        and large_rest < rest * (1 - number.tolerance)
    )
    taken = value if better else getattr(getattr(Ladder(), rung), number.field)
    return dataclasses.replace(large if better else prediction, tuned={f"rungs.{rung}.{number.field}": taken})


def _is_worth_tuning(context: Context, candidate: Candidate, then: Costs) -> bool:
    """Whether the cost that the number can change matters: copies, gradient exchange, or the rung's whole saving."""
    rest, costs = then.replayed_ms, context.known.costs
    if candidate.family == "feed":
        if rest is None or costs.resident_ms is None or rest <= NEAR * costs.resident_ms:
            return False
        hidden = predict_saved_ms(costs, then.but(replayed_ms=costs.resident_ms))
        return hidden is not None and context.known.pct(hidden) >= WORTH_PCT
    if candidate.family == "sync":
        return rest is not None and costs.alone_ms is not None and rest > NEAR * costs.alone_ms
    gain = predict_saved_ms(costs, then)
    return gain is None or context.known.pct(gain) >= WORTH_PCT
