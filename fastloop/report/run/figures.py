"""The report's pictures: the step as a bar, the GPU over time, the loss, the kernels, the ranks.

Bars are HTML of the page; curves are drawn for a column of a phone's width and grow with the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.records.measurement import Measurement
from fastloop.report.drawing import svg
from fastloop.report.drawing.bars import Bar, Chart, Entry, Row, choose_ticks
from fastloop.report.drawing.document import Picture
from fastloop.report.run.optional_tables import real, sort_by_size
from fastloop.report.run.ranks import read_ranks
from fastloop.report.run.summary import STYLES, number, select_known, short
from fastloop.report.run.tables import cut

LINES = {
    "nvml_busy_pct": ("NVML busy", "#8f9aa5", ":"),
    "sm_active_pct": ("SMs active", "#2f6fb5", "-"),
    "tensor_active_pct": ("tensor cores", "#d9480f", "--"),
    "dram_active_pct": ("DRAM", "#2a9d74", "-."),
}
LOSS_POINTS = 1000
TIMELINE_POINTS = 300
MOST_RANKS = 16


def draw(seen: Measurement) -> dict[str, Picture | Chart]:
    """Every picture that the measurement has numbers for. Never raises: a curve that fails says why."""
    charts = {"step": chart_step(seen), "kernels": chart_kernels(seen), "ranks": chart_ranks(seen)}
    curves = {
        "gpu": svg.draw(
            "gpu", "The GPU over time", "Utilisation in per cent and watts, once a second.", lambda: draw_gpu(seen)
        ),
        "loss": svg.draw(
            "loss", "Loss", "Loss of each optimizer step; gaps where it was no finite number.", lambda: draw_loss(seen)
        ),
    }
    return {name: made for name, made in {**charts, **curves}.items() if made is not None}


# -- bars -------------------------------------------------------------------------------------------------------------


def chart_step(seen: Measurement) -> Chart | None:
    """The device's time line as one bar, the host's below it, and a legend with every known part; None without any."""
    mean, parts = real(seen.step_ms.get("mean")), select_known(seen.parts_ms)
    if mean is None or mean <= 0 or not parts:
        return None
    device = _stack(parts, mean)
    end = device[-1].end if device else 0.0
    rest = mean - end if mean - end > 0.01 * mean else 0.0
    host = _stack(select_known(seen.host_ms)) if seen.device != "cpu" else ()
    high = max(mean, end, *(bar.end for bar in host))
    name = "GPU" if seen.device == "cuda" else seen.device[:5].upper()
    unknown = (Bar(end, mean, style="hatched"),) if rest else ()
    rows = [Row(name=name, bars=(*device, *unknown), height=40, weight="strong")]
    if host:
        rows.append(Row(name="host", bars=host, weight="soft"))
    shown = [(STYLES[part], ms) for part, ms in parts.items() if _shows(ms, mean) or part == "data_wait"]
    legend = [Entry("solid", style.colour, style.label, f"{short(ms)} ms", _share(ms, mean)) for style, ms in shown]
    if rest:
        legend.append(Entry("hatched", "", "not split further", f"{short(rest)} ms", _share(rest, mean)))
    shares = ", ".join(f"{style.label} {short(ms)} ms" for style, ms in shown if _shows(ms, mean))
    return Chart(
        alt_text=f"A step of {number(mean, unit='ms')}: {shares or 'not split'}.",
        rows=tuple(rows),
        high=high,
        unit=" ms",
        ticks=choose_ticks(0, high),
        legend=tuple(legend),
    )


def _shows(ms: float, mean: float) -> bool:
    """Whether a part is more than what adding up floating-point numbers leaves: it would not read 0.0 %."""
    return abs(ms) >= 0.0005 * mean and ms != 0


def _share(ms: float, whole: float) -> str:
    return f"{100 * ms / whole:.1f} %"


def _stack(parts: Mapping[str, float], mean: float | None = None) -> tuple[Bar, ...]:
    """Parts side by side, with their names and their shares of ``mean`` where that is given."""
    made, start = list[Bar](), 0.0
    for part, ms in parts.items():
        if ms > 0:
            words = () if mean is None else (STYLES[part].label, f"{100 * ms / mean:.0f} %")
            made.append(Bar(start, start + ms, STYLES[part].colour, "solid", *words))
            start += ms
    return tuple(made)


def chart_kernels(seen: Measurement) -> Chart | None:
    """Kernel families and idle causes of a traced step; None without a trace."""
    traced = seen.kernels or {}
    groups = [
        ("the device works on", "#2f6fb5", sort_by_size(traced.get("families_ms"))),
        ("the device is idle for", "#d9480f", sort_by_size(traced.get("idle_ms"))),
    ]
    longest = max((ms for _, _, bars in groups for _, ms in bars), default=0.0)
    if longest <= 0:
        return None
    whole, rows = real(traced.get("step_ms")), list[Row]()
    for head, colour, bars in groups:
        rows += [Row(name=head, height=0, weight="strong")] if bars else []
        for name, ms in bars:
            share = _share(ms, whole) if whole else ""
            rows.append(Row(name=cut(name, 16), bars=(Bar(0, ms, colour),), value=f"{short(ms)} ms", detail=share))
    return Chart(alt_text="Milliseconds a step of each kernel family and idle cause.", rows=tuple(rows), high=longest)


def chart_ranks(seen: Measurement) -> Chart | None:
    """A bar for each rank, the slowest first where there are many; None for one rank."""
    ranks = read_ranks(seen)
    found = sorted(ranks, key=lambda rank: -(rank.mean_ms or 0.0))
    few = len(found) <= MOST_RANKS
    found = ranks if few else found[: MOST_RANKS // 2] + found[-MOST_RANKS // 2 :]
    stacks = [_stack(select_known(rank.parts_ms or {})) for rank in found]
    longest = max((bar.end for stack in stacks for bar in stack), default=0.0)
    if len(found) < 2 or longest <= 0:
        return None
    wide = {bar.colour for stack in stacks for bar in stack if bar.end - bar.start >= 0.01 * longest}
    rows = [
        Row(
            name=cut(f"{'n/a' if rank.rank is None else rank.rank} {rank.host or ''}", 14),
            bars=stack,
            value=f"{number(rank.mean_ms)} ms",
        )
        for rank, stack in zip(found, stacks, strict=True)
    ]
    return Chart(
        alt_text="The step of each rank, split into its parts.",
        rows=tuple(rows),
        high=longest,
        legend=tuple(Entry("solid", style.colour, style.label) for style in STYLES.values() if style.colour in wide),
        note="" if few else f"{len(found)} of {len(ranks)} ranks: the slowest and the quickest",
    )


# -- curves -----------------------------------------------------------------------------------------------------------


def draw_gpu(seen: Measurement) -> Any:
    """Busy shares over time and, below, the board's power; None without a time line."""
    rows = seen.timeline[:: math.ceil(len(seen.timeline) / TIMELINE_POINTS) or 1]
    series = {name: [_gap(row.get(name)) for row in rows] for name in (*LINES, "watts")}
    live = [name for name, values in series.items() if any(map(math.isfinite, values))]
    if not live:
        return None
    figure = svg.canvas(svg.COLUMN, 290)
    seconds = [_gap(row.get("t_s")) for row in rows]
    marker = "o" if len(rows) < 3 else ""
    low = 0.36 if "watts" in live else 0.13
    if live != ["watts"]:
        axes = _panel(figure, low, 0.82 - low, "% of the time")
        axes.set(ylim=(-2, 102), yticks=(0, 25, 50, 75, 100))
        for name in [name for name in live if name in LINES]:
            label, colour, dash = LINES[name]
            axes.plot(seconds, series[name], dash, marker=marker, color=colour, label=label)
        figure.legend(loc="upper left", ncols=2, bbox_to_anchor=(0.0, 1.0), borderaxespad=0, handlelength=2.2)
    if "watts" in live:
        axes = _panel(figure, 0.12, 0.14 if live != ["watts"] else 0.7, "watts")
        axes.plot(seconds, series["watts"], marker=marker, color="#e8a317")
        axes.set_ylim(bottom=0)
    for axes in figure.axes[:-1]:
        axes.sharex(figure.axes[-1])
        axes.tick_params(labelbottom=False)
    figure.axes[-1].set_xlabel("seconds since the window began", fontsize=10, alpha=0.7)
    return figure


