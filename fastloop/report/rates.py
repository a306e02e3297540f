"""The picture of an A/B: every run in the order it ran, and each arm's ratio with its interval.

The runs show what the machine did meanwhile: drift is a slope that all arms share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fastloop.report import judged, labels, svg
from fastloop.report.document import drawn, entries
from fastloop.report.figures import Picture
from fastloop.report.readings import real
from fastloop.report.summary import short
from fastloop.report.svg import Sheet

ROW = 46.0
_GREY = "#8f9aa5"


@dataclass(frozen=True)
class Dots:
    """One arm's finished runs."""

    name: str
    colour: str
    marker: str
    points: tuple[tuple[int, float], ...]
    """Place in the order, from 1, and samples per second."""


def draw(content: Mapping[str, Any]) -> tuple[Picture, ...]:
    """The picture, wide and narrow, from the content of comparison.json; nothing without a finished run."""
    return drawn("rates", "Every run, and what they say", words(content), lambda width: picture(content, width))


def words(content: Mapping[str, Any]) -> str:
    """The picture in words."""
    said = [f"{arm.name} {short(_middle(arm))} samples per second" for arm in dots(content)]
    said += [f"{comparison.get('arm')} over the base {judged.between(comparison)}"
             for comparison in entries(content, "comparisons")]  # fmt: skip
    return f"Samples per second of every run in the order they ran. Medians: {', '.join(said) or 'none'}."


def dots(content: Mapping[str, Any]) -> list[Dots]:
    """The arms with the runs that have both a rate and a place."""
    made = []
    for index, arm in enumerate(entries(content, "arms")):
        pairs = zip(arm.get("places") or (), arm.get("samples_per_s") or (), strict=False)
        found = [(real(place), real(rate)) for place, rate in pairs]
        points = tuple((int(place) + 1, rate) for place, rate in found if place is not None and rate is not None)
        made.append(Dots(str(arm.get("name")), labels.colour(index), labels.marker(index), points))
    return made


