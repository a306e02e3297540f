"""What an experiment of several arms found. Free of torch and Lightning; ``None`` = not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fastloop.records.plan import Parity
from fastloop.records.store import SCHEMA

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

    @property
    def is_testable(self) -> bool:
        """False where nothing can test it here, however many runs there are."""
        return self.detail.get("testable") is not False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Whether two arms are the same training, as far as the plan promises it and the gates can tell."""

    computed: ClassVar[tuple[str, ...]] = ("undecided",)

    parity_class: Parity = field(default="exact", metadata={"json": "class"})
    passed: bool | None = None
    why: str = ""
    gates: tuple[Gate, ...] = ()

    @property
    def undecided(self) -> tuple[str, ...]:
        """Names of the gates that have to decide and did not: their trial failed, or there were too few runs. Not those
        that nothing can test here, but for the gradient of an arm that rounds or regroups: nothing stands in for it."""
        needed = "gradient" if self.parity_class == "approximate" else None
        return tuple(
            gate.name for gate in self.gates if gate.passed is None and (gate.is_testable or gate.name == needed)
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One arm against the base."""

    arm: str = ""
    ratio: float | None = None
    """Samples per second of the arm over the base's; drift of the machine taken out."""
    ci95: tuple[float, float] | None = None
    """Interval of the ratio; at a stricter level where the experiment has several arms or could have ended early."""
    mde_pct: float | None = None
    """The smallest difference that this many runs would have shown, four times out of five."""
    verdict: Judged = "inconclusive"
    why: str = ""
    """In one sentence."""
    alpha: float = 0.05
    """The error rate that this verdict was given at."""
    runs: int = 0
    """Per arm."""
    parity: Outcome = field(default_factory=Outcome)


def choose_digits(ends: tuple[float, float] | None) -> int:
    """Decimals of an interval: two, or more where rounding would make both ends one, or hide that 1 lies outside."""
    if ends is None:
        return 2
    is_outside = ends[0] > 1 or ends[1] < 1
    for digits in (2, 3):
        low, high = (round(end, digits) for end in ends)
        if low != high and not (is_outside and 1 in (low, high)):
            return digits
    return 4


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What runs ran on."""

    device_name: str | None = None
    devices: int | None = None
    torch: str | None = None
    lightning: str | None = None
    fastloop: str | None = None
    driver: str | None = None


@dataclass(frozen=True, kw_only=True)
class Passport:
    """What one experiment on a rung alone has found of its numerics. Deviations are shares of the gradient's norm, or
    percent of the loss."""

    rung: str = ""
    parity_class: Parity = field(default="exact", metadata={"json": "class"})
    passed: bool | None = None
    why: str = ""
    gradient_deviation: float | None = None
    gradient_visible: float | None = None
    """The smallest that would have been seen."""
    loss_deviation_pct: float | None = None
    loss_visible_pct: float | None = None
    precision: str | None = None
    """The coarsest arithmetic of either arm."""
    gates: tuple[Gate, ...] = ()
    environment: Hardware = field(default_factory=Hardware)
    runs: int = 0
    """Of the arm."""
    name: str = ""
    """Of the training."""
    run_dir: str | None = None
    date: str | None = None


@dataclass(frozen=True, kw_only=True)
class PassportsFile:
    """The passports of one rung on this machine, newest first."""

    schema: ClassVar[int] = SCHEMA
    rung: str = ""
    passports: tuple[Passport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``experiment.json``: what the runs in a directory are runs of."""

    schema: ClassVar[int] = SCHEMA
    base: str | None = None
    script: str | None = None
    vs_commit: str | None = None
    """As it was written; the commit's hash is among the sources."""
    runs: int | Literal["auto"] | None = None
    steps: int | None = None
    aa: bool = False
    band_pct: float | None = None
    arms: tuple[str, ...] = ()
    """Their names, the base first."""
    options: str | None = None
    """Fingerprint of the options that may hold secrets."""
    configs: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the configurations, by arm."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of recipes, scripts and what they read, by file."""


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm: its runs, which of its rungs took effect, and what it needs (medians)."""

    name: str
    runs: int = 0
    """That have a rate."""
    samples_per_s: tuple[float, ...] = ()
    places: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    steps: int | None = None
    active_rungs: tuple[str, ...] = ()
    inactive_rungs: tuple[str, ...] = ()
    inactive_why: Mapping[str, str] = field(default_factory=dict)
    step_ms: float | None = None
    peak_gib: float | None = None
    global_batch: float | None = None
    failed: str | None = None
    """Why it has no more runs."""


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """The run that ended an arm."""

    arm: str
    run: str | int | None = None
    cause: str | None = None
    rank: int | None = None
    """The one to blame, where that is exactly one."""
    last_step: int | None = None
    tail: str = ""
    """The end of its stderr."""


@dataclass(frozen=True, kw_only=True)
class ExperimentResult:
    """``comparison.json``. Ratio, interval, verdict and parity of the first arm stand at the top as well."""

    schema: ClassVar[int] = SCHEMA
    computed: ClassVar[tuple[str, ...]] = ("ratio", "ci95", "verdict", "parity")

    run_dir: str = ""
    name: str = ""
    steps: int | None = None
    """Of each run of the base."""
    warmup_steps: int | None = None
    band_pct: float = 3.0
    """Differences within plus or minus this count as none."""
    order: tuple[str, ...] = ()
    """The arm of each run, in the order they ran."""
    config_diff: Mapping[str, tuple[tuple[str, Any, Any], ...]] = field(default_factory=dict)
    """Of each arm: key, the base's value and its own."""
    arms: tuple[ArmResult, ...] = ()
    """The base first."""
    comparisons: tuple[Comparison, ...] = ()
    hardware: Hardware = field(default_factory=Hardware)
    flags: tuple[str, ...] = ()
    failures: tuple[FailedRun, ...] = ()
    partial: bool = False
    seconds: float | None = None

    @property
    def first(self) -> Comparison | None:
        return self.comparisons[0] if self.comparisons else None

    @property
    def ratio(self) -> float | None:
        return None if self.first is None else self.first.ratio

    @property
    def ci95(self) -> tuple[float, float] | None:
        return None if self.first is None else self.first.ci95

    @property
    def verdict(self) -> Judged | None:
        return None if self.first is None else self.first.verdict

    @property
    def parity(self) -> Outcome | None:
        return None if self.first is None else self.first.parity
