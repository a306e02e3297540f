"""The report's pictures: the step as a bar, the GPU over time, the loss, the kernels, the ranks.

Each is drawn for a column of a phone's width and grows with the page; the step is drawn twice, wide and narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastloop.measurement import PARTS, Measurement
from fastloop.report import svg
from fastloop.report.readings import by_size, mean_ms, real
from fastloop.report.summary import known, number, short
from fastloop.report.svg import Sheet
from fastloop.report.tables import LABELS, cut

COLOURS = {
    "data_wait": "#d9480f", "h2d": "#e8a317", "forward": "#74b0e4", "backward": "#2f6fb5", "optimizer": "#2a9d74",
    "comm_exposed": "#b565a7", "callbacks_logging": "#9a8b1c", "validation": "#7c6bc4", "checkpoint": "#8a5a3c",
    "epoch_gap": "#8f9aa5", "host_other": "#66717d", "unexplained": "#b9c0c7",
}  # fmt: skip
"""One colour for each part, in every picture. Warm: the device is kept waiting."""
LINES = {
    "nvml_busy_pct": ("NVML busy", "#8f9aa5", ":"), "sm_active_pct": ("SMs active", "#2f6fb5", "-"),
    "tensor_active_pct": ("tensor cores", "#d9480f", "--"), "dram_active_pct": ("DRAM", "#2a9d74", "-."),
}  # fmt: skip
COLUMN = 380
LOSS_POINTS = 1000
TIMELINE_POINTS = 300
MOST_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture, or why there is none."""

    name: str
    title: str
    markup: str = ""
    """An ``svg`` element."""
    why_not: str = ""


def draw(seen: Measurement) -> dict[str, Picture]:
    """Every picture that the measurement has numbers for. Never raises: a picture that fails says why."""
    wanted: dict[str, tuple[str, Callable[[Measurement], Any], str]] = {
        "step-wide": ("The step", lambda seen: step(seen, 900), step_words(seen)),
        "step-narrow": ("The step", lambda seen: step(seen, 340), step_words(seen)),
        "gpu": ("The GPU over time", utilisation, "Utilisation in per cent and watts, once a second."),
        "loss": ("Loss", loss, "Loss of each optimizer step; gaps where it was no finite number."),
        "kernels": ("Kernels and idle time", kernels, "Milliseconds a step of each kernel family and idle cause."),
        "ranks": ("Ranks", ranks, "The step of each rank, split into its parts."),
    }
    made = {}
    for name, (title, make, words) in wanted.items():
        try:
            with svg.style():
                figure = make(seen)
                if figure is not None:
                    made[name] = Picture(name=name, title=title, markup=svg.embed(figure, name, title, words))
        except Exception as error:  # no picture is worth a report
            made[name] = Picture(name=name, title=title, why_not=f"{type(error).__name__}: {error}")
    return made


def step_words(seen: Measurement) -> str:
    """The step's bar in words."""
    mean = seen.step_ms.get("mean")
    said = [f"{LABELS[part]} {short(ms)} ms" for part, ms in known(seen.parts_ms).items() if _shows(ms, mean)]
    return f"A step of {number(mean, unit='ms')}: {', '.join(said) or 'not split'}."


def _shows(ms: float, mean: float | None) -> bool:
    """Whether a part is more than what adding up floating-point numbers leaves: it would not read 0.0 %."""
    return abs(ms) >= 0.0005 * (mean or 0.0) and ms != 0


# -- the step ---------------------------------------------------------------------------------------------------------


