"""What is told of an experiment, put together once and drawn twice: as Markdown and as a page.

An A/B, a climb and a search differ in what they say; how it is set, escaped and shown does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastloop.report import markdown as setting
from fastloop.report import svg
from fastloop.report.figures import Picture
from fastloop.report.html import page, render
from fastloop.report.tables import Table

WIDE, NARROW = 900.0, 340.0
"""CSS pixels of a picture's two drawings; the page shows the one that fits the screen."""
VERSIONS = ("torch", "lightning", "fastloop", "driver")


@dataclass(frozen=True, kw_only=True)
class Section:
    """What stands under one heading: sentences, then a table, a list and text to copy, each where there is one."""

    title: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    listed: tuple[str, ...] = ()
    code: str = ""
    """Shown as it is."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    kind: str
    """What it is the report of: A/B, climb, tune."""
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
    pictures: tuple[Picture, ...] = ()
    picture_title: str = ""
    no_picture: str = "n/a: there is nothing to draw yet."
    sections: tuple[Section, ...] = ()
    closing: str = ""
    """What the figures may be used for."""


def reports(told: Document) -> dict[str, str]:
    """report.md and report.html, by name. Where the page cannot be made, there is none, and report.md says why."""
    made, note = page(lambda: html(told))
    return {"report.md": markdown(told, note), **made}


def markdown(told: Document, note: str = "") -> str:
    """The report as Markdown; its pictures are in the page only.

    Args:
        note: what the reader should know about the report itself.
    """
    parts = [f"# fastloop {told.kind}", setting.fenced("\n".join(told.lines)), setting.plain(told.lede),
             *map(setting.plain, told.also), *map(_section, told.sections), setting.plain(note),
             setting.plain(told.closing)]  # fmt: skip
    return svg.printable("\n\n".join(filter(None, parts))) + "\n"


def _section(section: Section) -> str:
    parts = [f"## {setting.plain(section.title)}", *map(setting.plain, section.text)]
    if section.table is not None:
        parts.append(setting.section(section.table).partition("\n\n")[2])
    parts.append("\n".join(f"* {setting.plain(line)}" for line in section.listed))
    if section.code:
        parts.append(setting.fenced(section.code.rstrip()))
    return "\n\n".join(filter(None, parts))


def html(told: Document) -> str:
    """The report as one file that needs no network and no JavaScript.

    Raises:
        ImportError: jinja2 is not installed.
    """
    from markupsafe import Markup

    reasons = sorted({picture.why_not for picture in told.pictures if picture.why_not})
    content = {
        "name": told.kind, "verdict": told.verdict, "tone": told.tone, "why": told.lede, "run": told.run,
        "also": told.also, "flags": told.flags, "picture_title": told.picture_title, "sections": told.sections,
        "pictures": [Markup(picture.markup) for picture in told.pictures if picture.markup],
        "no_picture": f"The picture could not be drawn: {'; '.join(reasons)}." if reasons else told.no_picture,
        "disclaimer": told.closing,
    }  # fmt: skip
    return render("document.html.jinja", content)


def drawn(name: str, title: str, words: str, make: Callable[[float], Any]) -> tuple[Picture, ...]:
    """One picture, wide and narrow; nothing where ``make`` returns None. Never raises: a failure is told.

    Args:
        make: draws a ``Figure`` of so many CSS pixels' width.
    """
    made = []
    for suffix, width in (("wide", WIDE), ("narrow", NARROW)):
        called = f"{name}-{suffix}"
        try:
            with svg.style():
                figure = make(width)
                if figure is not None:
                    made.append(Picture(name=called, title=title, markup=svg.embed(figure, called, title, words)))
        except Exception as error:  # no picture is worth a report
            made.append(Picture(name=called, title=title, why_not=f"{type(error).__name__}: {error}"))
    return tuple(made)


def entries(content: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The objects in a list of a JSON file; none where the file lacks it."""
    return [entry for entry in content.get(key) or () if isinstance(entry, Mapping)]


def part(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside another; empty where there is none."""
    found = content.get(key)
    return found if isinstance(found, Mapping) else {}


def machine(hardware: Mapping[str, Any]) -> tuple[str, ...]:
    """Devices and versions, short; n/a where nothing is known of the device."""
    device, count = hardware.get("device_name"), hardware.get("devices")
    named = "n/a" if device is None else str(device)
    first = named if count is None else f"{count}x {named}"
    return (first, *(f"{name} {hardware[name]}" for name in VERSIONS if hardware.get(name) is not None))


def flat(lines: Iterable[str]) -> list[str]:
    """Each text on one line: a reason may be an exception's, which has several."""
    return [svg.printable(" ".join(line.splitlines())).rstrip() for line in lines]
