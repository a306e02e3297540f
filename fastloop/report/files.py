"""A run directory: the records as JSON and YAML, and the report for people."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastloop.records import Finding, Measurement, Plan, Verdict
from fastloop.report import markdown

SCHEMA = 1


def plan_json(plan: Plan) -> dict[str, Any]:
    """What each enabled rung would do, or why it would not."""
    rungs = [{"rung": step.rung, "status": step.status, "reason": step.reason, "parity_class": step.change.parity,
              "wants": dict(step.change.wants), "notes": list(step.change.notes),
              "actions": [key for action in step.change.actions for key in action.keys]}
             for step in plan.steps]  # fmt: skip
    return {"schema": SCHEMA, "parity_class": plan.parity, "rungs": rungs}


def measurement_json(seen: Measurement) -> dict[str, Any]:
    """All numbers of a measurement; None stays null."""
    return {"schema": SCHEMA, **dataclasses.asdict(seen)}


def verdicts_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {"schema": SCHEMA, "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts]}


def findings_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"schema": SCHEMA, "findings": [dataclasses.asdict(finding) for finding in findings]}


def dump(content: Mapping[str, Any]) -> str:
    """JSON text that every parser takes: what is not a finite number becomes null, unknown objects their name."""
    return json.dumps(_plain(content), indent=1, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(member) for member in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def write(directory: Path, contents: Mapping[str, str]) -> None:
    """Write files whole or not at all: a reader never sees half of one."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        partial = directory / f".{name}.{os.getpid()}.tmp"
        partial.write_text(text, encoding="utf-8")
        partial.replace(directory / name)


def run_files(*, config_yaml: str, changed_yaml: str, environment: Mapping[str, Any], plan: Plan, seen: Measurement,
              verdicts: Sequence[Verdict], findings: Sequence[Finding], left_out: str = "") -> dict[str, str]:  # fmt: skip
    """Names and texts of everything a run directory holds."""
    return {
        "config.resolved.yaml": config_yaml, "config.diff.yaml": changed_yaml, "env.json": dump(environment),
        "plan.json": dump(plan_json(plan)), "measurement.json": dump(measurement_json(seen)),
        "verdicts.json": dump(verdicts_json(verdicts)), "findings.json": dump(findings_json(findings)),
        "report.md": markdown.report(seen, plan, verdicts, findings, changed_yaml=changed_yaml,
                                     environment=environment, left_out=left_out),
    }  # fmt: skip
