"""The few lines a person reads first: the verdict, the step, what took, what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.records import Finding, Measurement, Plan, Verdict

TITLES = {"data_wait": "STARVED BY DATA", "none": "NO BOTTLENECK FOUND"}
MOST_LINES = 12


def number(value: float | None, form: str = ",.1f") -> str:
    """A number for people; what was not measured is n/a, never 0."""
    return "n/a" if value is None else format(value, form)


def yaml_patch(patch: Mapping[str, Any] | None) -> str:
    """A nested patch on one line: ``rungs.workers {enabled: true}``."""
    parts = []
    for section, inner in (patch or {}).items():
        for name, settings in inner.items():
            fields = ", ".join(f"{key}: {json.dumps(value)}" for key, value in settings.items())
            parts.append(f"{section}.{name} {{{fields}}}")
    return ", ".join(parts)


def lines(seen: Measurement, plan: Plan, verdicts: Sequence[Verdict], findings: Sequence[Finding],
          report: str | None = None) -> list[str]:  # fmt: skip
    """At most 12 lines, verdict first. Says nothing about speed-ups: only an A/B can."""
    out = [_verdict(seen, findings), *(f"  {finding.why}" for finding in findings[:2]), _step(seen)]
    took = [f"{verdict.rung} ({verdict.why})" for verdict in verdicts if verdict.took]
    not_taken = [verdict for verdict in verdicts if not verdict.took]
    if took:
        out.append(f"TOOK     {'; '.join(took)}")
    out += [f"{'INACTIVE' if verdict.took is False else 'UNKNOWN ':<8} {verdict.rung}: {verdict.why}"
            for verdict in not_taken]  # fmt: skip
    for finding in findings:
        if finding.patch:
            out.append(f"FIX      {yaml_patch(finding.patch)}")
    tail = [f"REPORT   {report}"] if report else []
    if len(out) + len(tail) > MOST_LINES:
        kept = MOST_LINES - len(tail) - 1
        out = [*out[:kept], f"… {len(out) - kept} more lines in the report"]
    return out + tail


def _verdict(seen: Measurement, findings: Sequence[Finding]) -> str:
    title = TITLES.get(findings[0].bottleneck, findings[0].bottleneck.upper()) if findings else "NOT MEASURED"
    if seen.steps == 0:
        title = "TOO SHORT TO JUDGE"
    where = f"{seen.world_size}x {seen.device}"
    first, last = seen.total_steps - seen.steps, seen.total_steps
    flags = "   PARTIAL: the fit did not end normally" if seen.partial else ""
    flags += "   window too short for its queues" if seen.window_too_short and seen.steps else ""
    return f"fastloop {title}   {where}   steps {first}-{last}{flags}"


def _step(seen: Measurement) -> str:
    wait = seen.parts_ms.get("data_wait")
    lead = "" if seen.lead_ms is None else f"   lead {seen.lead_ms:.1f} ms"
    return (f"step {number(seen.step_ms.get('mean'))} ms   wait for data {number(wait)} ms"
            f"   {number(seen.samples_per_s)} samples/s{lead}   watching cost {number(seen.watch_us_per_step)} us a step")  # fmt: skip
