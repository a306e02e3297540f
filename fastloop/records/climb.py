"""What a climb writes down: its attempts, what a step costs, and where it came to. ``None`` = not known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fastloop.records.card import Patch
from fastloop.records.experiment import Comparison, Hardware, Outcome
from fastloop.records.store import SCHEMA

End = Literal["kept", "small", "not_faster", "odd", "undecided", "parity", "crashed", "inactive", "class", "needed"]
"""How an attempt ended. small: predicted to save too little; odd: its pairs of runs contradict each other; undecided:
gates that could have judged it did not; parity: another training; inactive: the rung does not apply or had no effect;
class: it changes the training, which was not allowed; needed: without this rung the stack is slower."""
NO_ANSWER: tuple[End, ...] = ("odd", "undecided")
TOP = "_top"
"""After the name of a ceiling in ``ceilings_notes``: a ceiling of the top, not of the start."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one optimizer step of a stack of rungs costs. None = not measured."""

    now_ms: float
    """As it is, in the long run: samples of a step / samples per second."""
    outside_ms: float = 0.0
    """Of it, what is neither loading nor computing: validation, checkpoints, the gap between epochs."""
    gap_ms: float = 0.0
    """Of that, the gap between epochs, in which workers are started anew."""
    replayed_ms: float | None = None
    """Without loading, the rest as it is; where workers load, with them beside: they take CPUs from it."""
    resident_ms: float | None = None
    """Without loading and copies."""
    alone_ms: float | None = None
    """Without loading and the exchange of gradients."""
    loader_ms: float | None = None
    """Loading alone, as fast as it goes."""
    workers: int = 0
    """Processes that load beside the training; 0: its own thread loads."""
    mfu: float | None = None
    """Work of the model in ``replayed_ms`` over what the device could do at most, 0 to 1."""
    launch_bound: bool | None = None
    """The device waits for launches in ``replayed_ms``."""
    copies_ms: float | None = None
    """Copies to the device, as the parts of the step show them."""
    fill_read: bool = False
    """What lies ready in the queues of its workers can be read."""
    loaders_ms: tuple[tuple[int, float], ...] = ()
    """Loading alone by number of workers, as far as that was measured."""

    @property
    def beside(self) -> bool:
        """Loading and training overlap."""
        return self.workers > 0

    @property
    def core_ms(self) -> float:
        """The part of the step that the costs explain."""
        return max(0.0, self.now_ms - self.outside_ms)

    def but(self, **changes: Any) -> Costs:
        """The same with other costs."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Samples per second of a screen's runs, in pairs."""

    base: tuple[float, ...] = ()
    arm: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One rung that was tried. Times in milliseconds of an optimizer step."""

    rung: str = "n/a"
    """Several: joined by ``+``."""
    family: str | None = None
    patch: Patch = field(default_factory=dict)
    """What switches it on: ``{"rungs": {rung: settings}}``."""
    key: str | None = field(default=None, metadata={"json": "try"})
    """What was tried, such as ``workers-persistent``; an older file lacks it."""
    step_ms_before: float | None = None
    step_ms_after: float | None = None
    predicted_saved_ms: float | None = None
    measured_saved_ms: float | None = None
    ci95_saved_ms: tuple[float, float] | None = None
    prediction_error_pct: float | None = None
    kept: bool = False
    ended: End | None = None
    why: str = ""
    parity: Outcome = field(default_factory=Outcome)
    tuned: Mapping[str, int] | None = None
    """Numbers that were searched for: ``{"rungs.workers.count": 8}``."""
    runs: int = 0
    """Of each side of its screen."""
    rates: Rates = field(default_factory=Rates)
    at: int = 0
    """Rungs that had been kept before it."""
    costs: Costs | None = None
    """Of the stack with it, where it was kept."""

    @property
    def name(self) -> str:
        return self.key or self.rung

    @property
    def takes_away(self) -> bool:
        """It was to find out whether the stack is slower without a rung."""
        return any(settings.get("enabled") is False for settings in self.patch.get("rungs", {}).values())


@dataclass(frozen=True, kw_only=True)
class Speed:
    samples_per_s: float | None = None
    step_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Confirmation(Comparison):
    """The top against the start in fresh runs: the figures of its ``comparison.json``."""

    arm: str = field(default="", metadata={"json": None})
    alpha: float = field(default=0.05, metadata={"json": None})
    run_dir: str = ""
    failures: tuple[str, ...] = ()
    """Why runs failed."""


@dataclass(frozen=True, kw_only=True)
class ClimbFile:
    """``climb.json``."""

    schema: ClassVar[int] = SCHEMA
    run_dir: str = ""
    name: str = ""
    date: str | None = None
    hardware: Hardware = field(default_factory=Hardware)
    naive: Speed = field(default_factory=Speed)
    """The start: the training as it was."""
    ceilings_samples_per_s: Mapping[str, float | None] = field(default_factory=dict)
    """Of the start, with costs taken away."""
    ceilings_top_samples_per_s: Mapping[str, float | None] = field(default_factory=dict)
    ceilings_notes: Mapping[str, str] = field(default_factory=dict)
    """How a ceiling came about that no trial has measured."""
    ladders_samples_per_s: Mapping[str, float | None] = field(default_factory=dict)
    """Of the start with a shipped ladder, in one run."""
    rungs: tuple[Attempt, ...] = ()
    stack: Patch = field(default_factory=dict)
    top: Speed = field(default_factory=Speed)
    stopped: str | None = None
    """Why it ended."""
    confirmed: Confirmation | None = None
    allow: tuple[str, ...] = ()
    config_sha256: str | None = None
    recipe_sha256: str | None = None
    budget_s: float | None = None
    spent_s: float | None = None
    partial: bool = False


def count_kept(attempts: Iterable[Attempt]) -> int:
    """The height of a climb: attempts that put something on the stack."""
    return sum(each.kept and not each.takes_away for each in attempts)


def select_broken(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The rungs that were faster, and yet rolled back: the training was not the same any more."""
    lost = (each for each in attempts if not each.kept and each.parity.passed is False)
    return [each for each in lost if (each.measured_saved_ms or 0.0) > 0]


def select_unanswered(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts that gave no answer, and were not made again with one."""
    latest = {each.key or number: each for number, each in enumerate(attempts)}
    return [each for each in latest.values() if each.ended in NO_ANSWER]
