"""The picture of an A/B: every run in the order it ran, and each arm's ratio with its interval.

The runs show what the machine did meanwhile: drift is a slope that all arms share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fastloop.report.drawing import labels, svg
from fastloop.report.drawing.bars import Bar, Chart, Mark, Row, choose_ticks
from fastloop.report.drawing.document import Picture
from fastloop.report.run.summary import short
from fastloop.report.run.tables import cut

_GREY = "#8f9aa5"
NAME_LETTERS = 60


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm: its runs, and what is said of it. The base is the first."""

    name: str
    runs: tuple[tuple[int, float], ...] = ()
    """Place in the order, from 1, and samples per second of each run that finished."""
    lost: tuple[int, ...] = ()
    """Places of the runs that began and gave no rate."""
    verdict: str = ""
    ratio: float | None = None
    """Over the base; None where none is claimed."""
    ends: tuple[float, float] | None = None
    """Interval of the ratio."""


def draw(arms: Sequence[Arm], band_pct: float) -> tuple[Picture | Chart, ...]:
    """The runs and the ratios beside them; nothing without a finished run.

    Args:
        band_pct: differences within plus or minus this many per cent count as none.
    """
    if not any(arm.runs for arm in arms):
        return ()
    words = f"Samples per second of every run in the order they ran. Medians: {', '.join(map(_describe, arms))}."
    runs = svg.draw("rates", "Every run, in order", words, lambda: draw_runs(arms))
    return tuple(made for made in (runs, chart_ratios(arms, band_pct)) if made is not None)


def _describe(arm: Arm) -> str:
    return f"{arm.name} {short(_middle(arm))} samples per second"


def _middle(arm: Arm) -> float | None:
    return median(rate for _, rate in arm.runs) if arm.runs else None


def draw_runs(arms: Sequence[Arm]) -> Any:
    """A dot for each run, a line for each arm's median, a cross at the bottom for each run that failed."""
    from matplotlib.ticker import MaxNLocator

    figure = svg.canvas(svg.COLUMN, 290)
    axes = figure.add_axes((0.13, 0.15, 0.84, 0.76))
    colours = [labels.choose_colour(index) for index in range(len(arms))]
    for index, arm in enumerate(arms):
        if arm.runs:
            axes.axhline(_middle(arm), color=colours[index], alpha=0.55, linewidth=1.2)
            dots = tuple(zip(*arm.runs, strict=True))
            axes.plot(*dots, labels.choose_marker(index), color=colours[index], markersize=7, clip_on=False)
        across = axes.get_xaxis_transform()
        axes.plot(arm.lost, [0.03] * len(arm.lost), "x", color=colours[index], markersize=8, transform=across)
    rates, lost = [rate for arm in arms for _, rate in arm.runs], [at for arm in arms for at in arm.lost]
    room = 0.12 * (max(rates) - min(rates)) or 0.05 * max(map(abs, rates)) or 1.0
    last = max([at for arm in arms for at, _ in arm.runs] + lost)
    axes.set(xlim=(0.4, last + 0.6), ylim=(min(rates) - room * (2 if lost else 1), max(rates) + room))
    axes.xaxis.set_major_locator(MaxNLocator(min(10, last + 1), integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.grid(axis="y")
    axes.set_title("samples per second", loc="left", fontsize=10, alpha=0.7, x=-0.02)
    axes.set_xlabel(f"run, in order{'; x: failed' if lost else ''}", fontsize=10, alpha=0.7)
    return figure


def chart_ratios(arms: Sequence[Arm], band_pct: float) -> Chart:
    """A row for each arm: its symbol and verdict, and below them its interval, over one scale for all of them."""
    band = (1 - band_pct / 100, 1 + band_pct / 100)
    ends = [*band, *(end for arm in arms if arm.ends for end in arm.ends)]
    room = 0.06 * (max(ends) - min(ends)) or 0.05
    low, high = min(ends) - room, max(ends) + room
    said = "; ".join(f"{arm.name} {arm.verdict}" for arm in arms)
    return Chart(
        alt_text=f"Rate of each arm over the base's: {said}.",
        rows=tuple(_draw_ratio(arm, index, band) for index, arm in enumerate(arms)),
        low=low,
        high=high,
        unit="x",
        ticks=choose_ticks(low, high, 5) if len(arms) > 1 else (),
        note=f"Rate over the base's. Shaded: within \u00b1{band_pct:g} %, which counts as no difference.",
        is_stacked=True,
    )


def _draw_ratio(arm: Arm, index: int, band: tuple[float, float]) -> Row:
    """An interval with a tick at its ratio; hatched where no ratio is claimed."""
    colour, bars, marks = labels.choose_colour(index), [Bar(*band, _GREY, "band")], [Mark(1.0, "line")]
    if arm.ends is not None:
        bars.append(Bar(*arm.ends, colour, "hatched" if arm.ratio is None else "interval"))
    if arm.ratio is not None:
        marks.append(Mark(arm.ratio, "tick"))
    return Row(
        name=cut(arm.name, NAME_LETTERS),
        symbol=labels.choose_symbol(index),
        colour=colour,
        bars=tuple(bars) if index else (),
        marks=tuple(marks) if index else (),
        value=arm.verdict,
        height=16 if index else 0,
        weight="strong",
    )
