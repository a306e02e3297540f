"""What a report says, put together once and drawn twice: as Markdown and as a page.

Runs, A/Bs, climbs and searches differ in what they say; how it is set, escaped and shown does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastloop.report.drawing.bars import Chart
from fastloop.report.drawing.curves import Curve

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """A text without what XML cannot hold."""
    return _CONTROL.sub("", text)


@dataclass(frozen=True)
class Table:
    """Rows of texts under a heading."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numeric: tuple[int, ...] = ()
    """Columns that hold numbers."""
    note: str = ""
    """A sentence below it."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One finding: its title, what it costs, why, and what to do about it."""

    name: str
    title: str
    share: str = ""
    """What it takes, such as 82.0 % of the step."""
    why: str = ""
    detail: tuple[str, ...] = ()
    bound: str = ""
    """What would be gained at most if it were gone."""
    patch: str = ""
    """YAML to copy."""


class Tile(NamedTuple):
    """One of the few numbers that a reader looks for first."""

    label: str
    value: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """What stands under one heading, in the order of the fields, each where there is one."""

    title: str
    text: tuple[str, ...] = ()
    pictures: tuple[Chart | Curve, ...] = ()
    cards: tuple[Card, ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()
    """In small print."""
    listed: tuple[str, ...] = ()
    """Items of a list; what stands between backticks is code."""
    code: str = ""
    """Shown as it is, to be copied."""
    language: str = ""
    """Of the code."""
    is_narrow: bool = False
    """May stand beside other narrow ones on a wide screen."""
    is_folded: bool = False
    """Opened by a click."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    kind: str
    """What it is the report of: report, A/B, climb, tune."""
    verdict: str
    tone: str
    """good, bad or unknown."""
    lede: str
    """The first sentence."""
    lines: tuple[str, ...]
    """What the terminal shows."""
    run: tuple[str, ...] = ()
    """Which run it is about: short texts above the verdict."""
    also: tuple[str, ...] = ()
    """Further sentences under the verdict."""
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """In small print under the verdict."""
    pictures: tuple[Chart | Curve, ...] = ()
    picture_title: str = ""
    no_picture: str = "n/a: there is nothing to draw yet."
    tiles: tuple[Tile, ...] = ()
    """In the page only: the tables have them too."""
    sections: tuple[Section, ...] = ()
    closing: str = ""
    """What the figures may be used for."""
