"""The report's tables as plain texts, made once and rendered twice: as Markdown and as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastloop.numbers import format_number, format_s, format_short
from fastloop.records.measurement import PARTS, Measurement
from fastloop.records.plan import Verdict
from fastloop.records.run_files import Environment, Machine, TorchFlags
from fastloop.report.drawing.document import Table
from fastloop.report.run import summary
from fastloop.report.run.summary import STYLES

NAME_LETTERS = 120
"""A kernel's name is a whole C++ template; measurement.json has the full name."""


def tabulate_step(seen: Measurement) -> Table:
    """Tabulate the step as a whole: time, spread, rate, memory, the cost of watching."""
    times = seen.step_ms
    spread = f"{format_number(times.get('p10'), ',.3f')} to {format_number(times.get('p90'), ',.3f')}"
    unsure = ", too short to be reliable" if seen.window_too_short else ""
    counted = "n/a" if seen.total_steps is None else f"{seen.steps} of {seen.total_steps}{unsure}"
    rows = [
        ("steps in the window", counted),
        ("ended", "early: the fit did not end normally, so these figures are partial" if seen.partial else "normally"),
        ("step time, mean", format_number(times.get("mean"), ",.3f", "ms")),
        ("median (p10 to p90)", f"{format_number(times.get('median'), ',.3f', 'ms')} ({spread})"),
        ("of that, waiting for data", format_number(seen.parts_ms.get("data_wait"), ",.3f", "ms")),
        ("samples per second, all ranks", format_number(seen.samples_per_s)),
        ("samples per step, all ranks", format_number(seen.global_batch, ",d")),
        ("samples per loader batch, one rank", format_number(seen.micro_batch, ",d")),
        ("precision", seen.precision or "n/a"),
        ("devices", summary.describe_devices(seen)),
        ("host runs ahead of the device by", format_number(seen.lead_ms, ",.2f", "ms")),
        ("device work still queued when the host has issued a step", format_number(seen.trail_ms, ",.2f", "ms")),
        ("host blocked in forward, backward, optimizer", format_number(seen.blocked_ms, ",.2f", "ms")),
        ("peak device memory", format_number(seen.peak_gib, ",.2f", "GiB")),
        ("watching cost", format_number(seen.watch_us_per_step, unit="us a step")),
    ]
    return Table("The step", ("what", "value"), rows)


def tabulate_parts(seen: Measurement) -> Table:
    """Tabulate the parts of the step: device time, its share, and the host's durations in a separate column."""
    mean = seen.step_ms.get("mean")
    rows = [
        (
            STYLES[part].label,
            format_number(seen.parts_ms.get(part), ",.3f"),
            format_percent(seen.parts_ms.get(part), mean),
            format_number(seen.host_ms.get(part), ",.3f"),
        )
        for part in PARTS
    ]
    found = summary.select_known(seen.parts_ms)
    if found:
        total = sum(found.values())
        name = "the step" if "unexplained" in found else "sum of the known parts"
        rows.append((name, format_number(total, ",.3f"), format_percent(total, mean), "-"))
    note = (
        "Means per optimizer step. The first column adds up to the step on the device's timeline; host times overlap"
        " it and are never added to it."
    )
    return Table(
        "The parts of the step", ("part", "device ms", "% of step", "host ms"), rows, numeric=(1, 2, 3), note=note
    )


def format_percent(part: float | None, whole: float | None) -> str:
    """Format a part as a percentage of the whole."""
    if part is None or whole is None or not whole > 0:
        return "n/a"
    return format_number(100 * part / whole)


def tabulate_one_time(seen: Measurement) -> Table:
    """Tabulate the one-time costs of the whole fit in seconds, without those too small to name."""
    rows = [
        (cause, format_s(seconds))
        for cause, seconds in summary.list_one_time(seen)
        if seconds is None or seconds >= summary.WORTH_A_WORD_S
    ]
    again = (seen.evidence.get("compilation") or {}).get("ms_per_step")
    note = "Of the whole fit, warm-up included. Not included in any figure of the step."
    if again is not None:
        ms = format_short(again, "ms")
        note = f"Compiling continued during the timed steps and took {ms} of each (host, other)."
    return Table("One-time costs", ("cause", "seconds"), rows, numeric=(1,), note=note)


def tabulate_rungs(verdicts: Sequence[Verdict]) -> Table:
    took = {True: "yes", False: "no", None: "unknown"}
    rows = [(verdict.rung, took[verdict.took], verdict.why, verdict.parity_class) for verdict in verdicts]
    return Table(
        "Rungs", ("rung", "took", "evidence", "parity class"), rows, note="" if rows else "None is switched on."
    )


def describe_losses(seen: Measurement) -> tuple[str, ...]:
    """Describe the loss in a sentence, with a warning if some values are not finite."""
    if not seen.loss:
        return ("n/a",)
    if len(seen.loss) == 1:
        return (f"{format_number(seen.loss[0], '.4f')} (1 point in measurement.json)",)
    fifth = max(1, len(seen.loss) // 5)
    lost = sum(not math.isfinite(loss) for loss in seen.loss)
    every = "" if seen.loss_every <= 1 else f", one of every {seen.loss_every} steps"
    trend = (
        f"mean of the first fifth {_format_mean(seen.loss[:fifth])},"
        f" of the last fifth {_format_mean(seen.loss[-fifth:])}"
        f" ({len(seen.loss)} points in measurement.json{every})"
    )
    return (trend, f"{lost} of them are not finite numbers.") if lost else (trend,)


def _format_mean(values: Sequence[float]) -> str:
    return format_number(sum(values) / len(values), ".4f")


def tabulate_environment(record: Environment) -> Table:
    hardware, flags = record.hardware or Machine(), record.torch_flags or TorchFlags()
    named = (("CPU", hardware.cpu_model), ("driver", record.driver))
    changes = ", with changes" if record.dirty else ""
    rows = [
        ("GPUs", ", ".join(gpu.name or "n/a" for gpu in hardware.gpus) or "none"),
        ("CPUs usable", str(hardware.usable_cpus or "n/a")),
        *((name, value) for name, value in named if value),
        ("float32 matrix products", flags.float32_matmul_precision or "n/a"),
        ("commit", f"{record.commit or 'n/a'}{changes}"),
        *((name, str(version)) for name, version in (record.versions or {}).items()),
    ]
    return Table("Where it ran", ("what", "value"), rows)


def cut(name: str, most: int = NAME_LETTERS) -> str:
    """Shorten a very long name by leaving out its middle."""
    return name if len(name) <= most else f"{name[: most // 2]} … {name[-most // 2 + 3 :]}"
