"""One attempt of a climb: predict what a rung saves, tune its numbers, screen it with two pairs of runs, check that the
training is still the same, and keep it or say why not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastloop import stats
from fastloop.commands.arms import Ask
from fastloop.commands.candidates import Candidate
from fastloop.commands.crew import counted, fed
from fastloop.commands.gates import outcome_json
from fastloop.commands.lab import Seen
from fastloop.commands.lengths import gradient_s
from fastloop.commands.look import Look, Scene, predicted, tuned
from fastloop.commands.stack import plus
from fastloop.comparison import Outcome
from fastloop.predict import WORTH_PCT, Costs, error_pct, without_absurd
from fastloop.report.climbed import ODD, UNDECIDED
from fastloop.stats import Effect, Pool

TURNS = ((0, "base"), (0, "arm"), (1, "arm"), (1, "base"))
"""Seed and side of a screen's runs: two pairs, the second in the opposite order."""
APART = 1.25
"""Where the ratios of two pairs differ by this factor, and are not both this far on the same side of 1, something else
ran on the machine during one of them."""


class BaseFailed(Exception):
    """The training without the candidate failed, so nothing can be said of the candidate."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        super().__init__(seen.cause)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of an attempt."""

    row: dict[str, Any]
    """In ``climb.json``."""
    costs: Costs | None = None
    """Of the new stack, where it was kept."""


def attempt(scene: Scene, candidate: Candidate, at: str) -> Result:
    """Make it; everything that is run goes below the folder `at`.

    Raises:
        Spent: the budget ended it; what is finished will be found again.
        BaseFailed: the stack that it was to be put on does not run any more.
    """
    if candidate.refused is not None:
        patch = candidate.patches[0] if candidate.patches else {"rungs": {candidate.rung: {"enabled": True}}}
        return Result(row=_row(scene, candidate, Look(patch=patch), ended="inactive", why=candidate.refused))
    if candidate.tunes == "workers":
        look = counted(scene, candidate, at)
    else:
        look = fed(scene, tuned(scene, candidate, predicted(scene, candidate, at), at))
    pct = None if look.saved_ms is None else scene.known.pct(look.saved_ms)
    if look.ended is None and look.saved_ms is not None and pct is not None and pct < WORTH_PCT:
        why = f"predicted to save {look.saved_ms:.1f} ms ({pct:.1f} %), below {WORTH_PCT:g} %"
        look = dataclasses.replace(look, ended="small", why=why)
    if look.ended is not None:
        return Result(row=_row(scene, candidate, look, ended=look.ended, why=look.why))
    return _screened(scene, candidate, look, at)


# -- screening --------------------------------------------------------------------------------------------------------


def _screened(scene: Scene, candidate: Candidate, look: Look, at: str) -> Result:
    known = scene.known
    arm, runs = plus(known.stack, look.patch), dict[str, list[Seen]]({"base": [], "arm": []})
    now, then = known.costs, look.then or known.costs
    after_ms = now.now_ms - (look.saved_ms or 0.0)
    took = scene.length(after_ms, now.now_ms, arm, then.workers, fill_read=then.fill_read)
    for place, (seed, side) in enumerate(TURNS, 1):
        need_s = took.seconds(now.now_ms if side == "base" else after_ms, look.start_s or scene.start_s)
        seen = scene.lab.run(f"{at}/screen-{place}-{side}", arm if side == "arm" else known.stack,
                             Ask(seed=seed, steps=took.steps, warmup=took.warmup, ledger=True),
                             what=f"{candidate.key}: screening {place} of {len(TURNS)}", need_s=need_s)  # fmt: skip
        runs[side].append(seen)
        if side == "base" and (not seen.ok or not seen.samples_per_s or not seen.step_ms):
            raise BaseFailed(seen)
        if side == "arm" and (ruled_out := _ruled_out(look, seen, runs["base"][0])):
            return Result(row=_row(scene, candidate, look, ended=ruled_out[0], why=ruled_out[1], runs=runs))
        if side == "arm" and len(runs["arm"]) == 1:
            after_ms = seen.step_ms or after_ms
            same = scene.lab.ledger(known.stack, arm, [(runs["base"][0], seen)])
            if same.passed is False:
                return Result(row=_row(scene, candidate, look, ended="parity", why=same.why, runs=runs, outcome=same))
    return _judged(scene, candidate, look, runs, at)


def _ruled_out(look: Look, seen: Seen, base: Seen) -> tuple[str, str] | None:
    """Why this one run of the arm is the last."""
    if not seen.ok or not seen.samples_per_s or not seen.step_ms:
        return "crashed", seen.cause or "the run was too short to measure a rate"
    if reasons := [seen.inactive[rung] for rung in look.patch["rungs"] if rung in seen.inactive]:
        return "inactive", reasons[0]
    if seen.global_batch != base.global_batch:
        return "parity", f"an optimizer step has {seen.global_batch} samples, not {base.global_batch}"
    return None


