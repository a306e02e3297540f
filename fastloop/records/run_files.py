"""The records of one run as stored in its directory: environment, plan, measurement, verdicts and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Finding, Parity, Plan, Status, Step, Verdict
from fastloop.records.store import SCHEMA, load

PLAN, MEASUREMENT, VERDICTS, FINDINGS = "plan.json", "measurement.json", "verdicts.json", "findings.json"
ENVIRONMENT = "env.json"


@dataclass(frozen=True, kw_only=True)
class PlannedRung:
    """What one enabled rung would do, or why it would not."""

    rung: str
    status: Status = "planned"
    reason: str | None = None
    parity_class: Parity = "exact"
    wants: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    """The keys of its actions."""
    has_acted: bool = False
    """It is off, but was on for some of the steps."""


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """``plan.json``."""

    schema: ClassVar[int] = SCHEMA
    parity_class: Parity = "exact"
    rungs: tuple[PlannedRung, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> PlanFile:
        """The parts of a plan that a file can hold: actions become their keys."""
        rungs = [
            PlannedRung(
                rung=step.rung,
                status=step.status,
                reason=step.reason,
                parity_class=step.change.parity,
                wants=step.change.wants,
                notes=step.change.notes,
                actions=tuple(key for action in step.change.actions for key in action.keys),
                has_acted=step.has_acted,
            )
            for step in plan.steps
        ]
        return cls(parity_class=plan.parity, rungs=tuple(rungs))

    def to_plan(self) -> Plan:
        """The plan without its actions."""
        steps = [
            Step(
                rung=row.rung,
                status=row.status,
                reason=row.reason,
                change=Change(wants=row.wants, notes=row.notes, parity=row.parity_class),
                has_acted=row.has_acted,
            )
            for row in self.rungs
        ]
        return Plan(steps=tuple(steps))


@dataclass(frozen=True, kw_only=True)
class VerdictsFile:
    """``verdicts.json``."""

    schema: ClassVar[int] = SCHEMA
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FindingsFile:
    """``findings.json``."""

    schema: ClassVar[int] = SCHEMA
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuRecord:
    """One GPU of the machine."""

    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine."""

    cpu_model: str | None = None
    usable_cpus: int | None = None
    gpus: tuple[GpuRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TorchFlags:
    """Process-wide flags that change float32 results or their speed; None if unknown."""

    float32_matmul_precision: str | None = None
    cuda_matmul_fp32_precision: str | None = None
    cudnn_allow_tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    deterministic_algorithms: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environment and command line of a run: ``env.json``; None if unknown."""

    name: str | None = None
    argv: tuple[str, ...] = ()
    hardware: Machine | None = None
    versions: Mapping[str, str | None] | None = field(default_factory=dict)
    """Package versions, by name."""
    driver: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    """Whether the working tree had changes."""
    variables: Mapping[str, str | None] | None = None
    """Environment variables that may matter, by name; secrets masked."""
    torch_flags: TorchFlags | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run as one object for programs; None for each file that is missing."""

    schema: ClassVar[int] = SCHEMA
    run_dir: str | None
    plan: PlanFile | None = None
    measurement: Measurement | None = None
    verdicts: tuple[Verdict, ...] | None = None
    findings: tuple[Finding, ...] | None = None


def load_run(directory: Path) -> RunRecord:
    """The records in a run directory."""
    verdicts, findings = load(directory / VERDICTS, VerdictsFile), load(directory / FINDINGS, FindingsFile)
    return RunRecord(
        run_dir=str(directory),
        plan=load(directory / PLAN, PlanFile),
        measurement=load(directory / MEASUREMENT, Measurement),
        verdicts=None if verdicts is None else verdicts.verdicts,
        findings=None if findings is None else findings.findings,
    )


def load_plan(directory: Path) -> Plan:
    """The plan of a run without its actions; empty if there is no file."""
    return (load(directory / PLAN, PlanFile) or PlanFile()).to_plan()


def load_parity_class(directory: Path) -> Parity:
    """The class that the plan of a run promises; exact if there is no file."""
    return (load(directory / PLAN, PlanFile) or PlanFile()).parity_class


def load_verdicts(directory: Path) -> tuple[Verdict, ...]:
    """The verdicts of a run; empty if there is no file."""
    return (load(directory / VERDICTS, VerdictsFile) or VerdictsFile()).verdicts


def load_environment(directory: Path) -> Environment:
    """The environment of a run; all unknown if there is no file."""
    return load(directory / ENVIRONMENT, Environment) or Environment()
