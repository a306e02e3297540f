"""The trainings of a climb in fresh supervised processes, within a budget; finished ones are found again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from fastloop.errors import ConfigError
from fastloop.experiments.ab import parity_gates, passports, results
from fastloop.experiments.ab.arms import Arm, Ask, Progress
from fastloop.experiments.ab.experiment import Experiment, Settings, Unplanned
from fastloop.experiments.ab.sides import list_sides
from fastloop.experiments.climb.attempt import BaseFailed
from fastloop.experiments.climb.budget import GRACE_S, ClimbBudget, Length, Spent
from fastloop.experiments.climb.candidates import list_overrides
from fastloop.experiments.climb.interface import Needs, Result, read_result
from fastloop.experiments.climb.loop import CONFIRM_RUNS
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import forget, read_finished
from fastloop.experiments.tune.search import KnownTimes, Search, Tuned
from fastloop.judge import parity
from fastloop.records.card import Stack
from fastloop.records.climb import Confirmation
from fastloop.records.experiment import Gate, Outcome, Sample
from fastloop.records.plan import Parity
from fastloop.records.trial import Trial

MOST_NAMED = 3
"""A stack of more rungs is named after their number."""


class ProcessRunner:
    """A Runner that trains in fresh processes.

    Args:
        start: the training that the climb begins with.
        place: the climb's folder.
        limit_s: the time limit of each training.
        ladders: the shipped ladders by name.
    """

    def __init__(
        self,
        start: Arm,
        place: Path,
        budget: ClimbBudget,
        *,
        limit_s: float,
        progress: Progress,
        ladders: Mapping[str, Stack] | None = None,
    ) -> None:
        self.start, self.place, self.budget, self._limit_s, self._say = start, place, budget, limit_s, progress
        self._ladders = ladders or {}
        self._device: str | None = None
        self._is_warm = False
        """Whether a training of this call has left the data in the page cache."""

    def run(
        self,
        at: str,
        stack: Stack,
        ask: Ask,
        *,
        what: str,
        need_s: float,
        slowest_ms: float = math.inf,
        ladder: str | None = None,
    ) -> Result:
        """Run one training of a stack, or load it if it finished earlier."""
        known = read_finished(self.place / at, ask.variation)
        if known is not None:
            self._check_device(known)
            return read_result(known)
        arm = self._make_arm(what, stack, ladder)
        try:
            arm.config()
        except ConfigError as error:  # caused by these rungs: the climb checked the configuration without them
            return Result(skipped=dict.fromkeys(stack, f"{error.got}: {error.why}"))
        limits = dataclasses.replace(self._begin(what, need_s), slowest_step_s=slowest_ms / 1e3)
        self._is_warm = self._is_warm or ask.variation == "as_it_is"
        trial = arm.run(what, self.place / at, ask, limits=limits, progress=self._report_progress)
        if not trial.ok and limits.total_s < self._limit_s and trial.seconds >= limits.total_s:
            forget(trial.run_dir)  # the budget ended it: not a result of the training
            raise Spent(what)
        self._check_device(trial)
        return read_result(trial)

    def compare_ledgers(self, base: Stack, arm: Stack, pairs: Sequence[tuple[Result, Result]]) -> Outcome:
        """Check that both stacks saw the same samples; not tested if a training claims no parity."""
        trials = [(left.trial, right.trial) for left, right in pairs if left.trial and right.trial]
        promise = parity_gates.find_class([trial for pair in trials for trial in pair])
        gates = () if promise == "changes-training" else (parity_gates.judge_ledgers(trials, promise),)
        outcome = parity.sum_up_gates(promise, gates)
        if outcome.passed is False:
            self._note_passport(outcome, base, arm, pairs)
        return outcome

    def check_parity(
        self, at: str, base: Stack, arm: Stack, pairs: Sequence[tuple[Result, Result]], *, what: str, need_s: float
    ) -> Outcome:
        """Compare ledger and gradient of a stack with those of the stack below, whose gradient is taken once."""
        outcome = self.compare_ledgers(base, arm, pairs)
        if outcome.passed is False or not outcome.gates:
            return outcome
        gate = self._compare_gradients(at, base, arm, outcome.parity_class, what, need_s)
        outcome = parity.sum_up_gates(outcome.parity_class, (*outcome.gates, gate))
        self._note_passport(outcome, base, arm, pairs)
        return outcome

    def _compare_gradients(self, at: str, base: Stack, arm: Stack, promise: Parity, what: str, need_s: float) -> Gate:
        limits = self._begin(what, need_s)
        gate = parity_gates.judge_gradients(
            self._make_arm(_name_stack(base), base),
            self._make_arm(_name_stack(arm), arm),
            self._find_gradient(base),
            self.place / at / "gradient",
            promise,
            limits=limits,
            progress=self._report_progress,
        )
        if gate.passed is None and self.budget.is_over():  # the budget ended it: no result
            raise Spent(what)
        return gate

    def _note_passport(self, outcome: Outcome, base: Stack, arm: Stack, pairs: Sequence[tuple[Result, Result]]) -> None:
        """Write the outcome into a rung's passport if the two stacks differ in exactly that rung."""
        if len(new := set(arm) - set(base)) == 1:
            trials = [ran.trial for _, ran in pairs if ran.trial]
            sample = Sample(name="arm", samples_per_s=tuple(trial.samples_per_s or 0.0 for trial in trials))
            hardware = results.read_hardware(trials)
            passports.keep(new.pop(), outcome, hardware, sample, name=self.start.name, run_dir=self.place)

    def _find_gradient(self, stack: Stack) -> Path:
        """Return the folder of a stack's gradient, which serves all comparisons with it."""
        return self.place / "gradients" / _name_stack(stack)

    def tune(
        self, at: str, stack: Stack, key: str, length: Length, given: KnownTimes, *, what: str, need_s: float
    ) -> Tuned:
        """Find the fastest number of a rung."""
        limits = Limits(total_s=min(self._limit_s, self.budget.left_s() + GRACE_S))

        def begin(label: str) -> None:
            self.budget.begin(f"{what}, {label}", need_s)

        return Search(
            arm=self._make_arm(what, stack),
            what=key,
            place=self.place / at,
            steps=length.steps,
            warmup=length.warmup,
            limits=limits,
            progress=self._report_progress,
            resume=True,
            given=given,
            begins=begin,
        ).run()

    def confirm(self, at: str, stack: Stack, length: Length, *, need_s: float) -> Confirmation:
        """Run a fresh A/B of the start against a stack, with all gates."""
        sides = list_sides([self._make_arm("naive", {}), self._make_arm("top", stack)], aa=False)
        for side in sides:
            side.folder = self.place / at / side.folder
        limits = self._begin("confirming the best stack", need_s, last=True)
        settings = Settings(
            runs=CONFIRM_RUNS,
            steps=length.steps,
            first_steps=length.first_steps,
            warmup=length.warmup,
            limits=limits,
            seed=self.start.config().run.seed,
            is_warm=self._is_warm,
            base_gradient=self._find_gradient({}),
        )
        experiment = Experiment(sides, self.place / at, settings, self._report_progress)
        name = self.start.name
        try:
            experiment.run()
        except Unplanned as unplanned:
            raise BaseFailed(read_result(unplanned.trial)) from None
        except (Spent, KeyboardInterrupt, SystemExit):
            results.write(experiment, name, partial=True)
            raise
        if (failed := experiment.base.failed) is not None:
            raise BaseFailed(read_result(failed))
        written = results.write(experiment, name, partial=False)
        base, top = written.arms[:2]
        return Confirmation(
            **vars(written.comparisons[0]),
            run_dir=written.run_dir,
            failures=tuple(each.cause or "" for each in written.failures),
            inactive={rung: top.inactive_why.get(rung, "") for rung in top.inactive_rungs},
            naive_samples_per_s=median(base.samples_per_s) if base.samples_per_s else None,
            top_samples_per_s=median(top.samples_per_s) if top.samples_per_s else None,
        )

    def estimate_confirmation_s(self, at: str, needs: Needs) -> float:
        """Return the seconds that this confirmation still needs; `experiments/ab/experiment.py` defines its folders."""
        place, runs = self.place / at, [f"run-{number}" for number in range(CONFIRM_RUNS)]
        parts = {
            **({} if self._is_warm else {place / "base/warm-up": needs.first_s}),
            **({place / "1-top/plan": needs.start_s} if self.start.plans_alone else {}),
            self._find_gradient({}): needs.gradients_s,
            place / "1-top/gradients": needs.gradients_s,
            **{place / "base" / run: needs.base_s for run in runs},
            **{place / "1-top" / run: needs.arm_s for run in runs},
        }
        return sum(need_s for folder, need_s in parts.items() if read_finished(folder) is None)

    def reserve(self, *seconds: float) -> None:
        """Keep time for the last step: the largest of these that still fits, or none."""
        self.budget.reserve(*seconds)

    def left_with_grace_s(self) -> float:
        """Return the seconds that the last step could take: those left, and the grace period."""
        return self.budget.left_s() + GRACE_S

    def _make_arm(self, name: str, stack: Stack, ladder: str | None = None) -> Arm:
        if ladder is None:
            return self.start.change(name, *list_overrides(stack))
        # Rungs of the ladder that are not in the stack stay as they are at the start.
        rungs, off = self.start.config().values["rungs"], {"enabled": False}
        shipped = {rung: settings for rung, settings in self._ladders[ladder].items() if stack.get(rung) == settings}
        own = {rung: rungs[rung] if rungs[rung]["enabled"] else off for rung in self._ladders[ladder]}
        others = {rung: settings for rung, settings in {**own, **stack}.items() if rung not in shipped}
        return self.start.change(name, *list_overrides(others), more=[ladder])

    def _begin(self, what: str, need_s: float, *, last: bool = False) -> Limits:
        limit_s = self.budget.begin(what, need_s, last=last)
        self._say(f"{what}; {self.budget.describe_left()}")
        return Limits(total_s=min(self._limit_s, limit_s))

    def _report_progress(self, line: str) -> None:
        """Report progress; raise Spent once the current step's time limit has passed."""
        if self.budget.is_over():
            raise Spent(line.partition(":")[0])
        self._say(f"{line}; {self.budget.describe_left()}")

    def _check_device(self, trial: Trial) -> None:
        """Raise ConfigError if a trial ran on another device: rates of two machines cannot be compared."""
        found = trial.measurement
        if trial.ok and found is not None:
            device = found.device_name or found.device
            self._device = self._device or device
            if device != self._device:
                raise ConfigError(
                    got=f"{device}",
                    why=f"this climb began on {self._device}",
                    do="resume it there, or start a new one here",
                )


def _name_stack(stack: Stack) -> str:
    """Return a folder name for a stack: its rungs, or how many they are, and a digest of their settings."""
    if not stack:
        return "naive"
    digest = hashlib.sha256(json.dumps(stack, sort_keys=True).encode()).hexdigest()[:6]
    return f"{'+'.join(stack) if len(stack) <= MOST_NAMED else f'{len(stack)}-rungs'}-{digest}"
