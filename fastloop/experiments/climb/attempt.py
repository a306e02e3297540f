"""One attempt of a climb.

It predicts what a rung saves, tunes its numbers, screens it with one or two pairs of runs, checks that the training is
still the same, and keeps the rung or records why not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb.budget import Length, Spent, estimate_gradient_s
from fastloop.experiments.climb.candidates import (
    CHANGES_TRAINING,
    Candidate,
    apply_patch,
    estimate_first_start_s,
    make_patch,
)
from fastloop.experiments.climb.interface import Result
from fastloop.experiments.climb.prediction import Context, Prediction, predict, tune_number
from fastloop.experiments.climb.worker_count import add_workers, choose_worker_count
from fastloop.judge import statistics
from fastloop.judge.prediction import WORTH_PCT, compute_error_pct, drop_absurd
from fastloop.judge.statistics import Effect, Pool
from fastloop.records.card import Stack
from fastloop.records.climb import Attempt, Costs, End, Rates
from fastloop.records.experiment import Outcome
from fastloop.records.plan import PARITY_ORDER

TURNS = ((0, "base"), (0, "arm"), (1, "arm"), (1, "base"), (2, "base"), (2, "arm"))
"""Seed and side of a screen's runs: two pairs, the second in the opposite order, and a third if these contradict each
other."""
USUAL = 4
"""Runs of a screen that nothing disturbs."""
APART = 1.25
"""If the ratios of two pairs differ by this factor, and are not both this far on the same side of 1, something else
ran on the machine during one of them."""
LEFT_TO_PROOF = "gradients are compared in the confirmation only: the budget has no time for both"
UNSCREENED = "samples and gradients are compared in the confirmation only: the budget has no time for a screen"
CLEAR = 2.0
"""If the first pair's ratio is this large, and its base as fast as measured before, a second pair would change nothing.
The proof is the A/B at the end."""


class BaseFailed(Exception):
    """The training without the candidate failed, so the candidate cannot be judged."""

    def __init__(self, result: Result) -> None:
        self.result = result
        super().__init__(result.cause)


def make_attempt(context: Context, candidate: Candidate, at: str) -> Attempt:
    """Make the attempt, with all its runs in the folder `at`.

    Raises:
        Spent: the budget ended it; finished runs will be found again.
        BaseFailed: the stack under the candidate no longer runs.
    """
    if candidate.refused is not None:
        patch = candidate.patches[0] if candidate.patches else make_patch(candidate.rung)
        return _Screen(context, candidate, Prediction(patch=patch), at).end("inactive", candidate.refused)
    if candidate.way.changes == "loader":
        prediction = choose_worker_count(context, candidate, at)
    else:
        prediction = add_workers(context, tune_number(context, candidate, predict(context, candidate, at), at))
    screen = _Screen(context, candidate, prediction, at)
    if prediction.ended is not None:
        return screen.end(prediction.ended, prediction.why)
    saved_ms = prediction.saved_ms
    if saved_ms is not None and (pct := context.known.pct(saved_ms)) < WORTH_PCT:
        less = f"predicted to save {saved_ms:.1f} ms ({pct:.1f} %), below {WORTH_PCT:g} %"
        more = f"predicted to make the step {-saved_ms:.1f} ms ({-pct:.1f} %) longer"
        return screen.end("small", more if saved_ms < 0 else less)
    return screen.run()


@dataclass(frozen=True)
class _Screen:
    """Pairs of runs with and without a candidate, and the decision that follows."""

    context: Context
    candidate: Candidate
    prediction: Prediction
    at: str
    runs: dict[str, list[Result]] = field(default_factory=lambda: {"base": [], "arm": []})

    @property
    def arm(self) -> Stack:
        return apply_patch(self.context.known.stack, self.prediction.patch)

    @property
    def start_s(self) -> float:
        """Seconds that the next run of the arm takes besides its steps."""
        started = [result.next_start_s for result in self.runs["arm"] if result.step_ms]
        return min([self.prediction.start_s or self.context.start_s, *started])

    def run(self) -> Attempt:
        """Run the pairs until the result is clear."""
        runs, now_ms = self.runs, self.context.known.costs.now_ms
        after_ms = now_ms - (self.prediction.saved_ms or 0.0)
        took = self._choose_length(after_ms)
        if self.candidate.whole and (unscreened := self._judge_first_run(took, after_ms)) is not None:
            return unscreened
        for place, (seed, side) in enumerate(TURNS, 1):
            result = self._run_one(place, seed, side, took, after_ms)
            runs[side].append(result)
            if side == "base":
                if not result.is_measured:
                    raise BaseFailed(result)
            elif (ruled_out := self._rule_out(result)) is not None:
                return self.end(*ruled_out)
            elif len(runs["arm"]) == 1:
                after_ms = result.step_ms or after_ms
                base = runs["base"][0]
                gain = _read_rate(result) / _read_rate(base)
                if (ended := self._judge_first_pair(base, result, gain)) is not None:
                    return ended
                if gain >= CLEAR and (base.step_ms or 0.0) <= APART * now_ms:
                    break
                if self.candidate.whole and gain >= APART and self._has_time_for_proof_only(took):
                    break
            if place == USUAL and _find_contradiction(self._list_rates()) is None:
                break
        return self._judge()

    def _choose_length(self, after_ms: float) -> Length:
        now, then = self.context.known.costs, self.prediction.then or self.context.known.costs
        if self.candidate.whole:
            return self.context.choose_ladder_length(self.arm)
        return self.context.choose_length(after_ms, now.now_ms, self.arm, then.workers, fill_read=then.fill_read)

    def _run_one(self, place: int, seed: int, side: str, took: Length, after_ms: float) -> Result:
        """Run base or arm once.

        Args:
            place: number of this run in the screen, from 1.
            after_ms: the arm's expected step time.
        """
        context, known, is_arm = self.context, self.context.known, side == "arm"
        expected = (after_ms, self.start_s) if is_arm else (known.costs.now_ms, context.top_start_s)
        return context.runner.run(
            f"{self.at}/screen-{place}-{side}",
            self.arm if is_arm else known.stack,
            Ask(seed=seed, steps=took.steps, warmup=took.warmup, ledger=True),
            what=f"{self.candidate.key}: screening, run {place} of {USUAL if place <= USUAL else len(TURNS)}",
            need_s=took.seconds(*expected),
            ladder=self.candidate.ladder if is_arm else None,
        )

    def _judge_first_run(self, took: Length, after_ms: float) -> Attempt | None:
        """In a hurry, keep a ladder without a screen if its first run was clearly faster than the measured start and
        there is time for the proof, which compares the same things. Returns None if the ladder must be screened."""
        start = self.context.hurried_start
        if start is None:
            return None
        place = 2  # of the arm's first run in a screen
        result = self._run_one(place, *TURNS[place - 1], took, after_ms)
        gain = _read_rate(result) / _read_rate(start)
        if not result.is_measured or gain < APART:
            return None
        self.runs.update(base=[start], arm=[result])
        if (ruled_out := self._rule_out(result)) is not None:
            return self.end(*ruled_out)
        if self.context.estimate_proof_s((self.arm, self._read_costs())) > self.context.runner.left_with_grace_s():
            self.runs.update(base=[], arm=[])
            return None
        promise = max(result.classes.values(), key=PARITY_ORDER.index, default=PARITY_ORDER[0])
        why = f"{100 * (gain - 1):+.0f} % in one run; {UNSCREENED}"
        row = self.end("kept", why, Outcome(parity_class=promise, why=UNSCREENED))
        return dataclasses.replace(self._drop_idle(row), costs=self._read_costs())

    def _has_time_for_proof_only(self, took: Length) -> bool:
        """Whether there is time for the proof, which replaces a second pair, but not for both."""
        costs, left_s = self._read_costs(), self.context.runner.left_with_grace_s()
        proof_s = self.context.estimate_proof_s((self.arm, costs))
        both = ((self.context.known.costs.now_ms, self.context.top_start_s), (costs.now_ms, self.start_s))
        return proof_s <= left_s < proof_s + sum(took.seconds(*each) for each in both)

    def _judge_first_pair(self, base: Result, arm: Result, gain: float) -> Attempt | None:
        """End the screen if the first pair already rejects the candidate; None if it goes on."""
        if self.prediction.saved_ms is None and not self.candidate.whole and gain * APART < 1:
            return self.end("not_faster", f"not faster: {100 * (gain - 1):+.0f} % in one pair")
        same = self.context.runner.compare_ledgers(self.context.known.stack, self.arm, [(base, arm)])
        return self.end("parity", same.why, same) if same.passed is False else None

    def _list_rates(self) -> list[tuple[float, float]]:
        """Return the rates of base and arm of each pair."""
        return [(_read_rate(base), _read_rate(arm)) for base, arm in zip(*self.runs.values(), strict=False)]

    def _leave_out_disturbed(self) -> str:
        """Leave out the pair of three that is farthest from the others; returns a note if there was one."""
        pairs = self._list_rates()
        if len(pairs) <= 2:
            return ""
        ratios = [arm / base for base, arm in pairs]
        middle = sorted(ratios)[1]
        odd = max(range(len(pairs)), key=lambda pair: abs(math.log(ratios[pair] / middle)))
        if _find_contradiction(pairs[:odd] + pairs[odd + 1 :]) is not None:
            return ""
        for results in self.runs.values():
            del results[odd]
        return f"without one disturbed pair ({100 * (ratios[odd] - 1):+.0f} %)"

    def _rule_out(self, result: Result) -> tuple[End, str] | None:
        """Return why this run of the arm rules out the candidate, or None."""
        rungs, base = self.prediction.patch["rungs"], self.runs["base"][0]
        if not result.is_measured:
            return "crashed", result.fault
        reasons = [result.inactive[rung] for rung in rungs if rung in result.inactive]
        if reasons and (not self.candidate.whole or len(reasons) == len(rungs)):
            return "inactive", reasons[0]
        if result.global_batch != base.global_batch:
            return "parity", f"an optimizer step has {result.global_batch} samples, not {base.global_batch}"
        changing = [rung for rung in rungs if result.classes.get(rung) == CHANGES_TRAINING]
        if changing and CHANGES_TRAINING not in self.context.known.start.allow:
            return "class", f"{changing[0]} changes the training, which needs --allow changes-training"
        return None

    def _drop_idle(self, row: Attempt) -> Attempt:
        """Leave out the rungs that had no effect."""
        rungs, idle = self._split_idle()
        name = "+".join(rungs) if self.candidate.whole else row.rung
        return dataclasses.replace(row, patch={"rungs": rungs}, rung=name, idle=idle)

    def _split_idle(self) -> tuple[Stack, dict[str, str]]:
        """Return the rungs of the patch, and the rungs that had no effect, with the reason. A ladder's own idle rungs
        are left out of the patch; rungs of the stack that this rung makes ineffective are switched off by it."""
        rungs: Stack = self.prediction.patch["rungs"]
        inactive = self.runs["arm"][-1].inactive
        if self.candidate.whole:
            idle = {rung: why for rung, why in inactive.items() if rung in rungs}
            return {rung: settings for rung, settings in rungs.items() if rung not in idle}, idle
        below, before = self.context.known.stack, self.runs["base"][-1].inactive
        idle = {rung: why for rung, why in inactive.items() if rung in below.keys() - rungs.keys() - before.keys()}
        return {**rungs, **{rung: {"enabled": False} for rung in idle}}, idle

    def _judge(self) -> Attempt:
        context, note = self.context, self._leave_out_disturbed()
        both, pairs = list(zip(self.runs["base"], self.runs["arm"], strict=True)), self._list_rates()
        effect = statistics.screen(pairs, context.pool)
        if (odd := _find_contradiction(pairs)) is not None:
            return self.end("odd", odd)
        clear = min(arm / base for base, arm in pairs) >= APART
        if not clear and not statistics.looks_faster(effect):
            why = "not faster"
            if effect is not None:
                why += f": {100 * (effect.ratio - 1):+.1f} % in two pairs, where runs differ by {100 * effect.sd:.1f} %"
            return self.end("not_faster", "; ".join(filter(None, [why, note])))
        outcome = self._check_parity(both)
        gain = ", ".join(filter(None, [_describe_gain(pairs, effect), note]))
        ended, why = _judge_parity(outcome, gain)
        row = self.end(ended, why, outcome)
        return dataclasses.replace(self._drop_idle(row), costs=self._read_costs()) if ended == "kept" else row

    def _check_parity(self, both: Sequence[tuple[Result, Result]]) -> Outcome:
        """Compare ledgers and gradients. If the budget has time for the confirmation but not for both, leave the
        gradients to the confirmation, which compares them anyway."""
        context, runner = self.context, self.context.runner
        stack = context.known.stack
        arm = apply_patch(stack, {"rungs": self._split_idle()[0]})
        need_s = sum(estimate_gradient_s(result.step_ms or 0.0, self.start_s) for result in both[0])
        proof_s = context.estimate_proof_s((arm, self._read_costs()))
        if not proof_s <= runner.left_with_grace_s() < proof_s + need_s:
            what = f"{self.candidate.key}: checking parity"
            try:
                cold_s = estimate_first_start_s(arm)
                return runner.check_parity(self.at, stack, arm, both, what=what, need_s=need_s + cold_s)
            except Spent:  # time is kept for the proof of the stack below
                if proof_s > runner.left_with_grace_s():
                    raise
        outcome = runner.compare_ledgers(stack, arm, both)
        leaves = outcome.gates and outcome.passed is not False and not outcome.undecided
        return dataclasses.replace(outcome, why=LEFT_TO_PROOF) if leaves else outcome

    def _read_costs(self) -> Costs:
        """Return the costs of the stack with the candidate."""
        arms, now_ms, then = self.runs["arm"], _average_step_ms(self.runs["arm"]), self.prediction.then
        rests = [result.rest_ms for result in arms if result.rest_ms is not None]
        # A trial without loading has shown whether launches are the limit; otherwise take what the runs show.
        costs = (then or Costs(now_ms=now_ms, launch_bound=arms[-1].launch_bound)).but(
            now_ms=now_ms,
            outside_ms=fmean([result.outside_ms for result in arms]),
            gap_ms=fmean([result.gap_ms for result in arms]),
            workers=arms[0].workers,
            copies_ms=arms[0].copies_ms,
            start_s=self.start_s,
            compile_s=max(result.compile_s for result in arms),
        )
        return drop_absurd(costs.but(replayed_ms=fmean(rests)) if costs.beside and rests else costs)

    def end(self, ended: End, why: str, outcome: Outcome | None = None) -> Attempt:
        """Return the attempt's row of ``climb.json``. Later calls decide by its ``try``, ``ended``, ``at`` and
        ``rates``."""
        candidate, prediction = self.candidate, self.prediction
        base, arm = ([result for result in self.runs[side] if result.is_measured] for side in ("base", "arm"))
        both = min(len(base), len(arm))
        before = _average_step_ms(base) if both else None
        after = _average_step_ms(arm) if both else None
        measured = before - after if before and after else None
        rates = Rates(base=tuple(map(_read_rate, base[:2])), arm=tuple(map(_read_rate, arm)))
        pairs, pool = list(zip(rates.base, rates.arm, strict=False)), self.context.pool
        untested = "not tested: it was rejected for other reasons"
        return Attempt(
            rung=candidate.rung,
            family=candidate.family,
            patch=prediction.patch,
            key=candidate.key,
            step_ms_before=before,
            step_ms_after=after,
            predicted_saved_ms=prediction.saved_ms,
            measured_saved_ms=measured,
            ci95_saved_ms=_compute_ci95_ms(pairs, before, pool) if both > 1 else None,
            prediction_error_pct=compute_error_pct(prediction.saved_ms, measured),
            kept=ended == "kept",
            ended=ended,
            why=why,
            parity=outcome or Outcome(parity_class=prediction.parity_class, why=untested),
            tuned=prediction.tuned,
            runs=both,
            rates=rates,
            at=self.context.known.height,
        )


def _find_contradiction(pairs: Sequence[tuple[float, float]]) -> str | None:
    """Return why a screen is inconclusive, or None. If one run is far off the others, the machine is the cause."""
    ratios = sorted(arm / base for base, arm in pairs)
    if ratios[-1] <= APART * ratios[0] or ratios[0] >= APART or ratios[-1] <= 1 / APART:
        return None
    gains = ", ".join(f"{100 * (ratio - 1):+.0f} %" for ratio in ratios)
    return f"inconclusive: its {len(pairs)} pairs differ ({gains}), so something else disturbed this machine"


def _describe_gain(pairs: Sequence[tuple[float, float]], effect: Effect | None) -> str:
    """Describe how much faster the arm was; one pair alone has no spread, and so no effect."""
    if effect is not None:
        return f"{100 * (effect.ratio - 1):+.1f} %"
    (base, arm), *_ = pairs
    return f"{100 * (arm / base - 1):+.0f} % in one pair"


def _judge_parity(outcome: Outcome, gain: str) -> tuple[End, str]:
    """Decide by the gates whether a faster arm stays: it does if none of them failed or was left undecided."""
    if outcome.passed is False:
        return "parity", outcome.why
    if outcome.undecided:
        return "undecided", f"not shown to be the same training: {outcome.why}"
    return "kept", "; ".join(filter(None, [gain, "" if outcome.passed else outcome.why]))


def _compute_ci95_ms(
    pairs: Sequence[tuple[float, float]], before: float | None, pool: Pool
) -> tuple[float, float] | None:
    effect = statistics.screen(pairs, pool)
    if effect is None or before is None:
        return None
    low, high = (before * (1 - 1 / ratio) for ratio in statistics.compute_interval(effect))
    return low, high


def _read_rate(result: Result) -> float:
    return result.samples_per_s or 0.0


def _average_step_ms(runs: Sequence[Result]) -> float:
    return geometric_mean([result.step_ms or 1.0 for result in runs])
