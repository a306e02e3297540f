"""A run directory: the records as JSON and YAML, and the report for people."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastloop.measurement import Measurement
from fastloop.records import Finding, Plan, Verdict
from fastloop.report import html, markdown
from fastloop.shipped import is_file

SCHEMA = 1

Content = Mapping[str, Any] | None
"""What one of its JSON files holds."""

NAMES = ("config.resolved.yaml", "config.diff.yaml", "env.json", "plan.json", "measurement.json", "verdicts.json",
         "findings.json", "report.md", "report.html", "trace.json.gz", "metrics.csv", "hparams.yaml")  # fmt: skip
"""What a run may write into its directory, the logger's two files included."""


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


def run_json(run_dir: str, *, plan: Content = None, measurement: Content = None, verdicts: Content = None,
             findings: Content = None) -> dict[str, Any]:  # fmt: skip
    """One run as one object, from the contents of its files; null for what there is not."""
    return {"schema": SCHEMA, "run_dir": run_dir, "plan": plan, "measurement": measurement,
            "verdicts": None if verdicts is None else verdicts.get("verdicts"),
            "findings": None if findings is None else findings.get("findings")}  # fmt: skip


def dump(content: Mapping[str, Any], *, ascii_only: bool = False) -> str:
    """JSON text that every parser takes: what is not a finite number becomes null, unknown objects their name."""
    return json.dumps(_plain(content), indent=1, ensure_ascii=ascii_only, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=str)
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


def clear(directory: Path) -> None:
    """Delete what an earlier run left in a directory, so that a run that fails does not end beside another's report."""
    for name in NAMES:
        (directory / name).unlink(missing_ok=True)


def write(directory: Path, contents: Mapping[str, str]) -> None:
    """Write files whole or not at all: a reader never sees half of one."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        partial = directory / f".{name}.{os.getpid()}.tmp"
        try:
            partial.write_text(text, encoding="utf-8", errors="replace")  # paths may hold bytes that are no UTF-8
            partial.replace(directory / name)
        finally:
            partial.unlink(missing_ok=True)  # there only where the disk is full
    if "report.md" in contents and "report.html" not in contents:
        (directory / "report.html").unlink(missing_ok=True)  # an earlier fit's, which says something else


def report_in(directory: Path) -> Path | None:
    """The report to look at in a run directory: the page, else the Markdown; None without either."""
    found = (directory / name for name in ("report.html", "report.md"))
    return next((path for path in found if is_file(path)), None)


def run_files(
    *, config_yaml: str, changed_yaml: str, environment: Mapping[str, Any], plan: Plan, seen: Measurement,
    verdicts: Sequence[Verdict], findings: Sequence[Finding], left_out: str = "", name: str = "",
    then: Sequence[str] = (), later: Sequence[str] = (),
) -> dict[str, str]:  # fmt: skip
    """Names and texts of everything a run directory holds.

    Where the page cannot be made (jinja2 is missing, say), there is no report.html, and report.md says why.

    Args:
        name: of the recipe or configuration; this, ``then`` and ``later`` as ``summary.lines`` takes them.
    """
    told: dict[str, Any] = {"changed_yaml": changed_yaml, "environment": environment, "left_out": left_out,
                            "name": name, "then": then, "later": later}  # fmt: skip
    page, note = html.page(lambda: html.report(seen, plan, verdicts, findings, **told))
    return {
        "config.resolved.yaml": config_yaml, "config.diff.yaml": changed_yaml, "env.json": dump(environment),
        "plan.json": dump(plan_json(plan)), "measurement.json": dump(measurement_json(seen)),
        "verdicts.json": dump(verdicts_json(verdicts)), "findings.json": dump(findings_json(findings)),
        "report.md": markdown.report(seen, plan, verdicts, findings, **told, note=note), **page,
    }  # fmt: skip

