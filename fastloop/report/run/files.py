"""The contents of a run directory's files: the records and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Plan, Verdict
from fastloop.records.run_files import Environment, FindingsFile, PlanFile, VerdictsFile
from fastloop.records.store import decode, dump
from fastloop.report.drawing.html import draw_reports
from fastloop.report.run.run_report import build_document


def run_files(
    *,
    config_yaml: str,
    changed_yaml: str,
    env_json: str,
    plan: Plan,
    seen: Measurement,
    verdicts: Sequence[Verdict],
    findings: Sequence[Finding],
    left_out: str = "",
    name: str = "",
    then: Sequence[str] = (),
    later: Sequence[str] = (),
) -> dict[str, str]:
    """Return names and texts of all files in a run directory.

    If the page cannot be made (for example, jinja2 is missing), there is no report.html, and report.md says why.

    Args:
        env_json: the text of env.json.
        name: the name of the recipe or configuration; for ``then`` and ``later`` see ``summary.write_lines``.
    """
    document = build_document(
        seen,
        plan,
        verdicts,
        findings,
        changed_yaml=changed_yaml,
        environment=decode(json.loads(env_json), Environment) or Environment(),
        left_out=left_out,
        name=name,
        then=then,
        later=later,
    )
    return {
        "config.resolved.yaml": config_yaml,
        "config.diff.yaml": changed_yaml,
        "env.json": env_json,
        "plan.json": dump(PlanFile.of(plan)),
        "measurement.json": dump(seen),
        "verdicts.json": dump(VerdictsFile(verdicts=tuple(verdicts))),
        "findings.json": dump(FindingsFile(findings=tuple(findings))),
        **draw_reports(document),
    }
