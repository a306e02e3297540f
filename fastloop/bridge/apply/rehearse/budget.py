"""What trying rungs may cost: a share of the run's expected time, plus one-time costs that the run can pay back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastloop.bridge.apply.rehearse.ranks import gather
from fastloop.bridge.apply.rehearse.remembered import Remembered
from fastloop.bridge.watch.session import count_planned_steps
from fastloop.judge import rehearsal as judge
from fastloop.judge.rehearsal import RungOutcome
from fastloop.records.plan import Step, say_count

LEAST_LIMIT_S, LIMIT_S = 10.0, 60.0
COSTLY_LIMIT_S = 600.0
"""Time limit for trying a rung with a one-time cost, such as a compile."""
COMPILE_S = {"cpu": (20.0, 0.4), "other": (5.0, 0.3)}
"""Rough compile time of a model if unknown, by device: a constant, plus a time for each layer. C++ is slow."""
PATIENCE = 3.0
"""A compile that must pay back is given up after this many times its expected time."""
BEYOND = 1.25
"""Factor by which a compile that reached its limit is expected to exceed it: timings of equal runs differ by less."""
ENDLESS = 10**9
"""Optimizer steps assumed for a run without an end."""
LEAST_PLAYS = 3
"""Plays of one batch that any trial takes: the modules unchanged, and twice with a rung."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The conditions under which rungs are rehearsed and kept."""

    by_ladder: frozenset[str] = frozenset()
    """Rungs that a shipped ladder switched on: they must be worth it. Those the user switched on must only work."""
    weighs_costs: bool = True
    """Weigh one-time costs against the length of this run. False in a trial, which represents a longer run."""
    steps_left: int | None = None
    """Optimizer steps left in this run; None if unknown."""
    batches_per_step: float = 1.0

    def of_run(self, trainer: Any) -> Terms:
        """Return these terms, completed for the run that is beginning."""
        planned = count_planned_steps(trainer)
        if planned is None and trainer.max_epochs == trainer.max_steps == -1:
            planned = ENDLESS
        left = None if planned is None else max(0, planned - 1)
        return replace(self, steps_left=left, batches_per_step=max(1, trainer.accumulate_grad_batches))

    def of_manual_steps(self, trainer: Any, steps: int, batches: int) -> Terms:
        """Return these terms for manual optimization, corrected by the `steps` made in `batches`. Lightning adds up the
        steps of all optimizers, and assumes one per batch."""
        left = self.steps_left
        if left is not None and left < ENDLESS - 1:
            most = trainer.max_steps - trainer.global_step if trainer.max_steps >= 0 else math.inf
            left = int(min(left * steps / batches, most))
        return replace(self, batches_per_step=batches / steps, steps_left=left)

    def explain_too_short(self, plays: int) -> str | None:
        """Why this run is too short for a trial that plays a batch `plays` times; None if it is not, or if unknown."""
        if self.steps_left is None or not self.weighs_costs:
            return None
        batches = self.steps_left * self.batches_per_step
        if judge.REHEARSAL_SHARE * batches >= plays:
            return None
        left = "one batch" if round(batches) == 1 else f"{batches:,.0f} batches"
        return f"this run is too short to try it: trying may take 5 % of the remaining run, which is {left}"

    def explain_no_pay_back(self, cost_s: float, step_ms: float) -> str | None:
        """Why the rest of this run, whose steps take `step_ms`, cannot pay back a one-time cost; None if it can."""
        return judge.explain_no_pay_back(cost_s, step_ms, self.steps_left)

    def explain_no_time(self, spent_s: float, needed_s: float, batch_ms: float, kept_s: float = 0.0) -> str | None:
        """Why there is no time for a trial of `needed_s` seconds after those already made, in a run whose batches take
        `batch_ms`; None if there is, or that is unknown. `kept_s`: see `judge.explain_no_time`."""
        if self.steps_left is None or not self.weighs_costs:
            return None
        allowed_s = judge.limit_rehearsal_s(self.steps_left, batch_ms * self.batches_per_step)
        return judge.explain_no_time(spent_s, needed_s, allowed_s, kept_s)


