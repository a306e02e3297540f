"""The records of a climb: its attempts, the costs of a step, and the result. ``None`` = unknown."""

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
gates that could have decided did not; parity: the training changed; inactive: the rung does not apply or had no effect;
class: it changes the training, which was not allowed; needed: without this rung the stack is slower."""
NO_ANSWER: tuple[End, ...] = ("odd", "undecided")
TOP = "_top"
"""Suffix of a ceiling's name in ``ceilings_notes``, marking a ceiling of the top, not of the start."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one optimizer step of a stack of rungs costs. None = not measured."""

    now_ms: float
    """The unchanged step, averaged over a long run: samples per step / samples per second."""
    outside_ms: float = 0.0
    """The part of it outside loading and computing: validation, checkpoints, the gap between epochs."""
    gap_ms: float = 0.0
    """The part of ``outside_ms`` spent between epochs, when workers are restarted."""
    replayed_ms: float | None = None
    """Without loading, all else unchanged; if workers load, they keep running, because they take CPUs from the step."""
    resident_ms: float | None = None
    """Without loading and copies."""
    alone_ms: float | None = None
    """Without loading and the exchange of gradients."""
    loader_ms: float | None = None
    """Loading alone, at full speed."""
    workers: int = 0
    """Worker processes that load alongside the training; 0: the training thread loads."""
    mfu: float | None = None
    """The model's work in ``replayed_ms`` divided by the most the device could do, 0 to 1."""
    launch_bound: bool | None = None
    """The device waits for launches in ``replayed_ms``."""
    copies_ms: float | None = None
    """Copies to the device, from the parts of the step."""
    fill_read: bool = False
    """Whether the batches waiting in its workers' queues can be counted."""
    loaders_ms: tuple[tuple[int, float], ...] = ()
    """Loading alone by number of workers, for the numbers that were measured."""
    start_s: float | None = None
    """Seconds that a further run of the stack takes besides its steps."""
    compile_s: float | None = None
    """Seconds that its first run compiled for."""

    @property
    def beside(self) -> bool:
        """Whether loading and training overlap."""
        return self.workers > 0

    @property
    def core_ms(self) -> float:
        """The part of the step that the costs explain."""
        return max(0.0, self.now_ms - self.outside_ms)

    def but(self, **changes: Any) -> Costs:
        """Return a copy with these costs changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Samples per second of a screen's runs, in pairs."""

    base: tuple[float, ...] = ()
    arm: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One rung that was tried. Times are milliseconds per optimizer step."""

    rung: str = "n/a"
    """Several rungs are joined by ``+``."""
    family: str | None = None
    patch: Patch = field(default_factory=dict)
    """The patch that enables it: ``{"rungs": {rung: settings}}``."""
    key: str | None = field(default=None, metadata={"json": "try"})
    """What was tried, such as ``workers-persistent``; missing in older files."""
    step_ms_before: float | None = None
    step_ms_after: float | None = None
    predicted_saved_ms: float | None = None
    measured_saved_ms: float | None = None
    ci95_saved_ms: tuple[float, float] | None = None
    prediction_error_pct: float | None = None
    kept: bool = False
    ended: End | None = None
    why: str = ""
    idle: Mapping[str, str] = field(default_factory=dict)
    """Rungs left out, with the reason: rungs of a kept ladder that had no effect, or rungs of the stack that this one
    makes ineffective."""
    parity: Outcome = field(default_factory=Outcome)
    tuned: Mapping[str, int] | None = None
    """Numbers found by a search: ``{"rungs.workers.count": 8}``."""
    runs: int = 0
    """Runs on each side of its screen."""
    rates: Rates = field(default_factory=Rates)
    at: int = 0
    """Number of rungs kept before it."""
    costs: Costs | None = None
    """Costs of the stack including it, if it was kept."""

    @property
    def name(self) -> str:
        return self.key or self.rung

    @property
    def is_removal(self) -> bool:
        """Whether it tested removing a rung from the stack."""
        rungs = self.patch.get("rungs", {})
        return bool(rungs) and not list_enabled(self.patch)


def list_enabled(patch: Patch) -> list[str]:
    """Return the rungs that a patch switches on or changes."""
    return [rung for rung, settings in patch.get("rungs", {}).items() if settings.get("enabled") is not False]


@dataclass(frozen=True, kw_only=True)
class Speed:
    samples_per_s: float | None = None
    step_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Confirmation(Comparison):
    """Fresh runs of the top against the start: the figures of its ``comparison.json``."""

    arm: str = field(default="", metadata={"json": None})
    alpha: float = field(default=0.05, metadata={"json": None})
    run_dir: str = ""
    failures: tuple[str, ...] = ()
    """Why runs failed."""
    inactive: Mapping[str, str] = field(default_factory=dict)
    """Rungs of the top that had no effect in these runs, with the reason."""
    naive_samples_per_s: float | None = None
    """Median of the start's runs."""
    top_samples_per_s: float | None = None
    """Median of the top's runs."""


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
    """Rates of the start with costs removed."""
    ceilings_top_samples_per_s: Mapping[str, float | None] = field(default_factory=dict)
    ceilings_notes: Mapping[str, str] = field(default_factory=dict)
    """Origin of each ceiling that no trial measured."""
    ladders_samples_per_s: Mapping[str, float | None] = field(default_factory=dict)
    """Rates of the start with a shipped ladder, from one run."""
    rungs: tuple[Attempt, ...] = ()
    stack: Patch = field(default_factory=dict)
    top: Speed = field(default_factory=Speed)
    stopped: str | None = None
    """Why the climb ended."""
    confirmed: Confirmation | None = None
    allow: tuple[str, ...] = ()
    config_sha256: str | None = None
    recipe_sha256: str | None = None
    start_s: float | None = None
    """Seconds that a training takes besides its steps."""
    ends_at: int | None = None
    """Optimizer steps after which a script ends by itself, if that is sooner than its trainings need."""
    budget_s: float | None = None
    spent_s: float | None = None
    partial: bool = False


def count_kept(attempts: Iterable[Attempt]) -> int:
    """The height of a climb: attempts that added something to the stack."""
    return sum(each.kept and not each.is_removal for each in attempts)


def select_broken(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The rungs that were faster but were rolled back because the training was no longer the same."""
    lost = (each for each in attempts if not each.kept and each.parity.passed is False)
    return [each for each in lost if (each.measured_saved_ms or 0.0) > 0]


def select_unanswered(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts that gave no answer and were not repeated with one."""
    latest = {each.key or number: each for number, each in enumerate(attempts)}
    return [each for each in latest.values() if each.ended in NO_ANSWER]