def step(seen: Measurement, width: float) -> Any:
    """The device's time line as one bar, the host's beside it, and a legend with every known part; None without any."""
    mean = real(seen.step_ms.get("mean"))
    parts = known(seen.parts_ms)
    if mean is None or not math.isfinite(mean) or mean <= 0 or not parts:
        return None
    rest = mean - sum(ms for ms in parts.values() if ms > 0)
    host = {part: ms for part, ms in known(seen.host_ms).items() if ms > 0} if seen.device != "cpu" else {}
    whole = max(mean, mean - rest, sum(host.values()))
    shown = [part for part, ms in parts.items() if _shows(ms, mean) or part == "data_wait"]
    columns = 2 if width > 600 else 1
    rows = math.ceil((len(shown) + (rest > 0.01 * mean)) / columns)
    left, bars = 46.0, 72.0 if host else 46.0
    sheet = Sheet(width, bars + 40 + 24 * rows)
    scale = (width - left - 14) / whole
    sheet.text(0, 24, "GPU" if seen.device == "cuda" else seen.device[:5].upper(), bold=True)
    end = _stack(sheet, parts, left, 4, 40, scale, mean)
    if rest > 0.01 * mean:
        sheet.bar(end, 4, rest * scale, 40, "", empty=True)
    if host:
        sheet.text(0, 58, "host", faint=True)
        _stack(sheet, host, left, 50, 16, scale, None)
    _ruler(sheet, left, bars, scale, whole)
    entries = [(COLOURS[part], LABELS[part], parts[part]) for part in shown]
    _legend(sheet, entries + ([("", "not split further", rest)] if rest > 0.01 * mean else []), mean, width, columns,
            bars + 48)  # fmt: skip
    return sheet.figure


def _stack(sheet: Sheet, parts: Mapping[str, float], x: float, y: float, height: float, scale: float,
           mean: float | None) -> float:  # fmt: skip
    """Parts side by side, with their shares of ``mean`` where they have room; where the last one ends."""
    for part in PARTS:
        size = parts.get(part, 0.0) * scale
        if size <= 0:
            continue
        sheet.bar(x, y, size - 1 if size > 4 else size, height, COLOURS[part])
        if mean is not None and size >= 44:
            text = f"{100 * parts[part] / mean:.0f} %"
            named = f"{LABELS[part]}  {text}"
            sheet.text(x + size / 2, y + height / 2, named if size > 7.5 * len(named) else text, size=12.5,
                       align="center", colour=svg.on(COLOURS[part]), bold=True)  # fmt: skip
        x += size
    return x


def _ruler(sheet: Sheet, left: float, y: float, scale: float, whole: float) -> None:
    """Milliseconds below the bars."""
    tick = _round_step(whole / 4)
    for index in range(int(whole / tick) + 1):
        x = left + index * tick * scale
        sheet.line(x, y, x, y + 5)
        sheet.text(x, y + 15, f"{index * tick:g}{' ms' if index == 0 else ''}", size=10.5, faint=True,
                   align="center" if index else "left")  # fmt: skip


def _round_step(size: float) -> float:
    """The next 1, 2 or 5 with zeros."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= size * 0.999)


def _legend(sheet: Sheet, entries: Sequence[tuple[str, str, float]], mean: float, width: float, columns: int,
            top: float) -> None:  # fmt: skip
    """A swatch, a name, milliseconds and share for each part: read downwards, column after column."""
    rows = math.ceil(len(entries) / columns)
    room = (width - 28 * (columns - 1)) / columns
    for index, (colour, label, ms) in enumerate(entries):
        x, y = index // rows * (room + 28), top + 24 * (index % rows)
        sheet.bar(x, y - 6, 12, 12, colour, empty=not colour)
        sheet.text(x + 20, y, label)
        sheet.text(x + room - 62, y, f"{short(ms)} ms", align="right", bold=ms >= 0.2 * mean)
        sheet.text(x + room - 2, y, f"{100 * ms / mean:.1f} %", align="right", faint=True)


# -- over time --------------------------------------------------------------------------------------------------------


def utilisation(seen: Measurement) -> Any:
    """Busy shares over time and, below, the board's power; None without a time line."""
    rows = seen.timeline[:: math.ceil(len(seen.timeline) / TIMELINE_POINTS) or 1]
    series = {name: [_gap(row.get(name)) for row in rows] for name in (*LINES, "watts")}
    live = [name for name, values in series.items() if any(map(math.isfinite, values))]
    if not live:
        return None
    figure = svg.canvas(COLUMN, 290)
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


def thinned(values: Sequence[float], most: int = LOSS_POINTS) -> list[tuple[int, float]]:
    """Index and value of at most so many points; NaN where any value that the point stands for was no finite number."""
    stride = math.ceil(len(values) / most) or 1
    runs = ((start, values[start : start + stride]) for start in range(0, len(values), stride))
    return [(start, run[0] if all(map(math.isfinite, run)) else math.nan) for start, run in runs]


