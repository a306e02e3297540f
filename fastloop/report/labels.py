"""Texts in pictures: as much of one as there is room for, and colours that tell arms apart."""

from __future__ import annotations

import unicodedata

from fastloop.report.svg import printable

COLOURS = ("#8f9aa5", "#2f6fb5", "#d9480f", "#2a9d74", "#b565a7", "#e8a317", "#7c6bc4", "#8a5a3c")
MARKERS = "osD^vPX*"
_EM = 0.56
"""Width of a letter over the size of its font; of East Asian letters about twice that."""


def colour(index: int) -> str:
    """Of the arm with this index; the base, 0, is grey."""
    return COLOURS[index if index < len(COLOURS) else 1 + (index - 1) % (len(COLOURS) - 1)]


def marker(index: int) -> str:
    """A shape beside the colour, for whoever cannot tell colours apart."""
    return MARKERS[index % len(MARKERS)]


def width(text: str, size: float = 12.0) -> float:
    """About how many CSS pixels wide a text is."""
    return sum(_EM * size * _cells(letter) for letter in text)


def fit(text: str, room: float, size: float = 12.0) -> str:
    """A text that takes at most so many CSS pixels, its middle left out where it is longer."""
    text = " ".join(printable(text).split())
    if width(text, size) <= room:
        return text
    room -= width("\u2026", size)
    start, end = _taken(text, 0.6 * room, size), _taken(text[::-1], 0.4 * room, size)[::-1]
    return f"{start.rstrip()}\u2026{end.lstrip()}"


def _taken(text: str, room: float, size: float) -> str:
    """The first letters that fit."""
    taken = 0.0
    for index, letter in enumerate(text):
        taken += _EM * size * _cells(letter)
        if taken > room:
            return text[:index]
    return text


def _cells(letter: str) -> float:
    if unicodedata.combining(letter):
        return 0.0
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.75
    return 1.25 if letter.isupper() else 1.0
