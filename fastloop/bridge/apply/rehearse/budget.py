"""What trying rungs may cost: a share of the run's expected time, and one-time costs where the run can save them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastloop.bridge.apply.rehearse.remembered import Remembered
from fastloop.bridge.watch.session import count_planned_steps
from fastloop.judge import rehearsal as judge
from fastloop.judge.rehearsal import Outcome
from fastloop.records.plan import Step

LEAST_LIMIT_S, LIMIT_S = 10.0, 60.0
COSTLY_LIMIT_S = 600.0
"""For a rung with a one-time cost, such as a compile."""
BASE_S, PER_LAYER_S = 5.0, 0.3
"""What compiling a model takes, roughly, where that is not known: so much, and so much for each of its layers."""
ENDLESS = 10**9
"""Optimizer steps of a run that goes on until somebody ends it."""
LEAST_PLAYS = 3
"""Of one batch, that trying anything takes: the modules unchanged, and twice with a rung."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How strictly rungs are judged."""

    by_ladder: frozenset[str] = frozenset()
    """Rungs that a shipped ladder switched on: they must be worth it. What the user switched on must only work."""
    weighs_costs: bool = True
    """Weigh one-time costs against the length of this run; a trial stands for a longer one."""
    steps_left: int | None = None
    """Optimizer steps; None where that is not known."""
    batches_per_step: float = 1.0

    def of_run(self, trainer: Any) -> Terms:
        """These terms for the run that now begins."""
        planned = count_planned_steps(trainer)
        if planned is None and trainer.max_epochs == trainer.max_steps == -1:
            planned = ENDLESS
        left = None if planned is None else max(0, planned - 1)
        return replace(self, steps_left=left, batches_per_step=max(1, trainer.accumulate_grad_batches))


class Budget:
    """The time that one rehearsal has, and what is too dear to be tried in it.

    Args:
        root: the LightningModule.
        modules: inside it, that rungs change.
        memory: of earlier rehearsals.
        settings: of a rung, by its name.
        first_ms: what the first batch took, warm-up included: no later one takes longer.
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
        """What the unchanged modules take for one batch."""
        self.play_s = 0.0
        """What playing them took, with all that is put back around it."""
        self._began_s = time.perf_counter()

    @property
    def step_ms(self) -> float:
        """What the unchanged modules take for one optimizer step."""
        return self.base_ms * self.terms.batches_per_step

    def add_one_time(self, step: Step, seconds: float) -> None:
        """A rung's first call took so much longer: weighed by itself, and no part of the share."""
        self._began_s += seconds
        self.memory.keep_first_call_s(step.rung, self._settings(step), seconds)

    def may_play(self, ms: float, share: float) -> bool:
        """Whether one more play of so many milliseconds fits into a share of the rehearsal's time."""
        if not self.terms.weighs_costs:
            return True
        allowed_s = judge.limit_rehearsal_s(self.terms.steps_left, (self.base_ms or ms) * self.terms.batches_per_step)
        return self._spent_s + ms / 1e3 <= share * allowed_s

    def refuse_all(self, steps: Sequence[Step]) -> list[Outcome]:
        """All rungs with their faults, where this run is too short to play anything; else none."""
        if self.terms.steps_left is None or not self.terms.weighs_costs:
            return []
        batches = self.terms.steps_left * self.terms.batches_per_step
        if judge.REHEARSAL_SHARE * batches >= LEAST_PLAYS:
            return []
        faults = [self._explain_too_short(step, batches) for step in steps]
        if None in faults:
            return []
        return [Outcome(rung=step.rung, fault=why, is_lasting=False) for step, why in zip(steps, faults, strict=True)]

    def _explain_too_short(self, step: Step, batches: float) -> str | None:
        """None for what the user asked for, and for a one-time cost that may pay back even so."""
        if self._must_pay_back(step):
            step, step_ms = find_cheapest(step), self._first_ms * self.terms.batches_per_step
            return judge.explain_no_pay_back(self._expect_first_call_s(step), step_ms, self.terms.steps_left)
        if step.rung not in self.terms.by_ladder:
            return None
        return f"this run is too short to try it: trying may take 5 % of the {batches:,.0f} batches that are left"

    def refuse(self, step: Step) -> str | None:
        """Why one rung is not even tried; None where it may be."""
        known = self.memory.find_failure(step.rung, self._settings(step))
        if known is not None:
            return f"it failed here on {known.date}: {known.why}; to try it again, delete {self.memory.path}"
        if not self.terms.weighs_costs or step.change.rehearse != "modules":
            return None
        if self._must_pay_back(step):
            return judge.explain_no_pay_back(self._expect_first_call_s(step), self.step_ms, self.terms.steps_left)
        allowed_s = judge.limit_rehearsal_s(self.terms.steps_left, self.step_ms)
        if step.rung in self.terms.by_ladder and self._spent_s + 2 * self.play_s > allowed_s:
            return f"this run is too short to try it: trying may take 5 % of what is left, {allowed_s:.2g} s"
        return None

    def keep_failure(self, step: Step, why: str) -> None:
        """Note that a rung failed, for later runs."""
        self.memory.keep_failure(step.rung, self._settings(step), why)

    def limit_s(self, step: Step) -> float:
        """Of trying a rung. A compile that has to pay back may take no longer than the rest of the run could save."""
        left = self.terms.steps_left if self.terms.weighs_costs and self._must_pay_back(step) else None
        if not is_costly(step) or left is None:
            return COSTLY_LIMIT_S if is_costly(step) else LIMIT_S
        return min(COSTLY_LIMIT_S, max(LEAST_LIMIT_S, judge.BEST_SAVING * self.step_ms * left / 1e3))

    @property
    def _spent_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _settings(self, step: Step) -> Any:
        settings, modules = self._settings_of(step.rung), step.change.first_call_of
        return (settings, modules) if modules else settings

    def _must_pay_back(self, step: Step) -> bool:
        wanted = step.change.pay_back
        return wanted == "required" or (wanted == "auto" and step.rung in self.terms.by_ladder)

    def _expect_first_call_s(self, step: Step) -> float:
        known = self.memory.find_first_call_s(step.rung, self._settings(step))
        if known is not None:
            return known
        modules = [self._root.get_submodule(name) for name in step.change.first_call_of] or self._modules
        layers = sum(not list(inner.children()) for module in modules for inner in module.modules())
        return BASE_S + PER_LAYER_S * layers


def is_costly(step: Step) -> bool:
    """Whether its first call has a one-time cost."""
    return step.change.pay_back is not None


def find_cheapest(step: Step) -> Step:
    """The same with the smaller one-time cost that it can have."""
    return step if step.change.cheaper is None else replace(step, change=step.change.cheaper)
