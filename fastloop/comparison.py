"""What an experiment of several arms found. Free of torch and Lightning; ``None`` = not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastloop.records import Parity

Judged = Literal["faster", "slower", "no_difference", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The finished runs of one arm. Run i of every arm trained with the same seed."""

    name: str
    samples_per_s: tuple[float, ...] = ()
    places: tuple[int, ...] = ()
    """Where each of these runs stood in the order of all runs of the experiment, from 0."""
    active_rungs: tuple[str, ...] = ()
    """Enabled rungs that took in every run."""
    inactive_rungs: Mapping[str, str] = field(default_factory=dict)
    """Enabled rungs that did not, and why."""
    changed_rungs: tuple[str, ...] = ()
    """Rungs whose settings differ from the base's."""
    changes_more: bool = False
    """Something else than rungs differs from the base."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One check of whether two arms are the same training."""

    name: str
    """ledger, gradient or loss."""
    passed: bool | None
    """None: it could not tell."""
    why: str
    deviation: float | None = None
    """The largest deviation seen: of the gradient, its norm over that of the base's; of the loss, in percent of it,
    below 0 where the arm's is the lower one."""
    limit: float | None = None
    """The deviation that would fail, in the same unit."""
    visible: float | None = None
    """The smallest deviation that would have been seen, in the same unit."""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Whether two arms are the same training, as far as the plan promises it and the gates can tell."""

    parity_class: Parity = "exact"
    passed: bool | None = None
    why: str = ""
    gates: tuple[Gate, ...] = ()

    @property
    def undecided(self) -> tuple[Gate, ...]:
        """Gates that could have told and did not: their trial failed, or there were too few runs. Not those that
        nothing can test here."""
        return tuple(gate for gate in self.gates if gate.passed is None and gate.detail.get("testable") is not False)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One arm against the base."""

    arm: str
    verdict: Judged
    why: str
    """In one sentence."""
    ratio: float | None = None
    """Samples per second of the arm over the base's; drift of the machine taken out."""
    ci95: tuple[float, float] | None = None
    """Interval of the ratio; at a stricter level where the experiment has several arms or could have ended early."""
    mde_pct: float | None = None
    """The smallest difference that this many runs would have shown, four times out of five."""
    alpha: float = 0.05
    """The error rate that this verdict was given at."""
    runs: int = 0
    """Per arm."""
    parity: Outcome = field(default_factory=Outcome)
