"""The picture of an A/B: all runs in order, and each arm's ratio with its interval.

The runs also show the machine's state over time: drift is a slope that all arms share.
"""

from __future__ import annotations

from statistics import median

from fastloop.numbers import format_short
from fastloop.records.experiment import ArmResult, Comparison, ExperimentResult
from fastloop.report.drawing.bars import Bar, Chart, Mark, Row, choose_ticks
from fastloop.report.drawing.curves import Curve, Line
from fastloop.report.experiments import verdict_words
from fastloop.report.run.tables import cut

COLORS = ("#8f9aa5", "#2f6fb5", "#d9480f", "#2a9d74", "#b565a7", "#e8a317", "#7c6bc4", "#8a5a3c")
SYMBOLS = "\u25cf\u25a0\u25c6\u25b2\u25bc\u271a\u2716\u2605"
NAME_LETTERS = 60


def draw(result: ExperimentResult) -> tuple[Chart | Curve, ...]:
    """Draw the runs, and the ratios next to them; empty without a finished run."""
    return (trace_runs(result), chart_ratios(result)) if any(arm.samples_per_s for arm in result.arms) else ()


def trace_runs(result: ExperimentResult) -> Curve:
    """Draw a symbol for each run, a line for each arm's median, and a cross at the bottom for each failed run."""
    ends, lines, lost = (1.0, float(len(result.order))), list[Line](), list[tuple[float, str]]()
    for index, arm in enumerate(result.arms):
        color, runs = choose_color(index), list(zip(arm.places, arm.samples_per_s, strict=False))
        if runs:
            level = median(arm.samples_per_s)
            lines.append(Line(tuple((end, level) for end in ends), color))
            lines.append(Line(tuple((place + 1, rate) for place, rate in runs), color, symbol=choose_symbol(index)))
        lost += [
            (place + 1, color)
            for place, name in enumerate(result.order)
            if name == arm.name and place not in dict(runs)
        ]
    rates = [rate for arm in result.arms for rate in arm.samples_per_s]
    room = 0.12 * (max(rates) - min(rates)) or 0.05 * max(rates)
    return Curve(
        lines=tuple(lines),
        title="samples per second",
        x_label=f"run, in order{'; x: failed' if lost else ''}",
        low=min(rates) - room * (2 if lost else 1),
        high=max(rates) + room,
        lost=tuple(lost),
    )


def choose_color(index: int) -> str:
    """Return the color of the arm with this index; the base, 0, is gray."""
    return COLORS[index if index < len(COLORS) else 1 + (index - 1) % (len(COLORS) - 1)]


def choose_symbol(index: int) -> str:
    """Return a symbol to use with the color, for readers who cannot distinguish colors."""
    return SYMBOLS[index % len(SYMBOLS)]


def chart_ratios(result: ExperimentResult) -> Chart:
    """Draw a row for each arm: its symbol and verdict, and below them its interval, on a common scale."""
    comparisons = {one.arm: one for one in result.comparisons}
    band = (1 - result.band_pct / 100, 1 + result.band_pct / 100)
    ends = [*band, *(end for one in result.comparisons for end in one.ci95 or ())]
    room = 0.06 * (max(ends) - min(ends)) or 0.05
    low, high = min(ends) - room, max(ends) + room
    rows = [_draw_ratio(arm, comparisons.get(arm.name), index, band) for index, arm in enumerate(result.arms)]
    said = "; ".join(f"{arm.name} {row.value}" for arm, row in zip(result.arms, rows, strict=True))
    return Chart(
        alt_text=f"Rate of each arm relative to the base: {said}.",
        rows=tuple(rows),
        low=low,
        high=high,
        unit="x",
        ticks=choose_ticks(low, high, 5) if len(rows) > 1 else (),
        note=f"Rate relative to the base. Shaded: within \u00b1{result.band_pct:g} %, which counts as no difference.",
        is_stacked=True,
    )


def _draw_ratio(arm: ArmResult, one: Comparison | None, index: int, band: tuple[float, float]) -> Row:
    """Draw an interval with a tick at its ratio, hatched if no ratio is claimed. The base, 0, has none."""
    color, bars, marks = choose_color(index), [Bar(*band, COLORS[0], "band")], [Mark(1.0, "line")]
    claimed = None if one is None or verdict_words.choose_word(one) == "PARITY FAILED" else one.ratio
    if one is not None and one.ci95 is not None:
        bars.append(Bar(*one.ci95, color, "hatched" if claimed is None else "interval"))
    if claimed is not None:
        marks.append(Mark(claimed, "tick"))
    return Row(
        name=cut(arm.name, NAME_LETTERS),
        symbol=choose_symbol(index),
        color=color,
        bars=tuple(bars) if index else (),
        marks=tuple(marks) if index else (),
        value=_describe(arm, one, is_base=not index),
        height=16 if index else 0,
        weight="strong",
    )


def _describe(arm: ArmResult, one: Comparison | None, *, is_base: bool) -> str:
    if arm.failed and not (one and one.ci95):
        return "FAILED"
    if is_base:
        return f"base, {format_short(median(arm.samples_per_s)) if arm.samples_per_s else 'n/a'} samples/s"
    return "not judged" if one is None else verdict_words.write_headline(one, arm).partition(",")[0]