def lost(content: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Place, from 1, and index of the arm of each run that began and gave no rate."""
    names = [arm.name for arm in dots(content)]
    there = {place for arm in dots(content) for place, _ in arm.points}
    order = enumerate(content.get("order") or (), start=1)
    return [(place, names.index(name)) for place, name in order if place not in there and name in names]


def picture(content: Mapping[str, Any], width: float) -> Any:
    """Runs on the left and ratios on the right, or below each other on a phone; None without a finished run."""
    arms = dots(content)
    if not any(arm.points for arm in arms):
        return None
    wide = width > 600
    below = 30 + ROW * len(arms) + 46
    height = max(290.0, below) if wide else 252 + below
    sheet = Sheet(width, height)
    _runs(sheet, arms, lost(content), (52, 30, (0.5 if wide else 1) * width - 62, (height if wide else 262) - 70))
    left = 0.5 * width + 24 if wide else 8.0
    _ratios(sheet, content, arms, (left, 0 if wide else 256, width - left - 8))
    return sheet.figure


def _middle(arm: Dots) -> float | None:
    return median(rate for _, rate in arm.points) if arm.points else None


def _axes(sheet: Sheet, x: float, y: float, width: float, height: float) -> Any:
    """Axes in a rectangle of CSS pixels, y downwards."""
    across, down = (72 * inches for inches in sheet.figure.get_size_inches())
    return sheet.figure.add_axes((x / across, 1 - (y + height) / down, width / across, height / down))


def _runs(sheet: Sheet, arms: Sequence[Dots], gone: Sequence[tuple[int, int]],
          place: tuple[float, float, float, float]) -> None:  # fmt: skip
    """A dot for each run, a line for each arm's median, a cross at the bottom for each run that failed."""
    from matplotlib.ticker import MaxNLocator

    axes = _axes(sheet, *place)
    for arm in arms:
        if arm.points:
            axes.axhline(_middle(arm), color=arm.colour, alpha=0.55, linewidth=1.2)
            axes.plot(*zip(*arm.points, strict=True), arm.marker, color=arm.colour, markersize=7, clip_on=False)
    for at, index in gone:
        axes.plot([at], [0.03], "x", color=arms[index].colour, markersize=8, markeredgewidth=2, clip_on=False,
                  transform=axes.get_xaxis_transform())  # fmt: skip
    rates = [rate for arm in arms for _, rate in arm.points]
    room = 0.12 * (max(rates) - min(rates)) or 0.05 * max(map(abs, rates)) or 1.0
    last = max([at for arm in arms for at, _ in arm.points] + [at for at, _ in gone])
    axes.set(xlim=(0.4, last + 0.6), ylim=(min(rates) - room * (2 if gone else 1), max(rates) + room))
    axes.xaxis.set_major_locator(MaxNLocator(min(10, last + 1), integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.grid(axis="y")
    axes.set_title("samples per second", loc="left", fontsize=10, alpha=0.7, x=-0.02)
    axes.set_xlabel(f"run, in the order they ran{'; x: failed' if gone else ''}", fontsize=10, alpha=0.7)


def _ratios(sheet: Sheet, content: Mapping[str, Any], arms: Sequence[Dots],
            place: tuple[float, float, float]) -> None:  # fmt: skip
    """A row for each arm, which names its colour; below the name its interval, over one scale for all of them."""
    x, y, width = place
    told = {str(comparison.get("arm")): comparison for comparison in entries(content, "comparisons")}
    failed = {str(arm.get("name")): arm for arm in entries(content, "arms")}
    low, high = _span([judged.interval(comparison) for comparison in told.values()], judged.band_pct(content))
    scale = width / (high - low)
    if len(arms) > 1:
        _ticks(sheet, (x, y + 26 + ROW * len(arms)), low, scale, high, judged.band_pct(content))
    for index, arm in enumerate(arms):
        at = y + 36 + ROW * index
        _named(sheet, arm, (x, at, width), _verdict(index, arm, told.get(arm.name), failed[arm.name]))
        if arm.name in told and index:
            _band(sheet, (x, at + 20), low, scale, judged.band_pct(content))
            _interval(sheet, arm, told[arm.name], (x, at + 20), low, scale)


def _verdict(index: int, arm: Dots, comparison: Mapping[str, Any] | None, entry: Mapping[str, Any]) -> str:
    if entry.get("failed") and not (comparison and judged.interval(comparison)):
        return "FAILED"
    if not index:
        return f"base, {short(_middle(arm))} samples/s"
    if comparison is None:
        return "not judged"
    return judged.headline(comparison, entry).partition(",")[0]


def _named(sheet: Sheet, arm: Dots, place: tuple[float, float, float], verdict: str) -> None:
    """The arm's shape and colour, its name, and at the right what is said of it."""
    x, y, width = place
    axes = sheet.figure.axes[0]
    axes.plot([x + 6], [y], arm.marker, color=arm.colour, markersize=7)
    sheet.text(x + width, y, verdict, align="right", bold=True)
    sheet.text(x + 18, y, labels.fit(arm.name, width - 26 - labels.width(verdict)))


def _span(found: Sequence[tuple[float, float] | None], band_pct: float) -> tuple[float, float]:
    """The ends of the scale: every interval and the band around 1, with some room."""
    ends = [end for ends in found if ends for end in ends]
    low, high = min([1 - band_pct / 100, *ends]), max([1 + band_pct / 100, *ends])
    room = 0.06 * (high - low) or 0.05
    return low - room, high + room


def _ticks(sheet: Sheet, place: tuple[float, float], low: float, scale: float, high: float,
           band_pct: float) -> None:  # fmt: skip
    """The ruler that all rows share."""
    from matplotlib.ticker import MaxNLocator

    x, y = place
    sheet.line(x, y, x + (high - low) * scale, y)
    for tick in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high):
        if low <= tick <= high:
            at = x + (tick - low) * scale
            sheet.line(at, y, at, y + 5)
            sheet.text(at, y + 15, f"{tick:.4g}x", size=10.5, faint=True, align="center")
    sheet.text(x, y + 33, f"rate over the base's; shaded: within {band_pct:g} %", size=10.5, faint=True)


def _band(sheet: Sheet, place: tuple[float, float], low: float, scale: float, band_pct: float) -> None:
    """What counts as no difference, and 1 in its middle."""
    x, y = place
    one, half = x + (1 - low) * scale, band_pct / 100 * scale
    sheet.figure.axes[0].fill_between([one - half, one + half], y - 11, y + 11, color=_GREY, alpha=0.25, linewidth=0)
    sheet.line(one, y - 11, one, y + 11, faint=False)


def _interval(sheet: Sheet, arm: Dots, comparison: Mapping[str, Any], place: tuple[float, float], low: float,
              scale: float) -> None:  # fmt: skip
    """From one end to the other, with a mark at the ratio; hatched where it is no claim."""
    x, y = place
    ends, ratio = judged.interval(comparison), real(comparison.get("ratio"))
    if ends is None:
        return
    start, size = x + (ends[0] - low) * scale, max(2.0, (ends[1] - ends[0]) * scale)
    claimed = judged.word(comparison) != "PARITY FAILED"
    sheet.bar(start, y - 4, size, 8, arm.colour, empty=not claimed)
    if ratio is not None and claimed:
        sheet.bar(x + (ratio - low) * scale - 1.5, y - 8, 3, 16, svg.INK)
