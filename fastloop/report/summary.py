"""The few lines a person reads first: the verdict, the step, what took, what to do.

Lines are not wrapped: terminals do that themselves, and a wrapped line can be neither searched nor copied whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.measurement import Measurement
from fastloop.records import Finding, Plan, Verdict

TITLES = {"data_wait": "STARVED BY DATA", "none": "NO BOTTLENECK FOUND"}
MOST_LINES = 12


def number(value: float | None, form: str = ",.1f", unit: str = "") -> str:
    """A number for people, with its unit; what was not measured is n/a, never 0."""
    return "n/a" if value is None or not math.isfinite(value) else f"{format(value, form)} {unit}".rstrip()


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
    """At most 12 lines, verdict first. Says nothing about speed-ups: only an A/B can.

    Where there are more, those of one kind share a line: a reason is never left out.
    """
    head = [_verdict(seen, findings), *(f"  {finding.why}" for finding in findings[:2]), _step(seen)]
    took = [f"{verdict.rung} ({_flat(verdict.why)})" for verdict in verdicts if verdict.took]
    kinds = [
        ("TOOK", [f"[{plan.parity}] {'; '.join(took)}"] if took else []),
        ("INACTIVE", [f"{verdict.rung}: {_flat(verdict.why)}" for verdict in verdicts if verdict.took is False]),
        ("UNKNOWN", [f"{verdict.rung}: {_flat(verdict.why)}" for verdict in verdicts if verdict.took is None]),
        ("FIX", [yaml_patch(finding.patch) for finding in findings if finding.patch]),
        ("REPORT", [report] if report else []),
    ]
    while len(head) + sum(len(said) for _, said in kinds) > MOST_LINES:
        longest = max((said for _, said in kinds), key=len)
        longest[:] = ["; ".join(longest)]
    return [*map(_flat, head), *(f"{kind:<8} {line}" for kind, said in kinds for line in said)]


def _flat(text: str) -> str:
    """A reason may be an exception's, which have several lines; leading spaces stay."""
    return " ".join(text.splitlines())


def _verdict(seen: Measurement, findings: Sequence[Finding]) -> str:
    title = TITLES.get(findings[0].bottleneck, findings[0].bottleneck.upper()) if findings else "NOT MEASURED"
    first, last = seen.total_steps - seen.steps, seen.total_steps
    window = f"steps {first}-{last}"
    if seen.steps == 0:
        window = f"{last} steps, none of them measured"
        title = "TOO SHORT TO JUDGE" if findings else title
    flags = "   PARTIAL: the fit did not end normally" if seen.partial else ""
    if seen.window_too_short and seen.steps:
        count = f": {seen.steps} step{'s' if seen.steps > 1 else ''}" if seen.steps < 10 else " for its queues"
        flags += f"   window too short{count}"
    return f"fastloop {title}   {seen.world_size}x {seen.device}   {window}{flags}"


def _step(seen: Measurement) -> str:
    wait = seen.parts_ms.get("data_wait")
    lead = "" if seen.lead_ms is None else f"   lead {number(seen.lead_ms, unit='ms')}"
    return (f"step {number(seen.step_ms.get('mean'), unit='ms')}   wait for data {number(wait, unit='ms')}"
            f"   {number(seen.samples_per_s)} samples/s{lead}"
            f"   watching cost {number(seen.watch_us_per_step, unit='us a step')}")  # fmt: skip
