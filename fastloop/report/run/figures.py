"""The report's pictures: the step as a bar, the GPU over time, the loss, the kernels, the ranks.

Bars are HTML of the page, curves are SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fastloop.numbers import format_number, format_short
from fastloop.records.measurement import Measurement
from fastloop.records.readings import read_ranks
from fastloop.report.drawing.bars import NUMBER_ERRORS, Bar, Chart, Entry, Row, choose_ticks
from fastloop.report.drawing.curves import Curve, Line
from fastloop.report.run.optional_tables import sort_by_size, to_finite_float
from fastloop.report.run.summary import STYLES, select_known
from fastloop.report.run.tables import cut

LINES = {
    "nvml_busy_pct": ("NVML busy", "#8f9aa5", "1 3"),
    "sm_active_pct": ("SMs active", "#2f6fb5", ""),
    "tensor_active_pct": ("tensor cores", "#d9480f", "5 3"),
    "dram_active_pct": ("DRAM", "#2a9d74", "7 3 1 3"),
}
"""Label, color and dashes of each reading."""
SECONDS = "seconds since the window began"
LOSS_POINTS = 1000
MOST_RANKS = 16


def draw(seen: Measurement) -> dict[str, Chart | Curve]:
    """Draw every picture for which the measurement has numbers; if one fails, a text says why."""
    makers: Mapping[str, Callable[[Measurement], Chart | Curve | None]] = {
        "step": chart_step,
        "gpu": trace_gpu,
        "watts": trace_watts,
        "loss": trace_loss,
        "kernels": chart_kernels,
        "ranks": chart_ranks,
    }
    made = dict[str, Chart | Curve]()
    for name, make in makers.items():
        try:
            picture = make(seen)
        except NUMBER_ERRORS as error:
            picture = Chart.missing(error)
        if picture is not None:
            made[name] = picture
    return made


# -- bars -------------------------------------------------------------------------------------------------------------


def chart_step(seen: Measurement) -> Chart | None:
    """Draw the device's timeline as one bar, the host's below it, and a legend; None if no part is known."""
    mean, parts = to_finite_float(seen.step_ms.get("mean")), select_known(seen.parts_ms)
    if mean is None or mean <= 0 or not parts:
        return None
    device = _draw_stack(parts, mean)
    end = device[-1].end if device else 0.0
    rest = mean - end if mean - end > 0.01 * mean else 0.0
    host = _draw_stack(select_known(seen.host_ms)) if seen.device != "cpu" else ()
    high = max(mean, end, *(bar.end for bar in host))
    name = "GPU" if seen.device == "cuda" else seen.device[:5].upper()
    unknown = (Bar(end, mean, style="hatched"),) if rest else ()
    rows = [Row(name=name, bars=(*device, *unknown), height=40, weight="strong")]
    if host:
        rows.append(Row(name="host", bars=host, weight="soft"))
    shown = [(STYLES[part], ms) for part, ms in parts.items() if _shows(ms, mean) or part == "data_wait"]
    legend = [
        Entry("solid", style.color, style.label, f"{format_short(ms)} ms", _format_share(ms, mean))
        for style, ms in shown
    ]
    if rest:
        legend.append(Entry("hatched", "", "not split further", f"{format_short(rest)} ms", _format_share(rest, mean)))
    shares = ", ".join(f"{style.label} {format_short(ms)} ms" for style, ms in shown if _shows(ms, mean))
    return Chart(
        alt_text=f"A step of {format_number(mean, unit='ms')}: {shares or 'not split'}.",
        rows=tuple(rows),
        high=high,
        unit=" ms",
        ticks=choose_ticks(0, high),
        legend=tuple(legend),
    )


def _shows(ms: float, mean: float) -> bool:
    """Whether a part is more than a rounding error, so that it would not read 0.0 %."""
    return abs(ms) >= 0.0005 * mean and ms != 0


def _format_share(ms: float, whole: float) -> str:
    return f"{100 * ms / whole:.1f} %"


def _draw_stack(parts: Mapping[str, float], mean: float | None = None) -> tuple[Bar, ...]:
    """Put parts side by side, with their names and their shares of ``mean`` if given."""
    made, start = list[Bar](), 0.0
    for part, ms in parts.items():
        if ms > 0:
            words = () if mean is None else (STYLES[part].label, f"{100 * ms / mean:.0f} %")
            made.append(Bar(start, start + ms, STYLES[part].color, "solid", *words))
            start += ms
    return tuple(made)


def chart_kernels(seen: Measurement) -> Chart | None:
    """Draw kernel families and idle causes of a traced step; None without a trace."""
    traced = seen.kernels or {}
    groups = [
        ("the device works on", "#2f6fb5", sort_by_size(traced.get("families_ms"))),
        ("the device is idle for", "#d9480f", sort_by_size(traced.get("idle_ms"))),
    ]
    longest = max((ms for _, _, bars in groups for _, ms in bars), default=0.0)
    if longest <= 0:
        return None
    whole, rows = to_finite_float(traced.get("step_ms")), list[Row]()
    for head, color, bars in groups:
        rows += [Row(name=head, height=0, weight="strong")] if bars else []
        for name, ms in bars:
            share = _format_share(ms, whole) if whole else ""
            rows.append(
                Row(name=cut(name, 16), bars=(Bar(0, ms, color),), value=f"{format_short(ms)} ms", detail=share)
            )
    return Chart(alt_text="Milliseconds a step of each kernel family and idle cause.", rows=tuple(rows), high=longest)


def chart_ranks(seen: Measurement) -> Chart | None:
    """Draw a bar for each rank, the slowest first if there are many; None for one rank."""
    ranks = read_ranks(seen)
    found = sorted(ranks, key=lambda rank: -(rank.mean_ms or 0.0))
    few = len(found) <= MOST_RANKS
    found = ranks if few else found[: MOST_RANKS // 2] + found[-MOST_RANKS // 2 :]
    stacks = [_draw_stack(select_known(rank.parts_ms or {})) for rank in found]
    longest = max((bar.end for stack in stacks for bar in stack), default=0.0)
    if len(found) < 2 or longest <= 0:
        return None
    wide = {bar.color for stack in stacks for bar in stack if bar.end - bar.start >= 0.01 * longest}
    rows = [
        Row(
            name=cut(f"{'n/a' if rank.rank is None else rank.rank} {rank.host or ''}", 14),
            bars=stack,
            value=f"{format_number(rank.mean_ms)} ms",
        )
        for rank, stack in zip(found, stacks, strict=True)
    ]
    return Chart(
        alt_text="The step of each rank, split into its parts.",
        rows=tuple(rows),
        high=longest,
        legend=tuple(Entry("solid", style.color, style.label) for style in STYLES.values() if style.color in wide),
        note="" if few else f"{len(found)} of {len(ranks)} ranks: the slowest and the fastest",
    )


# -- curves -----------------------------------------------------------------------------------------------------------


def trace_gpu(seen: Measurement) -> Curve | None:
    """Draw busy shares over time; None without any."""
    lines = tuple(
        Line(points, color, label, dashes)
        for name, (label, color, dashes) in LINES.items()
        if (points := _read_series(seen, name))
    )
    return Curve(lines=lines, title="% of the time", x_label=SECONDS, low=-2.0, high=102.0) if lines else None


def trace_watts(seen: Measurement) -> Curve | None:
    """Draw the board's power over time; None if it could not be read."""
    points = _read_series(seen, "watts")
    if not points:
        return None
    high = 1.05 * max(watts for _, watts in points if not math.isnan(watts)) or 1.0
    return Curve(lines=(Line(points, "#e8a317"),), title="watts", x_label=SECONDS, low=0.0, high=high, inner_height=60)


