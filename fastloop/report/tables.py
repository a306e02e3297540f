"""The report's tables as plain texts, made once and drawn twice: as Markdown and as HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastloop.measurement import PARTS, Measurement
from fastloop.records import Finding, Plan, Verdict
from fastloop.report import summary
from fastloop.report.summary import number, short

LABELS = {
    "data_wait": "waiting for data", "h2d": "copy to the device", "forward": "forward", "backward": "backward",
    "optimizer": "optimizer", "comm_exposed": "exchange, exposed", "callbacks_logging": "callbacks, logging",
    "validation": "validation", "checkpoint": "checkpoint", "epoch_gap": "between epochs", "host_other": "host, other",
    "unexplained": "unexplained",
}  # fmt: skip
"""The parts of a step in words."""
NAME_LETTERS = 120
"""A kernel's name is a whole C++ template; measurement.json has it all."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts under a heading."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()
    """Columns that hold numbers."""
    note: str = ""
    """A sentence below it."""


def step(seen: Measurement) -> Table:
    """The step as a whole: time, spread, rate, memory, the cost of watching."""
    times = seen.step_ms
    spread = f"{number(times.get('p10'), ',.3f')} to {number(times.get('p90'), ',.3f')}"
    unsure = ", too short to be sure of" if seen.window_too_short else ""
    counted = "n/a" if seen.total_steps is None else f"{seen.steps} of {seen.total_steps}{unsure}"
    rows = [
        ("steps in the window", counted),
        ("ended", "early: the fit did not end normally, so this is a part of it" if seen.partial else "normally"),
        ("step time, mean", number(times.get("mean"), ",.3f", "ms")),
        ("median (p10 to p90)", f"{number(times.get('median'), ',.3f', 'ms')} ({spread})"),
        ("of which waiting for data", number(seen.parts_ms.get("data_wait"), ",.3f", "ms")),
        ("samples per second, all ranks", number(seen.samples_per_s)),
        ("samples per step, all ranks", number(seen.global_batch, ",d")),
        ("samples per loader batch, one rank", number(seen.micro_batch, ",d")),
        ("precision", seen.precision or "n/a"),
        ("devices", summary.devices(seen)),
        ("host runs ahead of the device by", number(seen.lead_ms, ",.2f", "ms")),
        ("device work left when a step is issued", number(seen.trail_ms, ",.2f", "ms")),
        ("host blocked in forward, backward, optimizer", number(seen.blocked_ms, ",.2f", "ms")),
        ("peak device memory", number(seen.peak_gib, ",.2f", "GiB")),
        ("watching cost", number(seen.watch_us_per_step, unit="us a step")),
    ]  # fmt: skip
    return Table(title="The step", head=("what", "value"), rows=tuple(rows))


def parts(seen: Measurement) -> Table:
    """The step split: device time, its share, and the host's durations as a column of their own."""
    mean = seen.step_ms.get("mean")
    rows = [(LABELS[part], _ms(seen.parts_ms.get(part)), share(seen.parts_ms.get(part), mean),
             _ms(seen.host_ms.get(part))) for part in PARTS]  # fmt: skip
    found = summary.known(seen.parts_ms)
    if found:
        total = sum(found.values())
        rows.append(("sum of the known parts", _ms(total), share(total, mean), "-"))
    note = ("Means per optimizer step. The first column tiles the step on the device's time line; the host's durations"
            " run beside it and are never added to it.")  # fmt: skip
    return Table(title="The parts of the step", head=("part", "device ms", "% of step", "host ms"), rows=tuple(rows),
                 numeric=(1, 2, 3), note=note)  # fmt: skip


def _ms(value: float | None) -> str:
    return number(None if value is None else round(value, 3) + 0.0, ",.3f")  # no -0.000


def share(part: float | None, whole: float | None) -> str:
    """A part in per cent of the whole."""
    if part is None or whole is None or not whole > 0:
        return "n/a"
    return number(100 * part / whole)


