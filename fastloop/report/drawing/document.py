"""The content of a report, built once and rendered twice: as Markdown and as an HTML page.

Reports of runs, A/Bs, climbs and searches differ only in content; layout, escaping and rendering are shared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastloop.report.drawing.bars import Chart
from fastloop.report.drawing.curves import Curve

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def strip_unprintable(text: str) -> str:
    """Remove characters that XML cannot represent."""
    return _CONTROL.sub("", text)


@dataclass(frozen=True)
class Table:
    """Rows of texts under a heading."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numeric: tuple[int, ...] = ()
    """Indices of columns with numbers."""
    note: str = ""
    """A sentence below the table."""


@dataclass(frozen=True, kw_only=True)
class FindingBox:
    """One finding: its title, its cost, the reason, and what to do about it."""

    name: str
    title: str
    share: str = ""
    """Its cost, such as 82.0 % of the step."""
    why: str = ""
    detail: tuple[str, ...] = ()
    bound: str = ""
    """The most that removing it can gain."""
    patch: str = ""
    """YAML to copy."""


class Tile(NamedTuple):
    """One of the few numbers that a reader looks for first."""

    label: str
    value: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """The content under one heading: the fields in this order, without empty ones."""

    title: str
    text: tuple[str, ...] = ()
    pictures: tuple[Chart | Curve, ...] = ()
    cards: tuple[FindingBox, ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()
    """In small print."""
    listed: tuple[str, ...] = ()
    """Items of a list; text between backticks is code."""
    code: str = ""
    """Shown verbatim, to be copied."""
    language: str = ""
    """The language of the code."""
    is_narrow: bool = False
    """May be placed next to other narrow sections on a wide screen."""
    is_folded: bool = False
    """Collapsed until the reader clicks it."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    kind: str
    """The kind of report: report, A/B, climb, tune."""
    verdict: str
    tone: str
    """good, bad or unknown."""
    lede: str
    """The first sentence."""
    lines: tuple[str, ...]
    """The terminal's output."""
    run: tuple[str, ...] = ()
    """Short texts above the verdict that identify the run."""
    also: tuple[str, ...] = ()
    """Further sentences under the verdict."""
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """In small print under the verdict."""
    pictures: tuple[Chart | Curve, ...] = ()
    picture_title: str = ""
    no_picture: str = "n/a: there is nothing to draw yet."
    tiles: tuple[Tile, ...] = ()
    """Only in the HTML page: the tables contain them too."""
    sections: tuple[Section, ...] = ()
    closing: str = ""
    """How the figures may be used."""
