"""Bar charts as plain numbers; the page's templates draw them in HTML, so that they fit every width.

Values and positions are in the chart's unit, from ``low`` at the left to ``high`` at the right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

INK = "currentColor"
NUMBER_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)
"""Exceptions from numbers that cannot be drawn."""
Style = Literal["solid", "faint", "hatched", "interval", "whisker", "band"]


class Bar(NamedTuple):
    """One segment of a row. Hatched means unknown or not claimed; a whisker is an interval."""

    start: float
    end: float
    color: str = INK
    style: Style = "solid"
    label: str = ""
    """Text inside it, if it fits."""
    share: str = ""
    """Shorter text inside it, if the label does not fit."""


class Mark(NamedTuple):
    """A mark at one position of a row: a full-height line, dashed or not, a tick or a diamond."""

    at: float
    kind: Literal["line", "dashed", "tick", "diamond"]
    color: str = INK


class Entry(NamedTuple):
    """One line of the legend."""

    kind: Literal["solid", "hatched", "dashed", "diamond"]
    color: str
    label: str
    value: str = ""
    share: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A name, its overlaid bars, and the text at the right."""

    name: str
    symbol: str = ""
    """Before the name, in the color of the last bar."""
    color: str = INK
    bars: tuple[Bar, ...] = ()
    marks: tuple[Mark, ...] = ()
    value: str = ""
    detail: str = ""
    note: str = ""
    """Text below the row."""
    height: int = 16
    """CSS pixels; 0 for a row without bars."""
    weight: Literal["", "strong", "soft"] = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rows of bars on a common scale."""

    alt_text: str
    rows: tuple[Row, ...]
    high: float
    low: float = 0.0
    unit: str = ""
    """Appended to each tick."""
    ticks: tuple[float, ...] = ()
    legend: tuple[Entry, ...] = ()
    note: str = ""
    is_stacked: bool = False
    """Put names above the bars if the picture is narrow."""

    @classmethod
    def missing(cls, error: Exception) -> Chart:
        """Return a replacement for a picture that could not be drawn."""
        why = f"This picture could not be drawn: {type(error).__name__}: {error}"
        return cls(alt_text=why, rows=(), high=1.0, note=why)

    def place(self, value: float) -> float:
        """Return a value's horizontal position in percent of the width."""
        return round(min(100.0, max(0.0, 100 * (value - self.low) / (self.high - self.low))), 3)

    def size(self, bar: Bar) -> float:
        """Return a bar's length in percent of the width."""
        return round(self.place(bar.end) - self.place(bar.start), 3)


def choose_ticks(low: float, high: float, count: int = 4) -> tuple[float, ...]:
    """Return about `count` round numbers between two values: multiples of 1, 2 or 5 times a power of ten."""
    size = (high - low) / count
    power = 10.0 ** math.floor(math.log10(size))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= size * 0.999)
    return tuple(round(index * step, 12) for index in range(math.ceil(low / step), math.floor(high / step) + 1))


def choose_ink(color: str) -> str:
    """Return black or white, whichever is readable on a color."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
