"""Texts in pictures: as much of one as there is room for, and colours that tell arms apart."""

from __future__ import annotations

import unicodedata

from fastloop.report.drawing.svg import printable

COLOURS = ("#8f9aa5", "#2f6fb5", "#d9480f", "#2a9d74", "#b565a7", "#e8a317", "#7c6bc4", "#8a5a3c")
MARKERS = "osD^vPX*"
SYMBOLS = "\u25cf\u25a0\u25c6\u25b2\u25bc\u271a\u2716\u2605"
"""The markers as letters."""
_EM = 0.56
"""Width of a letter over the size of its font; of East Asian letters about twice that."""


def choose_colour(index: int) -> str:
    """Of the arm with this index; the base, 0, is grey."""
    return COLOURS[index if index < len(COLOURS) else 1 + (index - 1) % (len(COLOURS) - 1)]


def choose_marker(index: int) -> str:
    """A shape beside the colour, for whoever cannot tell colours apart."""
    return MARKERS[index % len(MARKERS)]


def choose_symbol(index: int) -> str:
    """The same shape as a letter."""
    return SYMBOLS[index % len(SYMBOLS)]


def measure_width(text: str, size: float = 12.0) -> float:
    """About how many CSS pixels wide a text is."""
    return sum(_EM * size * _count_cells(letter) for letter in text)


def fit(text: str, room: float, size: float = 12.0) -> str:
    """A text that takes at most so many CSS pixels, its middle left out where it is longer."""
    text = " ".join(printable(text).split())
    if measure_width(text, size) <= room:
        return text
    room -= measure_width("\u2026", size)
    start, end = _take(text, 0.6 * room, size), _take(text[::-1], 0.4 * room, size)[::-1]
    return f"{start.rstrip()}\u2026{end.lstrip()}"


def _take(text: str, room: float, size: float) -> str:
    """The first letters that fit."""
    taken = 0.0
    for index, letter in enumerate(text):
        taken += _EM * size * _count_cells(letter)
        if taken > room:
            return text[:index]
    return text


def _count_cells(letter: str) -> float:
    if unicodedata.combining(letter):
        return 0.0
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.75
    return 1.25 if letter.isupper() else 1.0
