"""The laboratory of a climb, for real: fresh supervised processes, within a budget, found again on another day."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastloop import parity
from fastloop.commands import gates, passports, verdict
from fastloop.commands.ab import sides_of
from fastloop.commands.arms import Ask, ConfigArm, Progress
from fastloop.commands.ascent import CONFIRM_RUNS
from fastloop.commands.attempt import BaseFailed
from fastloop.commands.budget import GRACE_S, Budget, Spent
from fastloop.commands.experiment import Experiment, Settings, Unplanned
from fastloop.commands.lab import Needs, Seen, Tuned, seen
from fastloop.commands.lengths import Length
from fastloop.commands.search import Given, search
from fastloop.commands.stack import Stack, overrides
from fastloop.commands.supervise import Limits
from fastloop.commands.trial import Job, Trial, finished, forget
from fastloop.comparison import Gate, Outcome, Sample
from fastloop.errors import ConfigError
from fastloop.records import Parity


class Bench:
    """A Lab that trains.

    Args:
        job: the training that the climb begins with.
        place: the climb's folder.
        limit_s: for each training.
    """

    def __init__(self, job: Job, place: Path, budget: Budget, *, limit_s: float, progress: Progress) -> None:
        self.job, self.place, self.budget, self._limit_s, self._say = job, place, budget, limit_s, progress
        self._device: str | None = None

    def run(self, at: str, stack: Stack, ask: Ask, *, what: str, need_s: float) -> Seen:
        """One training of a stack, or the one of an earlier day."""
        known = finished(self.place / at)
        if known is not None:
            self._same_device(known)
            return seen(known)
        arm = self._arm(what, stack)
        try:
            arm.config()
        except ConfigError as error:  # with these rungs; without them it was checked before the climb began
            return Seen(skipped=dict.fromkeys(stack, f"{error.got}: {error.why}"))
        limits = self._begin(what, need_s)
        trial = arm.run(what, self.place / at, ask, limits=limits, progress=self._progress)
        if not trial.ok and limits.total_s < self._limit_s and trial.seconds >= limits.total_s:
            forget(trial.run_dir)  # the budget ended it, which says nothing of the training
            raise Spent(what)
        self._same_device(trial)
        return seen(trial)

    def ledger(self, base: Stack, arm: Stack, pairs: Sequence[tuple[Seen, Seen]]) -> Outcome:
        """Whether both stacks saw the same samples; a training that claims no parity is not asked."""
        trials = [(left.trial, right.trial) for left, right in pairs if left.trial and right.trial]
        promise = gates.class_of([trial for pair in trials for trial in pair])
        outcome = parity.outcome(promise, () if promise == "changes-training" else (gates.ledger(trials, promise),))
        if outcome.passed is False:
            _note(outcome, base, arm, pairs)
        return outcome

    def gates(self, at: str, base: Stack, arm: Stack, pairs: Sequence[tuple[Seen, Seen]], *, what: str,
              need_s: float) -> Outcome:  # fmt: skip
        """Ledger and gradient of a stack against the one it was put on; the latter's gradient is taken once."""
        outcome = self.ledger(base, arm, pairs)
        if outcome.passed is False or not outcome.gates:
            return outcome
        promise = outcome.parity_class
        outcome = parity.outcome(promise, (*outcome.gates, self._gradient(at, base, arm, promise, what, need_s)))
        _note(outcome, base, arm, pairs)
        return outcome

    def _gradient(self, at: str, base: Stack, arm: Stack, promise: Parity, what: str, need_s: float) -> Gate:
        limits = self._begin(what, need_s)
        return gates.gradient(self._arm(_name(base), base), self._arm(_name(arm), arm),
                              self.place / "gradients" / _name(base), self.place / at / "gradient", promise,
                              limits=limits, progress=self._progress)  # fmt: skip

    def tune(self, at: str, stack: Stack, key: str, length: Length, given: Given, *, what: str,
             need_s: float) -> Tuned:  # fmt: skip
        """The fastest number of a rung."""
        limits = Limits(total_s=min(self._limit_s, self.budget.left_s() + GRACE_S))
        return search(self._arm(what, stack), key, self.place / at, steps=length.steps, warmup=length.warmup,
                      limits=limits, progress=self._progress, resume=True, given=given,
                      begins=lambda label: self.budget.check(f"{what}, {label}", need_s))  # fmt: skip

    def confirm(self, at: str, stack: Stack, length: Length, *, need_s: float) -> Mapping[str, Any]:
        """A fresh A/B of the start against a stack, with all gates."""
        sides = sides_of([self._arm("naive", {}), self._arm("top", stack)], aa=False)
        for side in sides:
            side.folder = self.place / at / side.folder
        limits = self._begin("confirming the top", need_s, last=True)
        settings = Settings(runs=CONFIRM_RUNS, steps=length.steps, warmup=length.warmup, limits=limits,
                            seed=self.job.config().run.seed)  # fmt: skip
        experiment = Experiment(sides, self.place / at, settings, self._progress)
        name = self.job.config().name
        try:
            experiment.run()
        except Unplanned as unplanned:
            raise BaseFailed(seen(unplanned.trial)) from None
        except (Spent, KeyboardInterrupt, SystemExit):
            verdict.write(experiment, name, partial=True)
            raise
        if (failed := experiment.base.failed) is not None:
            raise BaseFailed(seen(failed))
        return verdict.write(experiment, name, partial=False)

    def left_to_confirm(self, at: str, needs: Needs) -> float:
        """Seconds that this confirmation still takes, see `commands/experiment.py` for what it does where."""
        runs = [f"run-{number}" for number in range(CONFIRM_RUNS)]
        parts = {"base/warm-up": needs.base_s, "1-top/plan": needs.start_s, "parity": needs.gradients_s,
                 "1-top/gradients": needs.gradients_s, **{f"base/{run}": needs.base_s for run in runs},
                 **{f"1-top/{run}": needs.arm_s for run in runs}}  # fmt: skip
        return sum(need_s for part, need_s in parts.items() if finished(self.place / at / part) is None)

    def reserve(self, seconds: float) -> None:
        """Keep so much of the budget for the end."""
        self.budget.reserve_s = seconds

    def _arm(self, name: str, stack: Stack) -> ConfigArm:
        return ConfigArm(name=name, job=self.job.but(*overrides(stack)))

    def _begin(self, what: str, need_s: float, *, last: bool = False) -> Limits:
        self.budget.check(what, need_s, last=last)
        self._say(f"{what}; {self.budget.said()}")
        return Limits(total_s=min(self._limit_s, self.budget.left_s() + GRACE_S))

    def _progress(self, line: str) -> None:
        """Goes on, or ends whatever says it: it has taken more than the budget and its grace."""
        if self.budget.over():
            raise Spent(line.partition(":")[0])
        self._say(f"{line}; {self.budget.said()}")

    def _same_device(self, trial: Trial) -> None:
        """Rates of two machines do not compare."""
        found = trial.measurement or {}
        device = found.get("device_name") or found.get("device")
        if trial.ok and device:
            self._device = self._device or str(device)
            if device != self._device:
                raise ConfigError(got=f"{device}", why=f"this climb began on {self._device}",
                                  do="resume it there, or begin another one here")  # fmt: skip


def _note(outcome: Outcome, base: Stack, arm: Stack, pairs: Sequence[tuple[Seen, Seen]]) -> None:
    """In the passport of the one rung in which two stacks differ."""
    if len(new := set(arm) - set(base)) == 1:
        trials = [ran.trial for _, ran in pairs if ran.trial]
        runs = tuple(trial.samples_per_s or 0.0 for trial in trials)
        passports.keep(new.pop(), outcome, verdict.hardware(trials), Sample(name="arm", samples_per_s=runs))


def _name(stack: Stack) -> str:
    """Of a stack, for a folder: its rungs, and what tells it from others of the same rungs."""
    if not stack:
        return "naive"
    told = hashlib.sha256(json.dumps(stack, sort_keys=True).encode()).hexdigest()[:6]
    return f"{'+'.join(stack)}-{told}"
