"""Charts of bars as plain numbers; the page's templates draw them in HTML, so that they fit every width.

Values, places and ends are in the chart's own unit, from ``low`` at the left to ``high`` at the right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

INK = "currentColor"
NUMBER_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)
"""What numbers raise that no picture can be made of."""
Style = Literal["solid", "faint", "hatched", "interval", "whisker", "band"]


class Bar(NamedTuple):
    """One stretch of a row. Hatched is what is not known, or no claim; a whisker is an interval."""

    start: float
    end: float
    colour: str = INK
    style: Style = "solid"
    label: str = ""
    """Inside it, where there is room."""
    share: str = ""
    """Inside it, where there is less room."""


class Mark(NamedTuple):
    """A place in a row: a line from top to bottom, dashed or not, a tick or a diamond."""

    at: float
    kind: Literal["line", "dashed", "tick", "diamond"]
    colour: str = INK


class Entry(NamedTuple):
    """One line of the legend."""

    kind: Literal["solid", "hatched", "dashed", "diamond"]
    colour: str
    label: str
    value: str = ""
    share: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A name, its bars over one another, and what is said at the right."""

    name: str
    symbol: str = ""
    """Before the name, in the colour of the last bar's."""
    colour: str = INK
    bars: tuple[Bar, ...] = ()
    marks: tuple[Mark, ...] = ()
    value: str = ""
    detail: str = ""
    note: str = ""
    """Below it."""
    height: int = 16
    """CSS pixels; 0 for a row without bars."""
    weight: Literal["", "strong", "soft"] = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rows of bars over one scale."""

    alt_text: str
    rows: tuple[Row, ...]
    high: float
    low: float = 0.0
    unit: str = ""
    """Behind each tick."""
    ticks: tuple[float, ...] = ()
    legend: tuple[Entry, ...] = ()
    note: str = ""
    is_stacked: bool = False
    """Names stand above the bars where the picture is narrow."""

    @classmethod
    def missing(cls, error: Exception) -> Chart:
        """What stands in the place of a picture that could not be drawn."""
        why = f"This picture could not be drawn: {type(error).__name__}: {error}"
        return cls(alt_text=why, rows=(), high=1.0, note=why)

    def place(self, value: float) -> float:
        """Per cent of the width at which a value stands."""
        return round(min(100.0, max(0.0, 100 * (value - self.low) / (self.high - self.low))), 3)

    def size(self, bar: Bar) -> float:
        """Per cent of the width that a bar takes."""
        return round(self.place(bar.end) - self.place(bar.start), 3)


def choose_ticks(low: float, high: float, count: int = 4) -> tuple[float, ...]:
    """About so many round numbers between two values, as multiples of 1, 2 or 5 with zeros."""
    size = (high - low) / count
    power = 10.0 ** math.floor(math.log10(size))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= size * 0.999)
    return tuple(round(index * step, 12) for index in range(math.ceil(low / step), math.floor(high / step) + 1))


def choose_ink(colour: str) -> str:
    """Black or white: what can be read on a colour."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
