"""The picture of a climb: from naive to top, a step for each rung that was kept, under what a trial says is possible.

On a screen the steps rise to the right; on a phone, which has no room for that, they grow downwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.report import labels, svg
from fastloop.report.climbed import Attempt, attempts, end_rate, over_top
from fastloop.report.document import drawn
from fastloop.report.figures import Picture
from fastloop.report.summary import short
from fastloop.report.svg import Sheet

_NAIVE, _STEP, _TOP, _PREDICTED = "#8f9aa5", "#2f6fb5", "#2a9d74", "#e8a317"
_LEFT, _RIGHT, _ABOVE, _PLOT = 8.0, 152.0, 40.0, 270.0
MOST_REASONS = 12


def draw(content: Mapping[str, Any]) -> tuple[Picture, ...]:
    """The picture, wide and narrow, from the content of climb.json; nothing where no rate is known."""
    return drawn("stairs", "From naive to top", words(content), lambda width: picture(content, width))


def words(content: Mapping[str, Any]) -> str:
    """The picture in words."""
    said = [f"naive {short(end_rate(content, 'naive'))}"]
    said += [f"{step.name} {short(step.rate)}{'' if step.kept else ' (rolled back)'}" for step in attempts(content)]
    said += [f"top {short(end_rate(content, 'top'))}", *(f"{name} {short(rate)}" for name, rate in over_top(content))]
    return f"Samples per second: {', '.join(said)}."


def picture(content: Mapping[str, Any], width: float) -> Any:
    """A staircase, or rows on a phone; None where the start's rate is not known."""
    naive = end_rate(content, "naive")
    if naive is None:
        return None
    tried = attempts(content)
    top = end_rate(content, "top")
    level = _levels(naive, tried)[-1]
    make = _wide if width > 600 else _narrow
    return make(naive, tried, level if top is None else top, over_top(content), width)


def _levels(naive: float, tried: Sequence[Attempt]) -> list[float]:
    """The rate after each attempt, the start first: one that was rolled back changes nothing."""
    levels = [naive]
    for step in tried:
        levels.append(step.rate if step.kept and step.rate is not None else levels[-1])
    return levels


def _highest(naive: float, tried: Sequence[Attempt], top: float, over: Sequence[tuple[str, float]]) -> float:
    reached = [rate for step in tried for rate in (step.rate, step.predicted) if rate is not None]
    return max([naive, top, *reached, *(rate for _, rate in over)])


# -- on a screen ------------------------------------------------------------------------------------------------------


def _wide(naive: float, tried: Sequence[Attempt], top: float, over: Sequence[tuple[str, float]], width: float) -> Any:
    """Columns of equal width; the floor of each is the rate that it leaves the next one."""
    back = [step for step in tried if not step.kept]
    reasons = min(len(back), MOST_REASONS)
    floor = _ABOVE + _PLOT
    sheet = Sheet(width, floor + 72 + 19 * (reasons + (len(back) > reasons)))
    scale = _PLOT / (1.04 * _highest(naive, tried, top, over))
    column = (width - _LEFT - _RIGHT) / (len(tried) + 2)
    levels = _levels(naive, tried)
    lines = [floor - rate * scale for _, rate in over]
    for index, step in enumerate(tried):
        _column(sheet, step, (levels[index], levels[index + 1]), (_LEFT + (index + 1) * column, column), scale, lines)
    for index, (said, rate, colour) in enumerate((("naive", naive, _NAIVE), ("top", top, _TOP))):
        x = _LEFT + index * (len(tried) + 1) * column
        sheet.bar(x, floor - rate * scale, column - 2, rate * scale, colour)
        sheet.text(x + column / 2 - 1, _clear(floor - rate * scale - 9, lines), short(rate), align="center", bold=True)
        sheet.text(x + column / 2 - 1, floor + 15, said, align="center", bold=True)
    sheet.line(_LEFT, floor, width - _RIGHT, floor)
    sheet.text(0, 10, "samples per second", size=11, faint=True)
    _over(sheet, over, scale, width)
    _key(sheet, 0, floor + 54)
    for index, step in enumerate(back[:reasons]):
        _reason(sheet, step, floor + 76 + 19 * index, width)
    if len(back) > reasons:
        sheet.text(0, floor + 76 + 19 * reasons, f"and {len(back) - reasons} more, in the table", faint=True)
    return sheet.figure


def _column(sheet: Sheet, step: Attempt, levels: tuple[float, float], place: tuple[float, float],
             scale: float, lines: Sequence[float]) -> None:  # fmt: skip
    """One attempt: a step up where it was kept, a dashed one that leads nowhere where it was not."""
    x, column = place
    floor, middle = _ABOVE + _PLOT, x + column / 2 - 1
    before, after = levels
    if step.kept:
        _faint(sheet, (x, floor - before * scale), (column - 2, before * scale), _STEP)
        low, high = sorted((before, after))
        sheet.bar(x, floor - high * scale, column - 2, (high - low) * scale, _STEP)
    else:
        _faint(sheet, (x, floor - before * scale), (column - 2, before * scale), _NAIVE)
        if step.rate is not None:
            _dashed(sheet, (x, floor - step.rate * scale), (x + column - 2, floor - step.rate * scale))
    marks = [floor - rate * scale for rate in (step.rate, before) if rate is not None]
    if step.ends is not None:
        marks += [floor - end * scale for end in step.ends]
        sheet.line(middle, marks[-1], middle, marks[-2], faint=False)
    if step.predicted is not None:
        marks.append(floor - step.predicted * scale)
        _diamond(sheet, middle, marks[-1])
    if step.rate is not None:
        sheet.text(middle, _clear(min(marks) - 12, lines), short(step.rate), size=11, align="center", bold=step.kept,
                   faint=not step.kept)  # fmt: skip
    sheet.text(middle, floor + 15, labels.fit(step.name, column - 4, 11), size=11, align="center", faint=not step.kept)
    said = "n/a" if step.saved_ms is None else f"{-step.saved_ms:+,.3g} ms"
    back = "rolled back" if labels.width("rolled back", 10) < column else "back"
    sheet.text(middle, floor + 31, labels.fit(said if step.kept else back, column - 2, 10), size=10,
               align="center", faint=True)  # fmt: skip


