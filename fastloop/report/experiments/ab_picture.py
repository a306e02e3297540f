"""The picture of an A/B: every run in the order it ran, and each arm's ratio with its interval.

The runs show what the machine did meanwhile: drift is a slope that all arms share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fastloop.report.drawing.bars import Bar, Chart, Mark, Row, choose_ticks
from fastloop.report.drawing.curves import Curve, Line
from fastloop.report.run.summary import short
from fastloop.report.run.tables import cut

COLOURS = ("#8f9aa5", "#2f6fb5", "#d9480f", "#2a9d74", "#b565a7", "#e8a317", "#7c6bc4", "#8a5a3c")
SYMBOLS = "\u25cf\u25a0\u25c6\u25b2\u25bc\u271a\u2716\u2605"
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


def draw(arms: Sequence[Arm], band_pct: float) -> tuple[Chart | Curve, ...]:
    """The runs and the ratios beside them; nothing without a finished run.

    Args:
        band_pct: differences within plus or minus this many per cent count as none.
    """
    return (trace_runs(arms), chart_ratios(arms, band_pct)) if any(arm.runs for arm in arms) else ()


def trace_runs(arms: Sequence[Arm]) -> Curve:
    """A symbol for each run, a line for each arm's median, a cross at the bottom for each run that failed."""
    finished = [run for arm in arms for run in arm.runs]
    lost = tuple((float(place), choose_colour(index)) for index, arm in enumerate(arms) for place in arm.lost)
    places, rates = [*(place for place, _ in finished), *(place for place, _ in lost)], [rate for _, rate in finished]
    ends, room = (min(places), max(places)), 0.12 * (max(rates) - min(rates)) or 0.05 * max(rates)
    lines = list[Line]()
    for index, arm in enumerate(arms):
        if arm.runs:
            level = median(rate for _, rate in arm.runs)
            lines.append(Line(tuple((end, level) for end in ends), choose_colour(index)))
            lines.append(Line(arm.runs, choose_colour(index), symbol=choose_symbol(index)))
    medians = ", ".join(f"{arm.name} {short(_middle(arm))} samples per second" for arm in arms)
    return Curve(
        alt_text=f"Samples per second of every run in the order they ran. Medians: {medians}.",
        lines=tuple(lines),
        title="samples per second",
        x_label=f"run, in order{'; x: failed' if lost else ''}",
        low=min(rates) - room * (2 if lost else 1),
        high=max(rates) + room,
        lost=lost,
    )


def _middle(arm: Arm) -> float | None:
    return median(rate for _, rate in arm.runs) if arm.runs else None


def choose_colour(index: int) -> str:
    """Of the arm with this index; the base, 0, is grey."""
    return COLOURS[index if index < len(COLOURS) else 1 + (index - 1) % (len(COLOURS) - 1)]


def choose_symbol(index: int) -> str:
    """A shape beside the colour, for whoever cannot tell colours apart."""
    return SYMBOLS[index % len(SYMBOLS)]


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
    colour, bars, marks = choose_colour(index), [Bar(*band, COLOURS[0], "band")], [Mark(1.0, "line")]
    if arm.ends is not None:
        bars.append(Bar(*arm.ends, colour, "hatched" if arm.ratio is None else "interval"))
    if arm.ratio is not None:
        marks.append(Mark(arm.ratio, "tick"))
    return Row(
        name=cut(arm.name, NAME_LETTERS),
        symbol=choose_symbol(index),
        colour=colour,
        bars=tuple(bars) if index else (),
        marks=tuple(marks) if index else (),
        value=arm.verdict,
        height=16 if index else 0,
        weight="strong",
    )
