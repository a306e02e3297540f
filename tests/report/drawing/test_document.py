"""The frame of all reports: whole and escaped."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from fastloop.report.drawing.curves import Curve, Line
from fastloop.report.drawing.document import Document, FindingBox, Section, Table, strip_unprintable
from fastloop.report.drawing.html import draw_reports, to_html
from fastloop.report.drawing.markdown import to_markdown
from tests.report.run.test_html import Page
from tests.report.samples import HOSTILE

TABLE = Table("unseen", ("a", "b"), (("x|y", "1"),), numeric=(1,), note="A note.")
SECTION = Section(title="One", text=("First.", "Second *not bold*."), table=TABLE, listed=("item",), code="a: ```1```")

CURVE = Curve(lines=(Line(((1.0, 2.0),)),), title="y", x_label="x", low=0.0, high=4.0)


def told(**more: Any) -> Document:
    words = {"kind": "A/B", "verdict": "Faster", "tone": "good", "lede": "because", "lines": ("fastloop FASTER",)}
    return Document(**{**words, "sections": (SECTION,), **more})


def test_markdown_has_every_part_in_order() -> None:
    text = to_markdown(told(also=("Also.",), closing="The end."))
    assert text == (
        "# fastloop A/B\n\n```\nfastloop FASTER\n```\n\nbecause\n\nAlso.\n\n## One\n\nFirst.\n\n"
        "Second \\*not bold\\*.\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n\nA note.\n\n* item\n\n"
        "````\na: ```1```\n````\n\nThe end.\n"
    )


def test_html_has_every_part_in_order() -> None:
    text = to_html(told(run=("resnet50",), also=("Also.",), flags=("PARTIAL",), closing="The end."))
    page = Page(text)
    parts = [
        "resnet50",
        "Faster",
        "because",
        "Also.",
        "PARTIAL",
        "One",
        "First.",
        "Second *not bold*.",
        "x|y",
        "A note.",
        "item",
        "a: ```1```",
        "The end.",
    ]
    said = page.said[page.said.index("resnet50") :]
    places = [said.index(part) for part in parts]
    assert places == sorted(places) and page.wrong == [] and page.open == [] and '<header class="good">' in text
    assert page.tags.count("h1") == 1 and text.startswith("<!DOCTYPE html>")


@pytest.mark.usefixtures("fresh_templates")
def test_without_a_page_the_markdown_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    both = draw_reports(told(closing="The end."))
    assert set(both) == {"report.md", "report.html"} and "There is no" not in both["report.md"]
    monkeypatch.setitem(sys.modules, "jinja2", None)
    alone = draw_reports(told(closing="The end."))
    assert set(alone) == {"report.md"}
    note, closing = alone["report.md"].strip().splitlines()[-3::2]
    assert note.startswith("There is no report.html: ModuleNotFoundError: import of jinja2")
    assert closing == "The end."


def test_what_is_hostile_stays_text() -> None:
    texts: dict[str, Any] = dict.fromkeys(("kind", "verdict", "lede", "picture_title", "closing"), HOSTILE)
    tuples: dict[str, Any] = dict.fromkeys(("run", "also", "flags", "lines"), (HOSTILE,))
    table = Table(HOSTILE, (HOSTILE,), ((HOSTILE,),))
    page = to_html(
        told(
            **texts,
            **tuples,
            sections=(Section(title=HOSTILE, text=(HOSTILE,), table=table, listed=(HOSTILE,), code=HOSTILE),),
        )
    )
    read = Page(page)
    assert "script" not in read.tags and read.wrong == [] and "{{ 7 * 7 }}" in read.said
    assert read.said.count("<script>alert('x')</script>") > 8 and not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", page)


def test_without_a_picture_the_page_says_so() -> None:
    assert "n/a: no run finished." in to_html(told(no_picture="n/a: no run finished."))
    assert "n/a: no run finished." not in to_html(told(no_picture="n/a: no run finished.", pictures=(CURVE,)))


@pytest.mark.parametrize("text", ["a\x00b", "a\x1bb", "a\ud800b", "a\uffffb", "a\x7fb"])
def test_printable(text: str) -> None:
    assert strip_unprintable(text) == "ab" and strip_unprintable("\u00fc\n\t\u20ac") == "\u00fc\n\t\u20ac"


def test_cards_narrow_sections_and_code_in_lists_are_drawn_in_both() -> None:
    card = FindingBox(
        name="data_wait", title="Starved", share="82 %", why="Slow.", detail=("a `b`",), bound="+4 %", patch="a: 1"
    )
    sections = (
        Section(title="Findings", cards=(card,), notes=("Then: x",)),
        Section(title="Left", text=("one",), is_narrow=True),
        Section(title="Right", text=("two",), is_narrow=True),
        Section(title="Folded", listed=("`rungs.pin`: <b> ` x",), is_folded=True),
        Section(title="Pictures alone", pictures=(CURVE,)),
    )
    text = to_markdown(told(sections=sections))
    assert text.partition("because\n\n")[2] == (
        "## Findings\n\n### Starved (82 %) `data_wait`\n\nSlow.\n\n* a `b`\n\nIf it were gone: +4 %\n\n"
        "```yaml\na: 1\n```\n\nThen: x\n\n## Left\n\none\n\n## Right\n\ntwo\n\n"
        "## Folded\n\n* `rungs.pin`: \\<b> \\` x\n"
    )
    page = to_html(told(sections=sections))
    assert page.count('<div class="columns">') == 1 and "<details><summary>Folded" in page and "<svg" in page
    assert "<code>rungs.pin</code>: &lt;b&gt; ` x" in page and "<li>a <code>b</code></li>" in page
    assert [words for words in ("82 %", "Starved", "Slow.", "+4 %", "a: 1") if words not in Page(page).said] == []
