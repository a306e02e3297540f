"""report.md: the verdict, the step, the rungs, what changed, where it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.records import Finding, Measurement, Plan, Verdict
from fastloop.report import summary
from fastloop.report.summary import number


def report(seen: Measurement, plan: Plan, verdicts: Sequence[Verdict], findings: Sequence[Finding], *,
           changed_yaml: str, environment: Mapping[str, Any], left_out: str = "") -> str:  # fmt: skip
    """The whole report as Markdown."""
    parts = ["```\n" + "\n".join(summary.lines(seen, plan, verdicts, findings)) + "\n```", _step(seen), _findings(findings),
             _rungs(plan, verdicts), _loss(seen), f"## Configuration that differs from the baseline\n\n```yaml\n{changed_yaml}```",
             _environment(environment)]  # fmt: skip
    if left_out:
        parts.append(f"## Left out, and how to try it\n\n{left_out}")
    parts.append("This report measures one run. It says nothing about speed-ups: those need an A/B over several runs.")
    return "# fastloop report\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _step(seen: Measurement) -> str:
    step = seen.step_ms
    rows = [
        ("steps in the window", f"{seen.steps} of {seen.total_steps}" + (" (too short for its queues)" if seen.window_too_short else "")),
        ("step time, mean", f"{number(step.get('mean'), ',.3f')} ms"),
        ("median (p10 to p90)", f"{number(step.get('median'), ',.3f')} ms ({number(step.get('p10'), ',.3f')} to {number(step.get('p90'), ',.3f')})"),
        ("of which waiting for data", f"{number(seen.parts_ms.get('data_wait'), ',.3f')} ms"),
        ("samples per second, all ranks", number(seen.samples_per_s)),
        ("samples per step, all ranks", number(seen.global_batch, ",d")),
        ("host runs ahead of the device by", f"{number(seen.lead_ms, ',.2f')} ms"),
        ("peak device memory", f"{number(seen.peak_gib, ',.2f')} GiB"),
        ("watching cost", f"{number(seen.watch_us_per_step)} us a step"),
    ]  # fmt: skip
    return "## The step\n\n" + _table(("what", "value"), rows)


def _findings(findings: Sequence[Finding]) -> str:
    rows = [(finding.bottleneck, number(finding.share_pct), finding.why, summary.yaml_patch(finding.patch) or "n/a",
             _ceiling(finding)) for finding in findings]  # fmt: skip
    return "## Findings\n\n" + _table(("bottleneck", "% of step", "why", "patch", "if it were gone"), rows)


def _ceiling(finding: Finding) -> str:
    if finding.ceiling_gain_pct is None:
        return "n/a"
    return f"at most +{finding.ceiling_gain_pct:,.0f} %" + (" (estimate, not measured)" if finding.ceiling_is_estimate else "")


def _rungs(plan: Plan, verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "## Rungs\n\nNone is switched on."
    took = {True: "yes", False: "no", None: "unknown"}
    rows = [(verdict.rung, took[verdict.took], verdict.why, verdict.parity_class) for verdict in verdicts]
    notes = [f"* `{step.rung}`: {note}" for step in plan.planned for note in step.change.notes]
    return "## Rungs\n\n" + "\n\n".join([_table(("rung", "took", "evidence", "parity class"), rows), *filter(None, ["\n".join(notes)])])


def _loss(seen: Measurement) -> str:
    if not seen.loss:
        return "## Loss\n\nn/a"
    fifth = max(1, len(seen.loss) // 5)
    first, last = sum(seen.loss[:fifth]) / fifth, sum(seen.loss[-fifth:]) / fifth
    return f"## Loss\n\nmean of the first fifth {first:.4f}, of the last fifth {last:.4f} ({len(seen.loss)} points in measurement.json)"


def _environment(environment: Mapping[str, Any]) -> str:
    versions = environment.get("versions", {})
    hardware = environment.get("hardware", {})
    gpus = ", ".join(str(gpu.get("name")) for gpu in hardware.get("gpus", []) if isinstance(gpu, Mapping)) or "none"
    rows = [("GPUs", gpus), ("CPUs usable", str(hardware.get("usable_cpus", "n/a"))), ("commit", str(environment.get("commit") or "n/a")),
            *((name, str(version)) for name, version in versions.items())]  # fmt: skip
    return "## Where it ran\n\n" + _table(("what", "value"), rows)
