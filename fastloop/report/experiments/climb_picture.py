"""The picture of a climb: from naive to top, a bar for each attempted rung, and the ceilings over the top.

A kept rung's gain is solid, the rate before it is faint; an attempt that was rolled back is hatched.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastloop.numbers import format_short
from fastloop.records.climb import ClimbFile
from fastloop.report.drawing.bars import Bar, Chart, Entry, Mark, Row, choose_ticks
from fastloop.report.experiments import climb_rows
from fastloop.report.experiments.climb_rows import ClimbRow
from fastloop.report.run.tables import cut

_NAIVE, _STEP, _TOP, _PREDICTED = "#8f9aa5", "#2f6fb5", "#2a9d74", "#e8a317"
NAME_LETTERS = 40


def draw(climb: ClimbFile) -> tuple[Chart, ...]:
    """Draw the picture; empty if the start's rate is unknown."""
    naive, top = climb_rows.compute_rate(climb, climb.naive), climb_rows.compute_rate(climb, climb.top)
    if naive is None:
        return ()
    attempts = climb_rows.list_steps(climb)
    # If none was measured at the top, those of the start, which other arithmetic may exceed.
    ceilings = climb_rows.list_ceilings(climb, top=True) or climb_rows.list_ceilings(climb)
    levels = [naive]
    for step in attempts:
        levels.append(step.rate if step.kept and step.rate is not None else levels[-1])
    last = levels[-1] if top is None else top
    reached = [rate for step in attempts for rate in (step.rate, step.predicted) if rate is not None]
    limits = tuple(Mark(rate, "dashed") for _, rate in ceilings)
    rows = [
        _draw_end("naive", naive, _NAIVE, limits),
        *(_draw_attempt(step, level, limits) for step, level in zip(attempts, levels, strict=False)),
        _draw_end("top", last, _TOP, limits),
    ]
    high = 1.04 * max(naive, last, *reached, *(rate for _, rate in ceilings))
    legend = [Entry("dashed", "currentColor", name, f"{format_short(rate)} samples/s") for name, rate in ceilings]
    if any(step.predicted is not None for step in attempts):
        legend.append(Entry("diamond", _PREDICTED, "predicted before it was tried"))
    chart = Chart(
        alt_text=describe(naive, attempts, top, ceilings),
        rows=tuple(rows),
        high=high,
        ticks=choose_ticks(0, high),
        legend=tuple(legend),
        note="Samples per second. Faint: the rate before the attempt. Hatched: rolled back.",
        is_stacked=True,
    )
    return (chart,)


def describe(
    naive: float, attempts: Sequence[ClimbRow], top: float | None, ceilings: Sequence[tuple[str, float]]
) -> str:
    """Describe the picture in words."""
    tried = [f"{step.name} {format_short(step.rate)}{'' if step.kept else ' (rolled back)'}" for step in attempts]
    ends = [f"top {format_short(top)}", *(f"{name} {format_short(rate)}" for name, rate in ceilings)]
    return f"Samples per second: {', '.join([f'naive {format_short(naive)}', *tried, *ends])}."


def _draw_end(name: str, rate: float, color: str, limits: tuple[Mark, ...]) -> Row:
    return Row(name=name, bars=(Bar(0, rate, color),), marks=limits, value=format_short(rate), weight="strong")


def _draw_attempt(step: ClimbRow, before: float, limits: tuple[Mark, ...]) -> Row:
    """Draw one attempt: its actual or rolled-back gain over the rate before it, its interval, its prediction."""
    bars = [Bar(0, before, _STEP if step.kept else _NAIVE, "faint")]
    if step.rate is not None:
        low, high = sorted((before, step.rate))
        bars.append(Bar(low, high, _STEP) if step.kept else Bar(low, high, style="hatched"))
    if step.ends is not None:
        bars.append(Bar(*step.ends, style="whisker"))
    predicted = () if step.predicted is None else (Mark(step.predicted, "diamond", _PREDICTED),)
    saved = "" if step.saved_ms is None else f"{'+' if step.saved_ms < 0 else ''}{format_short(-step.saved_ms, 'ms')}"
    return Row(
        name=cut(step.name, NAME_LETTERS),
        bars=tuple(bars),
        marks=(*limits, *predicted),
        value=format_short(step.rate),
        detail=saved if step.kept else "rolled back",
        note="" if step.kept else step.why or "n/a",
        weight="" if step.kept else "soft",
    )
