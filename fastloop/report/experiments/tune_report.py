"""A search for people: every value that was tried, the best of them, and the YAML that sets it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fastloop.records.card import Setting
from fastloop.records.experiment import Hardware
from fastloop.records.tuning import TuningFile
from fastloop.records.yaml_text import dump_on_one_line, dump_yaml
from fastloop.report.drawing import labels, svg
from fastloop.report.drawing.document import Document, Section, Table
from fastloop.report.drawing.html import draw_reports
from fastloop.report.experiments.verdict_words import describe_hardware, put_on_one_line
from fastloop.report.run.summary import short

TITLE = "Step time over the value"
PARTIAL = "PARTIAL: the search did not end"
CLOSING = "A search ranks values by step time. It proves no speed-up: that takes an A/B test."
_LINE, _BEST, _FAILED = "#2f6fb5", "#2a9d74", "#d9480f"
MOST_FAILED = 12


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One value that was tried, as it is drawn."""

    label: str
    at: float
    """Where it stands on the axis."""
    step_ms: float | None
    samples_per_s: float | None
    ok: bool
    why: str
    best: bool
    note: str
    """best, or as it is: what the training has without the rung."""


def lines(tuning: TuningFile) -> list[str]:
    """What the terminal shows, verdict first."""
    tried = make_marks(tuning)
    curve = ", ".join(f"{mark.label}{mark.note}: {short(mark.step_ms)}" for mark in tried if mark.ok)
    failed = "; ".join(f"{mark.label}: {mark.why or 'n/a'}" for mark in tried if not mark.ok)
    texts = [
        ("STEP", f"{curve} ms" if curve else ""),
        ("WHY", tuning.why),
        ("FAILED", failed),
        ("PATCH", dump_on_one_line(tuning.patch)),
        ("ON", ", ".join(_describe_machine(tuning))),
        ("FILES", tuning.run_dir),
    ]
    named = ": ".join(filter(None, [tuning.name, f"tune {tuning.what or 'n/a'}"]))
    first = f"fastloop {verdict(tuning)}   {named}{f'   {PARTIAL}' if tuning.partial else ''}"
    return put_on_one_line([first, *(f"{kind:<8} {line}" for kind, line in texts if line)])


def reports(tuning: TuningFile) -> dict[str, str]:
    """report.md and report.html."""
    return draw_reports(make_document(tuning))


def verdict(tuning: TuningFile) -> str:
    """The headline: the key and its best value, or that none is better than going without."""
    return " ".join(_split_headline(tuning))


def _split_headline(tuning: TuningFile) -> tuple[str, str]:
    key = tuning.key or tuning.what or "n/a"
    if tuning.best is not None:
        return "BEST", f"{key} = {_format(tuning.best)}"
    if tuning.partial:
        return "NOT FINISHED", key
    return ("NOTHING TO GAIN FROM" if any(mark.ok for mark in make_marks(tuning)) else "NO VALUE RAN OF"), key


def make_document(tuning: TuningFile) -> Document:
    """The whole report, for Markdown and for the page."""
    start, key = _split_headline(tuning)
    patch = tuning.patch
    return Document(
        kind="tune",
        verdict=f"{start.capitalize()} {key}",
        tone="unknown" if tuning.best is None else "good",
        lede=tuning.why or "n/a",
        lines=tuple(lines(tuning)),
        run=tuple(filter(None, [tuning.name, f"tune {tuning.what or 'n/a'}", *_describe_machine(tuning)])),
        flags=(PARTIAL,) if tuning.partial else (),
        pictures=svg.draw_wide_and_narrow("curve", TITLE, describe(tuning), lambda width: picture(tuning, width)),
        picture_title=TITLE,
        no_picture="n/a: no value was tried.",
        closing=CLOSING,
        sections=(
            Section(title="Every value that was tried", table=make_table(tuning)),
            *([Section(title="YAML patch", code=dump_yaml(dict(patch)).rstrip())] if patch else []),
        ),
    )


def describe(tuning: TuningFile) -> str:
    """The picture in words."""
    texts = [
        f"{mark.label} {short(mark.step_ms, 'ms') if mark.ok else 'failed'}{', the best' if mark.best else ''}"
        for mark in make_marks(tuning)
    ]
    return f"Milliseconds of a step for each value: {'; '.join(texts) or 'none'}."


def make_table(tuning: TuningFile) -> Table:
    """A row for each value, in the order of the axis."""
    rows = [
        (
            f"{mark.label}{mark.note}",
            short(mark.step_ms),
            short(mark.samples_per_s),
            mark.why or ("-" if mark.ok else "n/a"),
        )
        for mark in make_marks(tuning)
    ]
    return Table(
        title="Every value that was tried",
        head=("value", "step ms", "samples/s", "why"),
        rows=tuple(rows),
        numeric=(1, 2),
        note="" if rows else "n/a: no value was tried.",
    )


