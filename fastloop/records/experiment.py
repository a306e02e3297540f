"""Results of an experiment with several arms. Free of torch and Lightning; ``None`` = unknown."""

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
    """Position of each run in the order of all runs of the experiment, from 0."""
    active_rungs: tuple[str, ...] = ()
    """Enabled rungs that took effect in every run."""
    inactive_rungs: Mapping[str, str] = field(default_factory=dict)
    """The other enabled rungs, with the reason."""
    changed_rungs: tuple[str, ...] = ()
    """Rungs whose settings differ from the base's."""
    changes_more: bool = False
    """Whether the arm differs from the base in more than rungs."""
    refused: bool = False
    """Whether its plan leaves out all rungs that it changes; then it does not run."""
    queue_error_pct: float = 0.0
    """Percent by which a rate may be too high, at most, where windows are too short for their queues."""
    timed_steps: int | None = None
    """Optimizer steps in the shortest window of its runs; None without a run."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One check of whether two arms are the same training."""

    name: str
    """ledger, gradient or loss."""
    passed: bool | None
    """None: undecided."""
    why: str
    deviation: float | None = None
    """The largest deviation measured. For the gradient, the norm of the difference over the norm of the base's
    gradient; for the loss, in percent of the loss, negative if the arm's loss is lower."""
    limit: float | None = None
    """A larger deviation fails the gate; same unit."""
    visible: float | None = None
    """The smallest deviation that the gate could have detected; same unit."""
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_testable(self) -> bool:
        """False if the gate cannot be tested here, no matter how many runs there are."""
        return self.detail.get("testable") is not False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Whether two arms are the same training, within what the plan promises and the gates can detect."""

    computed: ClassVar[tuple[str, ...]] = ("undecided",)

    parity_class: Parity = field(default="exact", metadata={"json": "class"})
    passed: bool | None = None
    why: str = ""
    gates: tuple[Gate, ...] = ()

    @property
    def undecided(self) -> tuple[str, ...]:
        """Names of the gates that must decide but did not, because their trial failed or there were too few runs. Gates
        that cannot be tested here are left out, except the gradient gate if the arm rounds or regroups, because no
        other gate can replace it."""
        needed = "gradient" if self.parity_class == "approximate" else None
        return tuple(
            gate.name for gate in self.gates if gate.passed is None and (gate.is_testable or gate.name == needed)
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One arm against the base."""

    arm: str = ""
    ratio: float | None = None
    """Samples per second of the arm divided by the base's, corrected for drift of the machine."""
    ci95: tuple[float, float] | None = None
    """Confidence interval of the ratio; above 95 % if there are several arms or an early end was possible."""
    mde_pct: float | None = None
    """Minimum detectable effect: the smallest difference that this many runs would show four times out of five."""
    verdict: Judged = "inconclusive"
    why: str = ""
    """The reason, in one sentence."""
    alpha: float = 0.05
    """The error rate of this verdict."""
    runs: int = 0
    """Runs per arm."""
    parity: Outcome = field(default_factory=Outcome)


def choose_digits(ends: tuple[float, float] | None) -> int:
    """Decimals for an interval: two, or more if rounding would make both ends equal or hide that 1 lies outside."""
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
    """The hardware and software of the runs."""

    device_name: str | None = None
    devices: int | None = None
    torch: str | None = None
    lightning: str | None = None
    fastloop: str | None = None
    driver: str | None = None


@dataclass(frozen=True, kw_only=True)
class Passport:
    """Numerical results of one experiment on a single rung."""

    parity_class: Parity = field(default="exact", metadata={"json": "class"})
    passed: bool | None = None
    gates: tuple[Gate, ...] = ()
    environment: Hardware = field(default_factory=Hardware)
    runs: int = 0
    """Runs of the arm."""
    name: str = ""
    """Name of the training."""
    run_dir: str | None = None
    date: str | None = None


@dataclass(frozen=True, kw_only=True)
class PassportsFile:
    """The passports of one rung on this machine, newest first."""

    schema: ClassVar[int] = SCHEMA
    passports: tuple[Passport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``experiment.json``: the experiment that the runs in a directory belong to."""

    schema: ClassVar[int] = SCHEMA
    base: str | None = None
    script: str | None = None
    vs_commit: str | None = None
    """As the user wrote it; the commit's hash is in ``sources``."""
    runs: int | Literal["auto"] | None = None
    steps: int | None = None
    aa: bool = False
    band_pct: float | None = None
    arms: tuple[str, ...] = ()
    """Names of the arms, the base first."""
    options: str | None = None
    """Fingerprint of the options that may contain secrets."""
    configs: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the configurations, by arm."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of recipes, scripts and the files they read, by file."""


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm: its runs, the rungs that took effect, and its resource use (medians)."""

    name: str
    runs: int = 0
    """Runs that have a rate."""
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
    compile_s: float | None = None
    """Seconds of compiling in the run where it took longest: later runs find compiled code in a cache."""
    planned_steps: int | None = None
    """Optimizer steps of the user's own run, if the configuration says how many."""
    failed: str | None = None
    """Why the arm has no more runs."""


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """The run that ended an arm."""

    arm: str
    run: str | int | None = None
    cause: str | None = None
    last_step: int | None = None
    tail: str = ""
    """The end of its stderr."""


@dataclass(frozen=True, kw_only=True)
class ExperimentResult:
    """``comparison.json``. The first arm's ratio, interval, verdict and parity also appear at the top level."""

    schema: ClassVar[int] = SCHEMA
    computed: ClassVar[tuple[str, ...]] = ("ratio", "ci95", "verdict", "parity")

    run_dir: str = ""
    name: str = ""
    steps: int | None = None
    """Steps of each run of the base, unless the script ends sooner."""
    ended_at: int | None = None
    """The steps after which the script ends sooner; None if it does not."""
    warmup_steps: int | None = None
    band_pct: float = 3.0
    """Differences within plus or minus this many percent count as no difference."""
    order: tuple[str, ...] = ()
    """The arm of each run, in the order they ran."""
    config_diff: Mapping[str, tuple[tuple[str, Any, Any], ...]] = field(default_factory=dict)
    """For each arm: key, the base's value and the arm's value."""
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
