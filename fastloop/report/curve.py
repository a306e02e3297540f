"""A search for people: every value that was tried, the best of them, and the YAML that sets it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fastloop.report import document, labels, svg
from fastloop.report.document import Document, Section, drawn, entries, flat, machine, part
from fastloop.report.readings import real
from fastloop.report.summary import short, yaml_patch
from fastloop.report.tables import Table
from fastloop.yamlfile import dump_yaml

CLOSING = "One search orders values by step time. It proves no speed-up: that takes an A/B over several runs."
_LINE, _BEST, _FAILED = "#2f6fb5", "#2a9d74", "#d9480f"
MOST_FAILED = 12


@dataclass(frozen=True)
class Point:
    """One value that was tried."""

    said: str
    at: float
    """Where it stands on the axis."""
    step_ms: float | None
    ok: bool
    why: str
    best: bool
    note: str
    """best, or as it is: what the training has without the rung."""


def lines(content: Mapping[str, Any]) -> list[str]:
    """What the terminal shows, verdict first, of tune.json's content."""
    tried = points(content)
    curve = ", ".join(f"{point.said}{point.note}: {short(point.step_ms)}" for point in tried if point.ok)
    lost = "; ".join(f"{point.said}: {point.why or 'n/a'}" for point in tried if not point.ok)
    told = [("STEP", f"{curve} ms" if curve else ""), ("WHY", str(content.get("why") or "")), ("FAILED", lost),
            ("PATCH", yaml_patch(part(content, "patch"))), ("ON", _machine(content)),
            ("FILES", str(content.get("run_dir") or ""))]  # fmt: skip
    partial = "   PARTIAL: the search did not end" if content.get("partial") else ""
    named = ": ".join(filter(None, [str(content.get("name") or ""), f"tune {content.get('what') or 'n/a'}"]))
    first = f"fastloop {verdict(content)}   {named}{partial}"
    return flat([first, *(f"{kind:<8} {line}" for kind, line in told if line)])


def reports(content: Mapping[str, Any]) -> dict[str, str]:
    """report.md and report.html, of tune.json's content."""
    return document.reports(told(content))


def verdict(content: Mapping[str, Any]) -> str:
    """The headline: the key and its best value, or that none is better than going without."""
    return " ".join(_headline(content))


def _headline(content: Mapping[str, Any]) -> tuple[str, str]:
    key = str(content.get("key") or content.get("what") or "n/a")
    if content.get("best") is not None:
        return "BEST", f"{key} = {_said(content['best'])}"
    if content.get("partial"):
        return "NOT FINISHED", key
    return ("NOTHING TO GAIN FROM" if any(point.ok for point in points(content)) else "NO VALUE RAN OF"), key


def told(content: Mapping[str, Any]) -> Document:
    """The whole report, for Markdown and for the page."""
    patch, found = part(content, "patch"), content.get("best") is not None
    start, key = _headline(content)
    hardware = part(content, "hardware")
    return Document(
        kind="tune", verdict=f"{start.capitalize()} {key}", tone="good" if found else "unknown",
        lede=str(content.get("why") or "n/a"), lines=tuple(lines(content)),
        run=tuple(filter(None, [str(content.get("name") or ""), f"tune {content.get('what') or 'n/a'}",
                                *(machine(hardware) if hardware else ())])),
        flags=("PARTIAL: the search did not end",) if content.get("partial") else (),
        pictures=drawn("curve", "Step time over the value", words(content), lambda width: picture(content, width)),
        picture_title="Step time over the value", no_picture="n/a: no value was tried.", closing=CLOSING,
        sections=(Section(title="Every value that was tried", table=table(content)),
                  *([Section(title="YAML patch", code=dump_yaml(dict(patch)).rstrip())] if patch else [])),
    )  # fmt: skip


def words(content: Mapping[str, Any]) -> str:
    """The picture in words."""
    said = [f"{point.said} {short(point.step_ms, 'ms') if point.ok else 'failed'}{', the best' if point.best else ''}"
            for point in points(content)]  # fmt: skip
    return f"Milliseconds of a step for each value: {'; '.join(said) or 'none'}."


def table(content: Mapping[str, Any]) -> Table:
    """A row for each value, in the order of the axis."""
    rates = {_said(entry.get("value")): real(entry.get("samples_per_s")) for entry in entries(content, "points")}
    rows = [(f"{point.said}{point.note}", short(point.step_ms), short(rates[point.said]),
             point.why or ("-" if point.ok else "n/a")) for point in points(content)]  # fmt: skip
    return Table(title="Every value that was tried", head=("value", "step ms", "samples/s", "why"), rows=tuple(rows),
                 numeric=(1, 2), note="" if rows else "n/a: no value was tried.")  # fmt: skip


def points(content: Mapping[str, Any]) -> list[Point]:
    """Every value with its place: by logarithm where they double, one after the other where they are names."""
    tried, as_it_is = entries(content, "points"), [content[key] for key in ("as_it_is",) if key in content]
    values = [real(entry.get("value")) for entry in tried]
    known = [value for value in values if value is not None]
    places = _places(known) if len(known) == len(values) else None
    made = []
    for index, (entry, value) in enumerate(zip(tried, values, strict=True)):
        step = real(entry.get("step_ms"))
        best = content.get("best") is not None and entry.get("value") == content["best"]
        at = float(index) if places is None or value is None else places[value]
        made.append(Point(
            said=_said(entry.get("value")), at=at, step_ms=step, ok=entry.get("ok") is not False and step is not None,
            why=str(entry.get("why") or ""),
            best=best, note=" (best)" if best else " (as it is)" if entry.get("value") in as_it_is else "",
        ))  # fmt: skip
    return sorted(made, key=lambda point: point.at)


