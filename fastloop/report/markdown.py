"""report.md: the verdict, the step, the rungs, what changed, where it ran."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.measurement import Measurement
from fastloop.records import Finding, Plan, Verdict
from fastloop.report import summary
from fastloop.report.summary import number

_MARKUP = re.compile(r"[\\`*<|~]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown would read as markup. An underscore inside a word is none: ``num_workers`` stays as it is."""


def report(seen: Measurement, plan: Plan, verdicts: Sequence[Verdict], findings: Sequence[Finding], *,
           changed_yaml: str, environment: Mapping[str, Any], left_out: str = "") -> str:  # fmt: skip
    """The whole report as Markdown."""
    parts = [_fenced("\n".join(summary.lines(seen, plan, verdicts, findings))), _step(seen), _findings(findings),
             _rungs(plan, verdicts), _loss(seen),
             f"## Configuration that differs from the baseline\n\n{_fenced(changed_yaml.rstrip(), 'yaml')}",
             _environment(environment)]  # fmt: skip
    if left_out:
        parts.append(f"## Left out, and how to try it\n\n{left_out}")
    parts.append("This report measures one run. It says nothing about speed-ups: those need an A/B over several runs.")
    return "# fastloop report\n\n" + "\n\n".join(parts) + "\n"


def _fenced(text: str, kind: str = "") -> str:
    """A block that is shown as it is, between fences longer than any inside it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{kind}\n{text}\n{fence}"


def _plain(text: str) -> str:
    """A text on one line, with nothing in it that Markdown would take for markup."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _step(seen: Measurement) -> str:
    step = seen.step_ms
    spread = f"{number(step.get('p10'), ',.3f')} to {number(step.get('p90'), ',.3f')}"
    short = ", too short to be sure of" if seen.window_too_short else ""
    rows = [
        ("steps in the window", f"{seen.steps} of {seen.total_steps}{short}"),
        ("ended", "early: the fit did not end normally, so this is a part of it" if seen.partial else "normally"),
        ("step time, mean", number(step.get("mean"), ",.3f", "ms")),
        ("median (p10 to p90)", f"{number(step.get('median'), ',.3f', 'ms')} ({spread})"),
        ("of which waiting for data", number(seen.parts_ms.get("data_wait"), ",.3f", "ms")),
        ("samples per second, all ranks", number(seen.samples_per_s)),
        ("samples per step, all ranks", number(seen.global_batch, ",d")),
        ("host runs ahead of the device by", number(seen.lead_ms, ",.2f", "ms")),
        ("peak device memory", number(seen.peak_gib, ",.2f", "GiB")),
        ("watching cost", number(seen.watch_us_per_step, unit="us a step")),
    ]  # fmt: skip
    return "## The step\n\n" + _table(("what", "value"), rows)


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "## Findings\n\nn/a: nothing was watched."
    rows = [(finding.bottleneck, number(finding.share_pct), finding.why, summary.yaml_patch(finding.patch) or "n/a",
             _ceiling(finding)) for finding in findings]  # fmt: skip
    return "## Findings\n\n" + _table(("bottleneck", "% of step", "why", "patch", "if it were gone"), rows)


def _ceiling(finding: Finding) -> str:
    if finding.ceiling_gain_pct is None:
        return "n/a"
    estimate = " (estimate, not measured)" if finding.ceiling_is_estimate else ""
    return f"at most +{number(finding.ceiling_gain_pct, ',.0f', '%')}{estimate}"


def _rungs(plan: Plan, verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "## Rungs\n\nNone is switched on."
    took = {True: "yes", False: "no", None: "unknown"}
    rows = [(verdict.rung, took[verdict.took], verdict.why, verdict.parity_class) for verdict in verdicts]
    notes = [f"* `{step.rung}`: {_plain(note)}" for step in plan.planned for note in step.change.notes]
    parts = [f"Parity class of the plan: {plan.parity}.", _table(("rung", "took", "evidence", "parity class"), rows),
             "\n".join(notes)]  # fmt: skip
    return "## Rungs\n\n" + "\n\n".join(filter(None, parts))


def _loss(seen: Measurement) -> str:
    if not seen.loss:
        return "## Loss\n\nn/a"
    fifth = max(1, len(seen.loss) // 5)
    lost = sum(not math.isfinite(loss) for loss in seen.loss)
    said = [f"mean of the first fifth {_mean(seen.loss[:fifth])}, of the last fifth {_mean(seen.loss[-fifth:])}",
            f"({len(seen.loss)} points in measurement.json)"]  # fmt: skip
    if lost:
        said.append(f"**{lost} of them are not finite numbers.**")
    return f"## Loss\n\n{' '.join(said)}"


def _mean(values: Sequence[float]) -> str:
    return number(sum(values) / len(values), ".4f")


def _environment(environment: Mapping[str, Any]) -> str:
    hardware, versions = environment.get("hardware") or {}, environment.get("versions") or {}
    flags = environment.get("torch_flags") or {}
    gpus = [str(gpu.get("name") or "n/a") for gpu in hardware.get("gpus", []) if isinstance(gpu, Mapping)]
    changes = ", with changes" if environment.get("dirty") else ""
    rows = [("GPUs", ", ".join(gpus) or "none"), ("CPUs usable", str(hardware.get("usable_cpus") or "n/a")),
            ("float32 matrix products", str(flags.get("float32_matmul_precision") or "n/a")),
            ("commit", f"{environment.get('commit') or 'n/a'}{changes}"),
            *((name, str(version)) for name, version in versions.items())]  # fmt: skip
    return "## Where it ran\n\n" + _table(("what", "value"), rows)
