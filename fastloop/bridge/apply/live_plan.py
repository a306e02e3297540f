"""The plan of one run as it develops: some rungs wait for the train loader, some for a rehearsal, some drop out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastloop.bridge.apply.rehearse.ranks import gather_first
from fastloop.errors import ConfigError, describe
from fastloop.judge.rehearsal import RungOutcome
from fastloop.ladder import Ladder, plan
from fastloop.records.facts import Facts
from fastloop.records.plan import PARITY_ORDER, Parity, Plan, Step


class LivePlan:
    """Which rungs are planned, held and left out.

    Args:
        ladder: the rungs.
        strict: a rung that cannot apply is an error.
        refused: rungs that an earlier fit of this Trainer found not to work, and why; new ones are added.
        cheaper: rungs for which that fit kept the cheaper variant; new ones are added.
    """

    def __init__(self, ladder: Ladder, *, strict: bool, refused: dict[str, str], cheaper: set[str]) -> None:
        self.ladder, self.strict, self.refused, self.cheaper = ladder, strict, refused, cheaper
        self.plan = Plan()
        self.held: frozenset[str] = frozenset()
        """Planned rungs whose actions wait for the rehearsal."""
        self.loader_rungs: frozenset[str] = frozenset()
        """Enabled rungs whose plan waits for the train loader."""
        self.may_want = Plan()
        """What those rungs may want once it is known."""
        self._given_up: frozenset[str] = frozenset()
        """Rungs that were planned for a train loader but cannot apply."""
        self._no_engine: dict[str, str] = {}
        """Rungs whose engine was refused, and why; their second choice is planned."""
        self._spared: set[str] = set()
        """Rungs left out that are not an error under ``strict``: they could apply but are not worth it in this run."""

    def begin(self, planned: Plan, held: Iterable[str]) -> None:
        """Start with the plan made when the model was built."""
        self.plan, self.held = planned, frozenset(held)
        for step in planned.planned:
            if (why := self.refused.get(step.rung)) is not None and step.rung not in self.held:
                self.skip(step, why, is_refusal=False)
            elif step.rung in self.cheaper - self.held:
                self.take_cheaper(step)
        self.may_want = Plan(steps=tuple(step for step in planned.steps if step.status == "waiting"))
        self.loader_rungs = frozenset(step.rung for step in self.may_want.steps)

    def plan_loader(self, facts: Facts) -> Plan:
        """Return the plan for a train loader. A rung counts as planned once it applies to one of the loaders."""
        made = plan(self.ladder.without(self._given_up), facts)
        steps = {step.rung: step for step in made.steps if step.rung in self.loader_rungs}
        for rung, why in self._no_engine.items():
            if rung in steps and steps[rung].status == "skipped":
                reason = steps[rung].reason
                steps[rung] = dataclasses.replace(steps[rung], reason=why if reason is None else f"{why}; {reason}")
        self.plan = Plan(
            steps=tuple(old if old.status == "planned" else steps.get(old.rung, old) for old in self.plan.steps)
        )
        self.check_strict()
        return Plan(steps=tuple(steps.values()))

    def plan_without_engine(self, rung: str | None, why: str, *, is_used: bool) -> bool:
        """From now on, plan a rung's second choice, which needs no engine; returns whether it has one.

        Args:
            is_used: whether another loader has its engine, so that the rung stays planned as it is.
        """
        other = getattr(getattr(self.ladder, rung or "", None), "without_engine", lambda: None)()
        if rung is None or other is None:
            return False
        self.ladder = dataclasses.replace(self.ladder, **{rung: other})
        self._no_engine[rung] = why
        if not is_used and (step := self.plan.step(rung)) is not None:
            self._replace(step, status="waiting")
        return True

    def give_up(self, step: Step, reason: str, *, is_refusal: bool = True, has_acted: bool = False) -> None:
        """Give up a rung planned for one train loader that cannot apply to all of them, or is not worth it."""
        self.loader_rungs -= {step.rung}
        self._given_up |= {step.rung}
        self.skip(step, reason, is_refusal=is_refusal, has_acted=has_acted)

    def weaken(self, key: str, note: str, parity: Parity = "approximate") -> None:
        """If a rung that sets `key`, or has set it for some steps, was planned as closer to a plain run than `parity`,
        give it that class, and this note."""
        for step in self.plan.steps:
            has_set = key in step.change.wants and (step.status == "planned" or step.has_acted)
            if has_set and PARITY_ORDER.index(step.change.parity) < PARITY_ORDER.index(parity):
                change = dataclasses.replace(step.change, parity=parity, notes=(*step.change.notes, note))
                self._replace(step, change=change)

    def take_cheaper(self, step: Step) -> Step:
        """Plan the rung's cheaper variant from now on, in later stages too; returns the new step."""
        self.cheaper.add(step.rung)
        return self._replace(step, change=step.change.cheaper or step.change)

    def skip_all(self, reason: str) -> None:
        """Skip every rung, for one reason."""
        enabled = self.ladder.enabled()
        self.plan = Plan(steps=tuple(Step(rung=name, status="skipped", reason=reason) for name in enabled))
        self.check_strict()

    def skip(self, step: Step, reason: str, *, is_refusal: bool = True, has_acted: bool = False) -> None:
        """Leave a rung out; under ``strict`` that is an error, unless the rung is merely not worth it."""
        self._replace(step, status="skipped", reason=reason, has_acted=has_acted)
        if not is_refusal:
            self._spared.add(step.rung)
        self.check_strict()

    def record(self, outcomes: Sequence[RungOutcome]) -> None:
        """Plan the rungs that were tried and work, also those that had been left out, and leave out the others."""
        held, self.held = self.held, self.held - {outcome.rung for outcome in outcomes}
        for outcome in outcomes:
            step = next(each for each in self.plan.steps if each.rung == outcome.rung)
            step = self.take_cheaper(step) if outcome.is_cheaper and outcome.fault is None else step
            tried = self._replace(
                step, rehearsed=outcome.rehearsed, pays_back_after_steps=outcome.pays_back_after_steps
            )
            if outcome.fault is None:
                self.refused.pop(step.rung, None)
                self._replace(tried, status="planned", reason=None)
            else:
                self.refused[step.rung] = outcome.fault
                self.skip(tried, outcome.fault, is_refusal=outcome.is_lasting, has_acted=step.rung not in held)

    def check_optimizers(self, site: Any, undo: Callable[[str], None]) -> None:
        """Leave out rungs that cannot work with the optimizers of this fit, and `undo` what they have changed."""
        for step in self.plan.planned:
            if step.change.check is None:
                continue
            if (why := gather_first(site.trainer, _explain_refusal(step.change.check, site))) is not None:
                undo(step.rung)
                self.held -= {step.rung}
                self.refused[step.rung] = why
                self.skip(step, why)

    def skip_held(self, reason: str) -> None:
        """Leave out all rungs that still wait for the rehearsal; not an error under ``strict``."""
        self.refused.update(dict.fromkeys(self.held, reason))
        for step in self.held_steps:
            self._replace(step, status="skipped", reason=reason)
        self.held = frozenset()

    def _replace(self, step: Step, **changes: Any) -> Step:
        """Change fields of a step of the plan; returns the new step."""
        new = dataclasses.replace(step, **changes)
        self.plan = Plan(steps=tuple(new if each is step else each for each in self.plan.steps))
        return new

    @property
    def held_steps(self) -> list[Step]:
        return [step for step in self.plan.planned if step.rung in self.held]

    def is_planned(self, step: Step) -> bool:
        """Whether the step is still planned: an earlier action of the rung may have found that it cannot apply."""
        return any(other is step for other in self.plan.planned)

    def list_wants(self, rung: str) -> tuple[str, ...]:
        """The settings that a rung wants; none unless it is planned."""
        return tuple(key for step in self.plan.planned if step.rung == rung for key in step.change.wants)

    def find_owner(self, key: str) -> str | None:
        """The enabled rung that sets a setting, or wanted to."""
        sets = (step.rung for step in self.plan.planned if key in step.change.wants)
        return next(sets, None) or self.may_want.owner(key) or self.plan.owner(key)

    def check_strict(self) -> None:
        """Raise ConfigError under ``strict`` if a rung cannot apply."""
        if self.strict:
            refuse_skipped(Plan(steps=tuple(step for step in self.plan.steps if step.rung not in self._spared)))


def _explain_refusal(check: Callable[[Any], None], site: Any) -> str | None:
    """Why a rung's check refuses these optimizers; None if it does not. The user's optimizers may raise anything."""
    try:
        check(site)
    except Exception as error:
        return describe(error)
    return None


def refuse_skipped(plan: Plan) -> None:
    """Enforce ``strict: true``.

    Raises:
        ConfigError: a rung cannot apply.
    """
    for step in plan.steps:
        if step.status == "skipped":
            raise ConfigError(
                key=f"rungs.{step.rung}",
                got=f"rungs.{step.rung}",
                why=f"with strict: true, a rung that cannot apply is an error: {step.reason or 'reason unknown'}",
                do=f"write rungs.{step.rung}.enabled: false, or strict: false",
            )
