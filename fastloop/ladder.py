"""The ladder: which rungs there are, in which order they are planned, and how their wants become one plan."""

# ruff: noqa: RUF009  # the rungs are frozen records, safe as shared defaults

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fastloop.errors import ConfigError, NotApplicable
from fastloop.records.card import Cards
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Plan, Step, Verdict, changes_loader
from fastloop.rungs.amp import Amp
from fastloop.rungs.attention import Attention
from fastloop.rungs.batch import Batch
from fastloop.rungs.cache import Cache
from fastloop.rungs.compile import Compile
from fastloop.rungs.dali import Dali
from fastloop.rungs.fused import Fused
from fastloop.rungs.host import Host
from fastloop.rungs.layout import Layout
from fastloop.rungs.loss import Loss
from fastloop.rungs.nodes import Nodes
from fastloop.rungs.overlap import Overlap
from fastloop.rungs.pin import Pin
from fastloop.rungs.prefetch import Prefetch
from fastloop.rungs.workers import Workers


class Rung(Protocol):
    """What a rung is: settings, a pure plan, and a verdict from evidence."""

    @property
    def enabled(self) -> bool: ...

    def plan(self, facts: Facts) -> Change:
        """What this rung wants given the facts; raises NotApplicable with the reason where it cannot apply."""

    def verify(self, seen: Measurement) -> Verdict:
        """Whether the rung took, from the measurement's evidence."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """All rungs. Field order is planning order: a rung sees the facts as the rungs above leave them."""

    coming: ClassVar[tuple[str, ...]] = ("gaps", "shard")
    """Names of rungs that later versions will have: not taken for typing errors."""

    dali: Dali = Dali()
    cache: Cache = Cache()
    nodes: Nodes = Nodes()
    workers: Workers = Workers()
    pin: Pin = Pin()
    prefetch: Prefetch = Prefetch()
    batch: Batch = Batch()
    amp: Amp = Amp()
    layout: Layout = Layout()
    attention: Attention = Attention()
    loss: Loss = Loss()
    fused: Fused = Fused()
    compile: Compile = Compile()
    host: Host = Host()
    overlap: Overlap = Overlap()

    def rungs(self) -> Iterator[tuple[str, Rung]]:
        """Name and settings of every rung, in order."""
        for field in dataclasses.fields(self):
            yield field.name, getattr(self, field.name)

    @property
    def start_method(self) -> str:
        """How worker processes are to start; auto = as the loader or the platform has it."""
        return self.workers.start_method

    def enabled(self) -> tuple[str, ...]:
        """Names of the rungs that are switched on."""
        return tuple(name for name, rung in self.rungs() if rung.enabled)


def plan(ladder: Ladder, facts: Facts) -> Plan:
    """All wants of all enabled rungs, merged. Pure.

    Raises:
        ConfigError: two rungs want the same key.
    """
    steps: list[Step] = []
    owners: dict[str, str] = {}
    lost = None if facts.loader is None else facts.loader.place_lost
    for name, rung in ladder.rungs():
        if not rung.enabled:
            continue
        step = _plan_one(name, rung, facts)
        for key in _keys(step):
            if key in owners:
                raise ConfigError(
                    got=f"rungs `{owners[key]}` and `{name}` both set {key}",
                    why="a setting has one owner",
                    do="turn one of the two off",
                )
            owners[key] = name
        facts = facts.after(step.change.facts)
        if lost is not None and step.status == "planned" and changes_loader(step.change.wants):
            note = f"a run resumed in mid-epoch starts that epoch over: {lost}"
            step = dataclasses.replace(step, change=dataclasses.replace(step.change, notes=(*step.change.notes, note)))
            lost = None
        steps.append(step)
    return Plan(steps=tuple(steps))


def _plan_one(name: str, rung: Rung, facts: Facts) -> Step:
    try:
        change = rung.plan(facts)
    except NotApplicable as reason:
        return Step(rung=name, status="skipped", reason=str(reason))
    if change.waits_for:
        return Step(rung=name, status="waiting", change=change, reason=f"waits for {change.waits_for}")
    return Step(rung=name, status="planned", change=change)


def _keys(step: Step) -> list[str]:
    if step.status != "planned":
        return []
    return [*step.change.wants, *(key for action in step.change.actions for key in action.keys)]


def verify(ladder: Ladder, plan: Plan, seen: Measurement) -> tuple[Verdict, ...]:
    """One verdict per enabled rung: a skipped rung did not take, for the reason the plan gives."""
    verdicts = []
    for step in plan.steps:
        if step.status == "planned":
            verdict = getattr(ladder, step.rung).verify(seen)
        else:
            verdict = Verdict(took=False, why=step.reason or "not planned")
        verdicts.append(
            dataclasses.replace(
                verdict,
                rung=step.rung,
                parity_class=step.change.parity,
                rehearsed=step.rehearsed,
                pays_back_after_steps=step.pays_back_after_steps,
            )
        )
    return tuple(verdicts)


def list_refused(ladder: Ladder, facts: Facts) -> dict[str, str]:
    """Feeds that are off and could not be switched on for this train loader, each with the reason. Pure."""
    found = {}
    for name, card in cards().items():
        rung: Any = getattr(ladder, name)
        if card.family != "feed" or rung.enabled:
            continue
        try:
            made = plan(dataclasses.replace(ladder, **{name: dataclasses.replace(rung, enabled=True)}), facts)
        except ConfigError as error:
            found[name] = str(error)
        else:
            step = made.step(name)
            if step is not None and step.status == "skipped":
                found[name] = step.reason or "it cannot apply"
    return found


def cards() -> Cards:
    """The cards of all rungs, in the ladder's order: the ``CARD`` in each one's file."""
    return {name: vars(inspect.getmodule(type(rung)))["CARD"] for name, rung in Ladder().rungs()}


def regroups(rungs: Iterable[str]) -> bool:
    """Whether one of these makes an optimizer step of other micro-batches than the loader's."""
    known = cards()
    return any(rung in known and known[rung].regroups for rung in rungs)


def manual(name: str) -> str:
    """The manual page of a rung: its module's docstring."""
    module = inspect.getmodule(type(getattr(Ladder(), name)))
    return inspect.getdoc(module) or ""


def left_out(ladder: Ladder) -> str:
    """The rungs that are off, one line each from their manual pages' first line."""
    lines = []
    for name, rung in ladder.rungs():
        if not rung.enabled:
            first = manual(name).splitlines()[0]
            lines.append(f"* `rungs.{name}`: {first} Try it with `--config {name}`.")
    return "\n".join(lines)
