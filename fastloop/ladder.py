"""The ladder: all rungs, the order in which they are planned, and how their wanted settings become one plan."""

# ruff: noqa: RUF009  # the rungs are frozen records, safe as shared defaults

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterable, Iterator
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
    """The interface of a rung: settings, a pure plan, and a verdict from evidence."""

    @property
    def enabled(self) -> bool: ...

    def plan(self, facts: Facts) -> Change:
        """Return the changes that this rung wants, given the facts; raises NotApplicable if it cannot apply."""

    def verify(self, seen: Measurement) -> Verdict:
        """Judge from the measurement's evidence whether the rung took effect."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """All rungs. Field order is planning order: a rung sees the facts as the rungs above leave them. One with a method
    ``goes_first(facts)`` that returns true is planned before all others."""

    coming: ClassVar[tuple[str, ...]] = ("gaps", "shard")
    """Names of rungs planned for later versions, so that nobody is told that they are typing errors."""

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
        """Yield the name and settings of every rung, in order."""
        for field in dataclasses.fields(self):
            yield field.name, getattr(self, field.name)

    @property
    def start_method(self) -> str:
        """How worker processes start; auto = the loader's or the platform's method."""
        return self.workers.start_method

    def enabled(self) -> tuple[str, ...]:
        """Return the names of the enabled rungs."""
        return tuple(name for name, rung in self.rungs() if rung.enabled)

    def without(self, names: Collection[str]) -> Ladder:
        """Return this ladder with these rungs off."""
        off: Any = {name: dataclasses.replace(getattr(self, name), enabled=False) for name in names}
        return dataclasses.replace(self, **off)


def plan(ladder: Ladder, facts: Facts) -> Plan:
    """Merge the wanted settings of all enabled rungs into one plan. Pure.

    Raises:
        ConfigError: two rungs want the same key.
    """
    steps: list[Step] = []
    owners: dict[str, str] = {}
    lost = None if facts.loader is None else facts.loader.place_lost
    enabled = [(name, rung) for name, rung in ladder.rungs() if rung.enabled]
    first = {name for name, rung in enabled if getattr(rung, "goes_first", lambda _facts: False)(facts)}
    for name, rung in sorted(enabled, key=lambda entry: entry[0] not in first):
        step = _plan_one(name, rung, facts)
        for key in _list_keys(step):
            if key in owners:
                raise ConfigError(
                    got=f"rungs `{owners[key]}` and `{name}` both set {key}",
                    why="only one rung may set it",
                    do="turn one of the two off",
                )
            owners[key] = name
        facts = facts.after(step.change.facts)
        if lost is not None and step.status == "planned" and changes_loader(step.change.wants):
            note = f"a run resumed mid-epoch starts that epoch over: {lost}"
            step = dataclasses.replace(step, change=dataclasses.replace(step.change, notes=(*step.change.notes, note)))
            lost = None
        steps.append(step)
    places = [name for name, _ in enabled]
    return Plan(steps=tuple(sorted(steps, key=lambda step: places.index(step.rung))))


def _plan_one(name: str, rung: Rung, facts: Facts) -> Step:
    try:
        change = rung.plan(facts)
    except NotApplicable as reason:
        return Step(rung=name, status="skipped", reason=str(reason))
    if change.waits_for:
        return Step(rung=name, status="waiting", change=change, reason=f"waits for {change.waits_for}")
    return Step(rung=name, status="planned", change=change)


def _list_keys(step: Step) -> list[str]:
    if step.status != "planned":
        return []
    return [*step.change.wants, *(key for action in step.change.actions for key in action.keys)]


def verify(ladder: Ladder, plan: Plan, seen: Measurement) -> tuple[Verdict, ...]:
    """Return one verdict per enabled rung; that of a skipped rung is no effect, for the plan's reason."""
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
    """Return the disabled feed rungs that cannot be enabled for this train loader, each with the reason. Pure."""
    found = {}
    for name, card in collect_cards().items():
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


def collect_cards() -> Cards:
    """Return the cards of all rungs, in the ladder's order: the ``CARD`` in each rung's file."""
    return {name: vars(inspect.getmodule(type(rung)))["CARD"] for name, rung in Ladder().rungs()}


def regroups(rungs: Iterable[str]) -> bool:
    """Whether one of these rungs uses micro-batches other than the loader's batches."""
    known = collect_cards()
    return any(rung in known and known[rung].regroups for rung in rungs)


def read_manual(name: str) -> str:
    """Return the manual page of a rung: its module's docstring; empty under ``python -OO``, which drops it."""
    module = inspect.getmodule(type(getattr(Ladder(), name)))
    return inspect.getdoc(module) or ""


def list_left_out(ladder: Ladder) -> str:
    """Describe the disabled rungs, one line each, from the first line of their manual pages."""
    lines = []
    for name, rung in ladder.rungs():
        if not rung.enabled:
            first = read_manual(name).partition("\n")[0]
            lines.append(f"* `rungs.{name}`: {first} Try it with `--config {name}`.")
    return "\n".join(lines)