def make_marks(tuning: TuningFile) -> list[Mark]:
    """Every value with its place: by logarithm where they double, one after the other where they are names."""
    values = [point.value for point in tuning.points]
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    places = _places(numbers) if len(numbers) == len(values) else None
    made = []
    for index, point in enumerate(tuning.points):
        best = tuning.best is not None and point.value == tuning.best
        as_it_is = tuning.as_it_is is not None and point.value == tuning.as_it_is
        made.append(
            Mark(
                label=_format(point.value),
                at=float(index) if places is None else places[numbers[index]],
                step_ms=point.step_ms,
                samples_per_s=point.samples_per_s,
                ok=point.ok and point.step_ms is not None,
                why=point.why or "",
                best=best,
                note=" (best)" if best else " (as it is)" if as_it_is else "",
            )
        )
    return sorted(made, key=lambda mark: mark.at)


def _places(values: Sequence[float]) -> dict[float, float]:
    """Where numbers stand: log2 where each is about twice the one before (0 one place before the least), else as is."""
    above = sorted({value for value in values if value > 0})
    doubling = len(above) > 1 and min(values) >= 0 and all(later >= 1.8 * below for below, later in pairwise(above))
    if not doubling:
        return {value: value for value in values}
    return {value: math.log2(value) if value > 0 else math.log2(above[0]) - 1 for value in values}


def _format(value: Setting) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_machine(tuning: TuningFile) -> tuple[str, ...]:
    return () if tuning.hardware == Hardware() else describe_hardware(tuning.hardware)


# -- the picture ------------------------------------------------------------------------------------------------------


def picture(tuning: TuningFile, width: float) -> Any:
    """The curve, its best value marked, crosses where a value failed and their causes below; None without values."""
    tried = make_marks(tuning)
    if not tried:
        return None
    failed = [mark for mark in tried if not mark.ok]
    shown = failed[:MOST_FAILED]
    plot, below = 300.0, 19.0 * (len(shown) + (len(failed) > len(shown)))
    whole = plot + below + (8 if below else 0)
    figure = svg.canvas(width, whole)
    axes = figure.add_axes((56 / width, (whole - plot + 54) / whole, 1 - 76 / width, (plot - 86) / whole))
    _curve(axes, [mark for mark in tried if mark.ok])
    _failed(axes, failed)
    _ticks(axes, tried, width)
    axes.set_title("milliseconds of a step", loc="left", fontsize=10, alpha=0.7)
    axes.set_xlabel(labels.fit(tuning.key or tuning.what or "", width - 80, 10), fontsize=10, alpha=0.7)
    texts = [f"x {labels.fit(mark.label, 120)}: {mark.why or 'n/a'}" for mark in shown]
    if len(failed) > len(shown):
        texts.append(f"and {len(failed) - len(shown)} more, in the table")
    for index, text in enumerate(texts):
        place = 1 - (plot + 4 + 19 * index) / whole
        figure.text(0, place, labels.fit(text, width - 4), fontsize=12, va="center_baseline", alpha=0.7)
    return figure


def _curve(axes: Any, good: Sequence[Mark]) -> None:
    """The values that ran, and the best of them with its step time."""
    from matplotlib.ticker import MaxNLocator

    steps = [mark.step_ms for mark in good if mark.step_ms is not None]
    if not steps:
        axes.set(ylim=(0, 1), yticks=())
        return
    axes.plot([mark.at for mark in good], steps, "o-", color=_LINE, markersize=5)
    for mark in good:
        if mark.best:
            axes.plot([mark.at], [mark.step_ms], "o", color=_BEST, markersize=11, markeredgecolor=svg.INK)
            text = f"best: {labels.fit(mark.label, 90)}, {short(mark.step_ms, 'ms')}"
            axes.annotate(
                text,
                (mark.at, mark.step_ms),
                xytext=(0, -19),
                textcoords="offset points",
                ha=_side(axes, mark.at),
                fontsize=11,
                fontweight="bold",
            )
    room = 0.12 * (max(steps) - min(steps)) or 0.1 * max(steps) or 1.0
    low, high = min(steps) - 2.6 * room, max(steps) + room
    axes.set(ylim=(low, high), yticks=[tick for tick in MaxNLocator(7).tick_values(low, high) if tick >= 0])
    axes.set_ylim(low, high)
    axes.grid(axis="y")


def _side(axes: Any, at: float) -> str:
    """How a text over a mark is set so that it stays inside the picture."""
    low, high = axes.get_xlim()
    share = (at - low) / (high - low)
    return "left" if share < 0.25 else "right" if share > 0.75 else "center"


def _failed(axes: Any, failed: Sequence[Mark]) -> None:
    axes.plot(
        [mark.at for mark in failed],
        [0.04] * len(failed),
        "x",
        color=_FAILED,
        markersize=9,
        markeredgewidth=2,
        transform=axes.get_xaxis_transform(),
    )


def _ticks(axes: Any, tried: Sequence[Mark], width: float) -> None:
    """A tick at each value; of values that stand too close, only some are named."""
    first, last = tried[0].at, tried[-1].at
    margin = 0.06 * (last - first) or 1.0
    axes.set_xlim(first - margin, last + margin)
    scale = (width - 76) / (last - first + 2 * margin)
    room = (width - 76) / len(tried) if len(tried) < 7 else 64.0
    named: list[str] = []
    free = -math.inf
    for mark in tried:
        text = labels.fit(mark.label, max(room - 6, 24), 10)
        half = labels.measure_width(text, 10) / 2
        start = mark.at * scale - half
        named.append(text if start > free else "")
        free = max(free, start + 2 * half + 6) if named[-1] else free
    axes.set_xticks([mark.at for mark in tried], named)