def _read_series(seen: Measurement, name: str) -> tuple[tuple[float, float], ...]:
    """Return seconds and values of one reading, NaN for gaps; empty if it was never read."""
    readings = [(to_finite_float(row.get("t_s")), to_finite_float(row.get(name))) for row in seen.timeline]
    points = [(seconds, math.nan if value is None else value) for seconds, value in readings if seconds is not None]
    return tuple(points) if any(not math.isnan(value) for _, value in points) else ()


def thin_out(values: Sequence[float]) -> list[tuple[int, float]]:
    """Return index and value of at most `LOSS_POINTS` points; NaN if any value behind a point is not finite."""
    stride = math.ceil(len(values) / LOSS_POINTS) or 1
    runs = ((start, values[start : start + stride]) for start in range(0, len(values), stride))
    return [(start, run[0] if all(map(math.isfinite, run)) else math.nan) for start, run in runs]


def trace_loss(seen: Measurement) -> Curve | None:
    """Draw the loss over optimizer steps, with crosses where it was not finite; None for fewer than two losses."""
    points = tuple((index * seen.loss_every, value) for index, value in thin_out(seen.loss))
    if len(points) < 2:
        return None
    lost = tuple((step, "#d9480f") for step, loss in points if math.isnan(loss))
    finite = [loss for _, loss in points if not math.isnan(loss)] or [0.0]
    room = 0.05 * (max(finite) - min(finite)) or 0.05 * abs(finite[0]) or 1.0
    return Curve(
        lines=(Line(points, "#2f6fb5"),),
        title=f"loss; x: not finite ({len(lost)} of {len(points)} points)" if lost else "loss",
        x_label="optimizer step",
        low=min(finite) - room * (3 if lost else 1),
        high=max(finite) + room,
        lost=lost,
    )
