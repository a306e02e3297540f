"""Renders a document as Markdown. Only the HTML page has its pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastloop.report.drawing.document import Document, FindingBox, Section, Table, strip_unprintable

CODE = re.compile(r"`([^`]+)`")
_MARKUP = re.compile(r"[\\`*<|~]|(?<![^\W_])_|_(?![^\W_])")
"""Characters that Markdown would read as markup. An underscore inside a word is not: ``num_workers`` is unchanged."""


def to_markdown(document: Document, note: str = "") -> str:
    """Render the whole document.

    Args:
        note: a remark about the report itself.
    """
    parts = [
        f"# fastloop {document.kind}",
        fence("\n".join(document.lines)),
        *map(escape, (document.lede, *document.also, *document.notes)),
        *map(_draw_section, document.sections),
        escape(note),
        escape(document.closing),
    ]
    return strip_unprintable("\n\n".join(filter(None, parts))) + "\n"


def fence(text: str, language: str = "") -> str:
    """Return a verbatim block, between fences longer than any inside it."""
    marks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{marks}{language}\n{text}\n{marks}"


def escape(text: str) -> str:
    """Put a text on one line and escape everything that Markdown would read as markup."""
    return _mark(" ".join(text.split()))


def _draw_section(section: Section) -> str:
    """Render a section under its heading; empty if it has only pictures."""
    parts = [
        *map(escape, section.text),
        *map(_draw_card, section.cards),
        "" if section.table is None else _draw_table(section.table),
        *map(escape, section.notes),
        _draw_list(section.listed),
        fence(section.code.rstrip(), section.language) if section.code else "",
    ]
    return "\n\n".join([f"## {escape(section.title)}", *filter(None, parts)]) if any(parts) else ""


def _draw_card(card: FindingBox) -> str:
    share, name = f" ({card.share})" if card.share else "", f" `{card.name}`" if card.name else ""
    parts = [
        f"### {escape(card.title + share)}{name}",
        escape(card.why),
        _draw_list(card.detail),
        escape(f"If it were gone: {card.bound}" if card.bound else ""),
        fence(card.patch, "yaml") if card.patch else "",
    ]
    return "\n\n".join(filter(None, parts))


def _draw_table(table: Table) -> str:
    if not table.rows:
        return escape(table.note)
    rule = ["---:" if column in table.numeric else "---" for column in range(len(table.head))]
    rows = [table.head, rule, *([escape(cell) for cell in row] for row in table.rows)]
    grid = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join(filter(None, [grid, escape(table.note)]))


def _draw_list(items: Sequence[str]) -> str:
    return "\n".join(f"* {_escape_all_but_code(item)}" for item in items)


def _escape_all_but_code(text: str) -> str:
    """Escape an item except for its code."""
    pieces = CODE.split(" ".join(text.split()))
    return "".join(f"`{piece}`" if index % 2 else _mark(piece) for index, piece in enumerate(pieces))


def _mark(text: str) -> str:
    return _MARKUP.sub(lambda found: f"\\{found[0]}", text)