def loss(seen: Measurement) -> Any:
    """The loss over optimizer steps, with a red tick where it was no finite number; None for less than two losses."""
    points = [(index * seen.loss_every, value) for index, value in thinned(seen.loss)]
    if len(points) < 2:
        return None
    lost = [at for at, value in points if math.isnan(value)]
    figure = svg.canvas(COLUMN, 290)
    axes = figure.add_axes((0.13, 0.13, 0.84, 0.78 if lost else 0.85))
    steps, values = [at for at, _ in points], [value for _, value in points]
    axes.plot(steps, values, color="#2f6fb5", marker="o" if len(points) < 40 else "", markersize=3)
    if lost:
        axes.plot(lost, [0.02] * len(lost), "|", color="#d9480f", markersize=9, transform=axes.get_xaxis_transform())
        axes.set_title(f"| not finite ({len(lost)} of {len(points)} points)", loc="left", fontsize=10, color="#d9480f")
    axes.grid(axis="y")
    axes.set_xlabel("optimizer step", fontsize=10, alpha=0.7)
    return figure


# -- inside and between -----------------------------------------------------------------------------------------------


def kernels(seen: Measurement) -> Any:
    """Kernel families and idle causes of a traced step as bars; None without a trace."""
    traced = seen.kernels or {}
    groups = [("the device works on", "#2f6fb5", by_size(traced.get("families_ms"))),
              ("the device is idle for", "#d9480f", by_size(traced.get("idle_ms")))]  # fmt: skip
    groups = [(head, colour, bars) for head, colour, bars in groups if bars]
    longest = max((ms for _, _, bars in groups for _, ms in bars), default=0.0)
    if not longest > 0:
        return None
    whole = real(traced.get("step_ms"))
    sheet = Sheet(COLUMN, 28 * len(groups) + 22 * sum(len(bars) for _, _, bars in groups))
    y = 10.0
    for head, colour, bars in groups:
        sheet.text(0, y, head, bold=True)
        for name, ms in bars:
            y += 22
            sheet.text(0, y, cut(name, 16))
            sheet.bar(108, y - 7, max(0.5, 150 * ms / longest), 14, colour)
            sheet.text(COLUMN - 46, y, f"{short(ms)} ms", align="right", size=11)
            if whole:
                sheet.text(COLUMN - 2, y, f"{100 * ms / whole:.1f} %", align="right", size=11, faint=True)
        y += 28
    return sheet.figure


def ranks(seen: Measurement) -> Any:
    """A bar for each rank, the slowest first where there are many; None for one rank."""
    found = sorted(seen.ranks, key=lambda rank: -(mean_ms(rank) or 0.0))
    few = len(found) <= MOST_RANKS
    found = list(seen.ranks) if few else found[: MOST_RANKS // 2] + found[-MOST_RANKS // 2 :]
    split = [{part: ms for part, ms in known(rank.get("parts_ms") or {}).items() if ms > 0} for rank in found]
    longest = max((sum(parts.values()) for parts in split), default=0.0)
    if len(found) < 2 or not longest > 0:
        return None
    shown = [part for part in PARTS if any(parts.get(part, 0.0) >= 0.01 * longest for parts in split)]
    sheet = Sheet(COLUMN, 24 * len(found) + 22 * (math.ceil(len(shown) / 2) + (not few)) + 12)
    for index, (rank, parts) in enumerate(zip(found, split, strict=True)):
        y = 12 + 24 * index
        sheet.text(0, y, cut(f"{rank.get('rank')} {rank.get('host') or ''}", 14))
        _stack(sheet, parts, 100, y - 8, 16, 210 / longest, None)
        sheet.text(COLUMN, y, f"{number(mean_ms(rank))} ms", align="right", size=11)
    for index, part in enumerate(shown):
        x, y = index % 2 * COLUMN / 2, 24 * len(found) + 16 + 22 * (index // 2)
        sheet.bar(x, y - 5, 10, 10, COLOURS[part])
        sheet.text(x + 16, y, LABELS[part], size=11)
    if not few:
        said = f"{len(found)} of {len(seen.ranks)} ranks: the slowest and the quickest"
        sheet.text(0, 24 * len(found) + 16 + 22 * math.ceil(len(shown) / 2), said, size=11, faint=True)
    return sheet.figure
