"""Curves as plain numbers; the page's templates draw them as SVG that scales with its column.

Lengths are in SVG units: CSS pixels in a column of a phone's width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fastloop.report.drawing.bars import INK, choose_ticks

WIDTH, LEFT, RIGHT, LABEL = 380, 44, 8, 18
"""Width of the whole picture, the margins beside the curves, and the height of one text line above or below them."""
LEGEND_COLUMN = 92


class Line(NamedTuple):
    """Points joined by a line or, with a symbol, each shown as that character."""

    points: tuple[tuple[float, float], ...]
    """x and y; a y that is NaN is a gap."""
    color: str = INK
    label: str = ""
    """Text in the legend."""
    dashes: str = ""
    """SVG's ``stroke-dasharray``."""
    symbol: str = ""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Lines over two common axes."""

    lines: tuple[Line, ...]
    title: str
    """What the y axis shows."""
    x_label: str
    low: float
    high: float
    """The ends of the y axis."""
    lost: tuple[tuple[float, str], ...] = ()
    """x and color of crosses at the bottom: points without a y."""
    inner_height: int = 180

    @property
    def alt_text(self) -> str:
        """A description of the picture."""
        return f"{self.title} over {self.x_label}."

    @property
    def width(self) -> int:
        return WIDTH

    @property
    def top(self) -> int:
        """The height above the curves, for the title and the legend."""
        return LABEL * (2 if any(line.label for line in self.lines) else 1)

    @property
    def bottom(self) -> int:
        return self.top + self.inner_height

    @property
    def height(self) -> int:
        """The whole height, including ticks and label of the x axis below the curves."""
        return self.bottom + 2 * LABEL

    @cached_property
    def x_ends(self) -> tuple[float, float]:
        """The ends of the x axis."""
        found = [x for line in self.lines for x, _ in line.points] + [x for x, _ in self.lost]
        return (min(found), max(found)) if min(found) < max(found) else (min(found) - 1, max(found) + 1)

    def x(self, value: float) -> float:
        """Return a value's distance from the left."""
        first, last = self.x_ends
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (value - first) / (last - first), 1)

    def y(self, value: float) -> float:
        """Return a value's distance from the top."""
        return round(self.bottom - self.inner_height * (value - self.low) / (self.high - self.low), 1)

    def x_ticks(self) -> tuple[float, ...]:
        """Return whole numbers only: runs and steps have no fractions."""
        return tuple(tick for tick in choose_ticks(*self.x_ends, 5) if tick == round(tick))

    def y_ticks(self) -> tuple[float, ...]:
        return choose_ticks(self.low, self.high, 5)

    def path(self, line: Line) -> str:
        """Return a line's SVG path; a single point between two gaps becomes a dot."""
        commands, is_open = list[str](), False
        for x, y in line.points:
            if not math.isnan(y):
                commands.append(f"{'L' if is_open else 'M'}{self.x(x):g} {self.y(y):g}{'' if is_open else 'h0'}")
            is_open = not math.isnan(y)
        return "".join(commands)

    def legend(self) -> list[tuple[int, Line]]:
        """Return each line with a label, and its distance from the left."""
        return [(LEGEND_COLUMN * index, line) for index, line in enumerate(line for line in self.lines if line.label)]