class TrialBudget:
    """The time that one rehearsal has, and which rungs are too expensive to try in it.

    Args:
        root: the LightningModule.
        modules: the submodules that rungs change.
        memory: results of earlier rehearsals.
        settings: returns a rung's settings by its name.
        first_ms: the first batch's time, warm-up included: an upper bound for later batches.
    """

    def __init__(
        self,
        terms: Terms,
        root: torch.nn.Module,
        modules: Sequence[torch.nn.Module],
        memory: Remembered,
        settings: Callable[[str], Any],
        first_ms: float,
    ) -> None:
        self.terms, self.memory = terms, memory
        self._root, self._modules, self._first_ms = root, modules, first_ms
        self._settings_of = settings
        self.base_ms = 0.0
        """Time of the unchanged modules for one batch."""
        self.changed_ms = 0.0
        """The same with the rungs kept so far; 0 until one has been tried."""
        self.play_s = 0.0
        """Time for one play of the unchanged modules, including saving and restoring state."""
        self.launch_share = 0.0
        """The part of the unchanged modules' time in which the host launched work; then it waited for the device."""
        self.kept_s = 0.0
        """Seconds of the rehearsal's share that are reserved for recording a step."""
        self._began_s = time.perf_counter()

    @property
    def step_ms(self) -> float:
        """Time of the unchanged modules for one optimizer step."""
        return self.base_ms * self.terms.batches_per_step

    @property
    def changed_step_ms(self) -> float:
        """Time for one optimizer step with the rungs kept so far, or without them if that is faster: a compile can only
        shorten that."""
        return min(self.changed_ms or self.base_ms, self.base_ms) * self.terms.batches_per_step

    def cap_steps_by_max_time(self, trainer: Any) -> Terms:
        """Reduce the number of steps left if ``max_time`` will end the run early; an unknown number stays unknown. All
        ranks use the same number. Returns the new terms."""
        timers = (each.time_remaining() for each in trainer.callbacks if hasattr(each, "time_remaining"))
        fewest, step_ms = self.terms.steps_left, self.step_ms
        if fewest is not None and step_ms:
            fewest = min([fewest, *(int(1e3 * left_s / step_ms) for left_s in timers if left_s is not None)])
        every = [each for each in gather(trainer, fewest) if each is not None]
        self.terms = replace(self.terms, steps_left=min(every, default=None))
        return self.terms

    def add_one_time(self, step: Step, seconds: float) -> None:
        """Exclude the one-time cost of a rung's first call from the rehearsal's share; remember that of a compile."""
        self._began_s += seconds
        if is_costly(step):
            self.memory.keep_first_call_s(step.rung, self._read_settings(step), seconds)

    def reserve_recording_time(self, estimate_s: Callable[[float], float]) -> None:
        """Reserve time for recording a step if the host limits the unchanged modules' speed: replays then gain more
        than the rungs that are tried before them.

        Args:
            estimate_s: returns how long recording takes, given a batch's milliseconds.
        """
        if self.launch_share >= judge.LAUNCH_BOUND:
            kept_s = estimate_s(self.base_ms)
            has_time = self.terms.explain_no_time(self._spent_s, kept_s, self.base_ms) is None
            self.kept_s = kept_s if has_time else 0.0

    def may_play(self, ms: float, share: float) -> bool:
        """Whether one more play of `ms` milliseconds fits into a share of the rehearsal's time."""
        if not self.terms.weighs_costs:
            return True
        allowed_s = judge.limit_rehearsal_s(self.terms.steps_left, (self.base_ms or ms) * self.terms.batches_per_step)
        return self._spent_s + ms / 1e3 <= share * (allowed_s - self.kept_s)

    def refuse_all(self, steps: Sequence[Step]) -> list[RungOutcome]:
        """Outcomes that refuse all rungs if this run is too short to play anything; else empty."""
        if (too_short := self.terms.explain_too_short(LEAST_PLAYS)) is None:
            return []
        faults = [self._explain_too_short(step, too_short) for step in steps]
        if None in faults:
            return []
        return [
            RungOutcome(rung=step.rung, fault=why, is_lasting=False) for step, why in zip(steps, faults, strict=True)
        ]

    def _explain_too_short(self, step: Step, why: str) -> str | None:
        """Why the run is too short for a rung; None if the user enabled it, or its one-time cost may pay back."""
        if self._must_pay_back(step):
            step, step_ms = find_cheapest(step), self._first_ms * self.terms.batches_per_step
            return self.terms.explain_no_pay_back(self._expect_first_call_s(step), step_ms)
        return why if step.rung in self.terms.by_ladder else None

    def refuse(self, step: Step, captured: int = 0) -> str | None:
        """Why a rung is not even tried; None if it may be tried.

        Args:
            captured: graphs that the user's own code captured in the first step.
        """
        known = self.memory.find_failure(step.rung, self._read_settings(step))
        if known is not None:
            return f"it already failed on {known.date}: {known.why}; to try it again, delete {self.memory.path}"
        if is_costly(step) and captured:
            return f"your own code already compiles parts of the step: {say_count(captured, 'graph')} in the first one"
        if not self.terms.weighs_costs or step.change.rehearse != "modules":
            return None
        if self._must_pay_back(step):
            cost_s = self._expect_first_call_s(step)
            return self.terms.explain_no_pay_back(cost_s, self.changed_step_ms)
        if not self.shares_time(step):
            return None
        if captured:
            again_s = max(0.0, self._first_ms - self.base_ms) / 1e3
            if (no_pay_back := self.terms.explain_no_pay_back(again_s, self.step_ms)) is not None:
                return f"your own compiled code would recompile: {no_pay_back}"
        # Kernels are loaded once, with or without a trial: if that pays back, it does not count as part of the trial.
        loads_s = step.change.first_call_s
        if self.terms.explain_no_pay_back(loads_s, self._find_shortened_ms(step)) is None:
            loads_s = 0.0
        return self.terms.explain_no_time(self._spent_s, 2 * self.play_s + loads_s, self.base_ms, self.kept_s)

    def _find_shortened_ms(self, step: Step) -> float:
        """Time per optimizer step of what a rung may shorten."""
        if not step.change.only_device:
            return self.step_ms
        waited_ms = (1 - self.launch_share) * self.step_ms
        return min(self.step_ms, waited_ms / judge.LIKELY_SAVING)

    def shares_time(self, step: Step) -> bool:
        """Whether trying a rung may take only a share of the run's time: a ladder switched it on, and it has no
        one-time cost to pay back."""
        of_ladder = self.terms.weighs_costs and step.rung in self.terms.by_ladder
        return of_ladder and step.change.rehearse == "modules" and not is_costly(step)

    def may_repeat_slow_first_call(self, step: Step, first_ms: float) -> bool:
        """Whether to play a rung again because its slow first play may have loaded kernels (a rung states only the
        usual time for that). At worst the second play takes as long; that must be less than a third of the remaining
        steps' time."""
        risk_s = first_ms / 1e3
        loads = step.change.first_call_s > 0
        return loads and self.terms.explain_no_pay_back(risk_s, self.step_ms) is None

    def keep_failure(self, step: Step, why: str) -> None:
        """Note that a rung failed, for later runs."""
        self.memory.keep_failure(step.rung, self._read_settings(step), why)

    def limit_s(self, step: Step) -> float:
        """Time limit for trying a rung. A compile that must pay back may take no longer than the run can still save,
        and no more than a few times what was expected: if it does not end, its time is lost."""
        left = self.terms.steps_left if self.terms.weighs_costs and self._must_pay_back(step) else None
        if not is_costly(step) or left is None:
            return COSTLY_LIMIT_S if is_costly(step) else LIMIT_S
        saves_s = judge.LIKELY_SAVING * self.changed_step_ms * left / 1e3
        # The known time may be from a run that found compiled code cached on disk, which this run may not find.
        expected_s = max(self._expect_first_call_s(step), self._guess_first_call_s(step))
        return min(COSTLY_LIMIT_S, max(LEAST_LIMIT_S, min(saves_s, PATIENCE * expected_s)))

    def note_limit(self, step: Step, limit_s: float) -> None:
        """Note that a first call took longer than its limit: later runs expect more than that, so that an equal run,
        whose limit may be the same, does not try again."""
        if is_costly(step):
            self.memory.keep_first_call_s(step.rung, self._read_settings(step), BEYOND * limit_s)

    @property
    def _spent_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _read_settings(self, step: Step) -> Any:
        settings, modules = self._settings_of(step.rung), step.change.first_call_of
        if step.change.rehearse == "optimizers":
            return settings, self.memory.optimizers
        return (settings, modules) if modules else settings

    def _must_pay_back(self, step: Step) -> bool:
        wanted = step.change.pay_back
        return wanted == "required" or (wanted == "auto" and step.rung in self.terms.by_ladder)

    def _expect_first_call_s(self, step: Step) -> float:
        known = self.memory.find_first_call_s(step.rung, self._read_settings(step))
        return self._guess_first_call_s(step) if known is None else known

    def _guess_first_call_s(self, step: Step) -> float:
        modules = [self._root.get_submodule(name) for name in step.change.first_call_of] or self._modules
        layers = sum(not list(inner.children()) for module in modules for inner in module.modules())
        device = next((each.device.type for each in self._root.parameters()), "")
        base_s, per_layer_s = COMPILE_S["cpu" if device == "cpu" else "other"]
        return base_s + per_layer_s * layers


def is_costly(step: Step) -> bool:
    """Whether the rung's first call has a one-time cost."""
    return step.change.pay_back is not None


def is_quick(step: Step) -> bool:
    """Whether the rung changes modules, and costs nothing to switch."""
    return step.change.rehearse == "modules" and not is_costly(step)


def find_cheapest(step: Step) -> Step:
    """The rung's variant with a smaller one-time cost, if it has one; else the rung itself."""
    return step if step.change.cheaper is None else replace(step, change=step.change.cheaper)