def _judged(scene: Scene, candidate: Candidate, look: Look, runs: Mapping[str, Sequence[Seen]], at: str) -> Result:
    pairs = [(base.samples_per_s or 0.0, arm.samples_per_s or 0.0)
             for base, arm in zip(runs["base"], runs["arm"], strict=True)]  # fmt: skip
    effect = stats.screen(pairs, scene.pool)
    if (odd := _odd(pairs)) is not None:
        return Result(row=_row(scene, candidate, look, ended=ODD, why=odd, runs=runs))
    if not stats.looks_faster(effect):
        gain = "" if effect is None else f": {100 * (effect.ratio - 1):+.1f} % in two pairs, where runs differ by" \
                                         f" {100 * effect.sd:.1f} %"  # fmt: skip
        return Result(row=_row(scene, candidate, look, ended="not_faster", why=f"not faster{gain}", runs=runs))
    need_s = sum(gradient_s(runs[side][0].step_ms or 0.0, look.start_s or scene.start_s) for side in runs)
    outcome = scene.lab.gates(at, scene.known.stack, plus(scene.known.stack, look.patch),
                              list(zip(runs["base"], runs["arm"], strict=True)), what=f"{candidate.key}: parity",
                              need_s=need_s)  # fmt: skip
    ended, why = _parity(outcome, effect)
    row = _row(scene, candidate, look, ended=ended, why=why, runs=runs, outcome=outcome)
    if ended != "kept":
        return Result(row=row)
    arms, then = runs["arm"], look.then
    blank, rests = Costs(now_ms=row["step_ms_after"]), [seen.rest_ms for seen in arms if seen.rest_ms is not None]
    costs = (then or blank).but(
        now_ms=row["step_ms_after"], outside_ms=_mean([seen.outside_ms for seen in arms]),
        gap_ms=_mean([seen.gap_ms for seen in arms]), workers=arms[0].workers, copies_ms=arms[0].copies_ms)  # fmt: skip
    if costs.beside and rests:
        costs = costs.but(replayed_ms=_mean(rests))
    return Result(row=row, costs=without_absurd(costs))


def _odd(pairs: Sequence[tuple[float, float]]) -> str | None:
    """Why a screen gives no answer: one run that is far off the others is the machine's doing, not the arm's."""
    ratios = sorted(arm / base for base, arm in pairs)
    if ratios[-1] <= APART * ratios[0] or ratios[0] >= APART or ratios[-1] <= 1 / APART:
        return None
    told = " and ".join(f"{100 * (ratio - 1):+.0f} %" for ratio in ratios)
    return f"no answer: its two pairs say {told}, so something else ran on this machine"


def _parity(outcome: Outcome, effect: Effect | None) -> tuple[str, str]:
    """What the gates make of an arm that is faster. It stays only where they held, as far as they can tell here."""
    if outcome.passed is False:
        return "parity", outcome.why
    if outcome.undecided:
        return UNDECIDED, f"not shown to be the same training: {outcome.why}"
    gain = "" if effect is None else f"{100 * (effect.ratio - 1):+.1f} %"
    return "kept", "; ".join(filter(None, [gain, "" if outcome.passed else outcome.why]))


# -- saying -----------------------------------------------------------------------------------------------------------


def _row(
    scene: Scene, candidate: Candidate, look: Look, *, ended: str, why: str,
    runs: Mapping[str, Sequence[Seen]] | None = None, outcome: Outcome | None = None,
) -> dict[str, Any]:  # fmt: skip
    """How it stands in ``climb.json``. ``try``, ``ended``, ``at`` and ``rates`` are what a later call decides by."""
    base, arm = (_ok((runs or {}).get(side, ())) for side in ("base", "arm"))
    both = min(len(base), len(arm))
    before = _step_ms(base) if both else None
    after = _step_ms(arm) if both else None
    measured = before - after if before and after else None
    rates = {"base": [seen.samples_per_s for seen in base[:2]], "arm": [seen.samples_per_s for seen in arm]}
    ci95 = _ci95_ms(list(zip(rates["base"], rates["arm"], strict=False)), before, scene.pool) if both > 1 else None
    outcome = outcome or Outcome(parity_class=look.parity_class, why="not asked: it was not kept for other reasons")
    return {
        "rung": candidate.rung, "family": candidate.family, "patch": dict(look.patch), "try": candidate.key,
        "step_ms_before": before, "step_ms_after": after, "predicted_saved_ms": look.saved_ms,
        "measured_saved_ms": measured, "ci95_saved_ms": ci95,
        "prediction_error_pct": error_pct(look.saved_ms, measured), "kept": ended == "kept", "ended": ended,
        "why": why, "parity": outcome_json(outcome), "tuned": look.tuned, "runs": both, "rates": rates,
        "at": scene.known.height,
    }  # fmt: skip


def _ci95_ms(pairs: Sequence[tuple[Any, Any]], before: float | None, pool: Pool) -> list[float] | None:
    effect = stats.screen(pairs, pool)
    if effect is None or before is None:
        return None
    return [before * (1 - 1 / ratio) for ratio in stats.interval(effect)]


def _ok(runs: Sequence[Seen]) -> list[Seen]:
    return [seen for seen in runs if seen.ok and seen.samples_per_s and seen.step_ms]


def _step_ms(runs: Sequence[Seen]) -> float:
    return math.exp(_mean([math.log(seen.step_ms or 1.0) for seen in runs]))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