def _clear(y: float, lines: Sequence[float]) -> float:
    """Where a text can stand at this height or above it without a ceiling through it."""
    for line in sorted(lines, reverse=True):
        if abs(y - line) < 8:
            y = line - 9
    return y


def _over(sheet: Sheet, over: Sequence[tuple[str, float]], scale: float, width: float) -> None:
    """The ceilings as lines across; their names at the right, apart even where the lines are not."""
    at = _ABOVE + _PLOT + 14.0
    for name, rate in over:
        y = _ABOVE + _PLOT - rate * scale
        at = min(y, at - 15)
        _dashed(sheet, (_LEFT, y), (width - _RIGHT + 4, y))
        sheet.text(width - _RIGHT + 8, at, f"{name} {short(rate)}", size=11, faint=True)


# -- on a phone -------------------------------------------------------------------------------------------------------


def _narrow(naive: float, tried: Sequence[Attempt], top: float, over: Sequence[tuple[str, float]], width: float) -> Any:
    """A row for each attempt: its bar begins at nothing and ends at the rate that it reached."""
    rows = [("naive", naive, _NAIVE, None), *((step.name, step.rate, _STEP, step) for step in tried),
            ("top", top, _TOP, None)]  # fmt: skip
    heights = [36 + (16 if step is not None and not step.kept else 0) for _, _, _, step in rows]
    end = 8.0 + sum(heights)
    sheet = Sheet(width, end + 20 + 17 * len(over) + 24)
    scale = (width - 16) / (1.04 * _highest(naive, tried, top, over))
    y = 8.0
    for (name, rate, colour, step), height in zip(rows, heights, strict=True):
        for _, limit in over:
            _dashed(sheet, (8 + limit * scale, y + 15), (8 + limit * scale, y + 29))
        _row(sheet, (name, rate, colour), step, y + 8, (width, scale))
        y += height
    for index, (name, rate) in enumerate(over):
        sheet.text(8, end + 14 + 17 * index, f"dashed: {name} {short(rate)}", size=11, faint=True)
    _key(sheet, 8, end + 14 + 17 * len(over))
    return sheet.figure


def _row(sheet: Sheet, told: tuple[str, float | None, str], step: Attempt | None, y: float,
         space: tuple[float, float]) -> None:  # fmt: skip
    name, rate, colour = told
    width, scale = space
    kept = step is None or step.kept
    said = short(rate)
    if step is not None and step.saved_ms is not None:
        said += f" ({-step.saved_ms:+,.3g} ms)"
    sheet.text(width - 2, y, said, size=11, align="right", bold=kept, faint=not kept)
    sheet.text(8, y, labels.fit(name, width - 24 - labels.width(said, 11)), bold=step is None, faint=not kept)
    if rate is not None:
        sheet.bar(8, y + 9, rate * scale, 10, colour, empty=not kept)
    if step is not None and step.predicted is not None:
        _diamond(sheet, 8 + step.predicted * scale, y + 14)
    if not kept and step is not None:
        sheet.text(8, y + 29, labels.fit(f"rolled back: {step.why or 'n/a'}", width - 12, 10.5), size=10.5, faint=True)


# -- marks ------------------------------------------------------------------------------------------------------------


def _faint(sheet: Sheet, corner: tuple[float, float], size: tuple[float, float], colour: str) -> None:
    from matplotlib.patches import Rectangle

    sheet.figure.axes[0].add_patch(Rectangle(corner, *size, linewidth=0, facecolor=colour, alpha=0.22))


def _dashed(sheet: Sheet, start: tuple[float, float], end: tuple[float, float]) -> None:
    (x, y), (to_x, to_y) = start, end
    sheet.figure.axes[0].plot([x, to_x], [y, to_y], "--", color=svg.INK, alpha=0.55, linewidth=1.0)


def _diamond(sheet: Sheet, x: float, y: float) -> None:
    sheet.figure.axes[0].plot([x], [y], "D", markersize=6, color=_PREDICTED, markeredgecolor=svg.INK,
                              markeredgewidth=0.6)  # fmt: skip


def _key(sheet: Sheet, x: float, y: float) -> None:
    _diamond(sheet, x + 5, y)
    sheet.text(x + 15, y, "predicted before it was tried", size=11, faint=True)


def _reason(sheet: Sheet, step: Attempt, y: float, width: float) -> None:
    said = f"{step.name}, rolled back: {step.why or 'n/a'}"
    sheet.text(0, y, labels.fit(said, width - 4), faint=True)