def findings(found: Sequence[Finding], seen: Measurement) -> Table:
    rows = [(finding.bottleneck, number(finding.share_pct), finding.why, summary.yaml_patch(finding.patch) or "n/a",
             bound(finding, seen)) for finding in found]  # fmt: skip
    return Table(title="Findings", head=("bottleneck", "% of step", "why", "patch", "if it were gone"),
                 rows=tuple(rows), note="" if rows else "n/a: nothing was watched.")  # fmt: skip


def details(found: Sequence[Finding], seen: Measurement) -> list[tuple[str, str]]:
    """The evidence behind the reasons, with the bottleneck's name; what the state of the machine says stands apart."""
    return [(finding.bottleneck, line) for finding in found for line in finding.detail if line not in seen.state]


def bound(finding: Finding, seen: Measurement) -> str:
    """A finding's ceiling: the rate, or its share alone where no rate was measured."""
    if finding.ceiling_gain_pct is None or not math.isfinite(finding.ceiling_gain_pct):
        return "n/a"
    kind = "estimate, not measured" if finding.ceiling_is_estimate else "measured"
    rate = "" if seen.samples_per_s is None else f", {short(seen.samples_per_s * (1 + finding.ceiling_gain_pct / 100))}"
    return f"at most +{number(finding.ceiling_gain_pct, ',.0f', '%')}{rate and f'{rate} samples/s'} ({kind})"


def rungs(verdicts: Sequence[Verdict]) -> Table:
    took = {True: "yes", False: "no", None: "unknown"}
    rows = [(verdict.rung, took[verdict.took], verdict.why, verdict.parity_class) for verdict in verdicts]
    return Table(title="Rungs", head=("rung", "took", "evidence", "parity class"), rows=tuple(rows),
                 note="" if rows else "None is switched on.")  # fmt: skip


def rung_notes(plan: Plan) -> list[tuple[str, str]]:
    """What the planned rungs want the user to know, with the rung's name."""
    return [(step.rung, note) for step in plan.planned for note in step.change.notes]


def losses(seen: Measurement) -> tuple[str, str]:
    """The loss in a sentence, and a warning; both may be empty."""
    if not seen.loss:
        return "n/a", ""
    if len(seen.loss) == 1:
        return f"{number(seen.loss[0], '.4f')} (1 point in measurement.json)", ""
    fifth = max(1, len(seen.loss) // 5)
    lost = sum(not math.isfinite(loss) for loss in seen.loss)
    every = "" if seen.loss_every <= 1 else f", one of every {seen.loss_every} steps"
    said = (f"mean of the first fifth {_mean(seen.loss[:fifth])}, of the last fifth {_mean(seen.loss[-fifth:])}"
            f" ({len(seen.loss)} points in measurement.json{every})")  # fmt: skip
    return said, f"{lost} of them are not finite numbers." if lost else ""


def _mean(values: Sequence[float]) -> str:
    return number(sum(values) / len(values), ".4f")


def environment(record: Mapping[str, Any]) -> Table:
    hardware, versions = record.get("hardware") or {}, record.get("versions") or {}
    flags = record.get("torch_flags") or {}
    gpus = [str(gpu.get("name") or "n/a") for gpu in hardware.get("gpus") or () if isinstance(gpu, Mapping)]
    changes = ", with changes" if record.get("dirty") else ""
    rows = [("GPUs", ", ".join(gpus) or "none"), ("CPUs usable", str(hardware.get("usable_cpus") or "n/a")),
            *((name, str(value)) for name, value in (("CPU", hardware.get("cpu_model")),
                                                     ("driver", record.get("driver"))) if value),
            ("float32 matrix products", str(flags.get("float32_matmul_precision") or "n/a")),
            ("commit", f"{record.get('commit') or 'n/a'}{changes}"),
            *((name, str(version)) for name, version in versions.items())]  # fmt: skip
    return Table(title="Where it ran", head=("what", "value"), rows=tuple(rows))


def cut(name: str, most: int = NAME_LETTERS) -> str:
    """A name with its middle left out where it is very long."""
    return name if len(name) <= most else f"{name[: most // 2]} … {name[-most // 2 + 3 :]}"