def _panel(figure: Any, low: float, height: float, title: str) -> Any:
    axes = figure.add_axes((0.1, low, 0.87, height))
    axes.set_title(title, loc="left", fontsize=10, alpha=0.7)
    axes.grid(axis="y")
    return axes


def _gap(value: Any) -> float:
    """A number, or NaN: a gap in the line."""
    found = real(value)
    return math.nan if found is None else found


def thin_out(values: Sequence[float], most: int = LOSS_POINTS) -> list[tuple[int, float]]:
    """Index and value of at most so many points; NaN where any value that the point stands for was no finite number."""
    stride = math.ceil(len(values) / most) or 1
    runs = ((start, values[start : start + stride]) for start in range(0, len(values), stride))
    return [(start, run[0] if all(map(math.isfinite, run)) else math.nan) for start, run in runs]


def draw_loss(seen: Measurement) -> Any:
    """The loss over optimizer steps, with a red tick where it was no finite number; None for less than two losses."""
    points = [(index * seen.loss_every, value) for index, value in thin_out(seen.loss)]
    if len(points) < 2:
        return None
    lost = [at for at, value in points if math.isnan(value)]
    figure = svg.canvas(svg.COLUMN, 290)
    axes = figure.add_axes((0.13, 0.13, 0.84, 0.78 if lost else 0.85))
    steps, values = [at for at, _ in points], [value for _, value in points]
    axes.plot(steps, values, color="#2f6fb5", marker="o" if len(points) < 40 else "", markersize=3)
    if lost:
        axes.plot(lost, [0.02] * len(lost), "|", color="#d9480f", markersize=9, transform=axes.get_xaxis_transform())
        axes.set_title(f"| not finite ({len(lost)} of {len(points)} points)", loc="left", fontsize=10, color="#d9480f")
    axes.grid(axis="y")
    axes.set_xlabel("optimizer step", fontsize=10, alpha=0.7)
    return figure