def _places(values: Sequence[float]) -> dict[float, float]:
    """Where numbers stand: log2 where each is about twice the one before (0 one place before the least), else as is."""
    above = sorted({value for value in values if value > 0})
    doubling = len(above) > 1 and min(values) >= 0 and all(later >= 1.8 * below for below, later in pairwise(above))
    if not doubling:
        return {value: value for value in values}
    return {value: math.log2(value) if value > 0 else math.log2(above[0]) - 1 for value in values}


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _machine(content: Mapping[str, Any]) -> str:
    hardware = part(content, "hardware")
    return ", ".join(machine(hardware)) if hardware else ""


# -- the picture ------------------------------------------------------------------------------------------------------


def picture(content: Mapping[str, Any], width: float) -> Any:
    """The curve, its best value marked, crosses where a value failed and their causes below; None without values."""
    tried = points(content)
    if not tried:
        return None
    lost = [point for point in tried if not point.ok]
    shown = lost[:MOST_FAILED]
    plot, below = 300.0, 19.0 * (len(shown) + (len(lost) > len(shown)))
    sheet = svg.Sheet(width, plot + below + (8 if below else 0))
    whole = plot + below + (8 if below else 0)
    axes = sheet.figure.add_axes((56 / width, (whole - plot + 54) / whole, 1 - 76 / width, (plot - 86) / whole))
    _curve(axes, [point for point in tried if point.ok])
    _failed(axes, lost)
    _ticks(axes, tried, width)
    axes.set_title("milliseconds of a step", loc="left", fontsize=10, alpha=0.7)
    axes.set_xlabel(labels.fit(str(content.get("key") or content.get("what") or ""), width - 80, 10), fontsize=10,
                    alpha=0.7)  # fmt: skip
    for index, point in enumerate(shown):
        said = f"x {labels.fit(point.said, 120)}: {point.why or 'n/a'}"
        sheet.text(0, plot + 4 + 19 * index, labels.fit(said, width - 4), faint=True)
    if len(lost) > len(shown):
        sheet.text(0, plot + 4 + 19 * len(shown), f"and {len(lost) - len(shown)} more, in the table", faint=True)
    return sheet.figure


def _curve(axes: Any, good: Sequence[Point]) -> None:
    """The values that ran, and the best of them with its step time."""
    from matplotlib.ticker import MaxNLocator

    steps = [point.step_ms for point in good if point.step_ms is not None]
    if not steps:
        axes.set(ylim=(0, 1), yticks=())
        return
    axes.plot([point.at for point in good], steps, "o-", color=_LINE, markersize=5)
    for point in good:
        if point.best:
            axes.plot([point.at], [point.step_ms], "o", color=_BEST, markersize=11, markeredgecolor=svg.INK)
            said = f"best: {labels.fit(point.said, 90)}, {short(point.step_ms, 'ms')}"
            axes.annotate(said, (point.at, point.step_ms), xytext=(0, -19), textcoords="offset points",
                          ha=_side(axes, point.at), fontsize=11, fontweight="bold")  # fmt: skip
    room = 0.12 * (max(steps) - min(steps)) or 0.1 * max(steps) or 1.0
    low, high = min(steps) - 2.6 * room, max(steps) + room
    axes.set(ylim=(low, high), yticks=[tick for tick in MaxNLocator(7).tick_values(low, high) if tick >= 0])
    axes.set_ylim(low, high)
    axes.grid(axis="y")


def _side(axes: Any, at: float) -> str:
    """How a text over a point is set so that it stays inside the picture."""
    low, high = axes.get_xlim()
    share = (at - low) / (high - low)
    return "left" if share < 0.25 else "right" if share > 0.75 else "center"


def _failed(axes: Any, lost: Sequence[Point]) -> None:
    axes.plot([point.at for point in lost], [0.04] * len(lost), "x", color=_FAILED, markersize=9, markeredgewidth=2,
              transform=axes.get_xaxis_transform())  # fmt: skip


def _ticks(axes: Any, tried: Sequence[Point], width: float) -> None:
    """A tick at each value; of values that stand too close, only some are named."""
    first, last = tried[0].at, tried[-1].at
    margin = 0.06 * (last - first) or 1.0
    axes.set_xlim(first - margin, last + margin)
    scale = (width - 76) / (last - first + 2 * margin)
    room = (width - 76) / len(tried) if len(tried) < 7 else 64.0
    named: list[str] = []
    free = -math.inf
    for point in tried:
        text = labels.fit(point.said, max(room - 6, 24), 10)
        half = labels.width(text, 10) / 2
        start = point.at * scale - half
        named.append(text if start > free else "")
        free = max(free, start + 2 * half + 6) if named[-1] else free
    axes.set_xticks([point.at for point in tried], named)
