"""The frame of the reports of experiments: whole, escaped, and never broken by a picture."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from fastloop.report import document
from fastloop.report.document import Document, Section
from fastloop.report.figures import Picture
from fastloop.report.svg import canvas
from fastloop.report.tables import Table
from tests.report.samples import HOSTILE
from tests.report.test_html import Page

TABLE = Table(title="unseen", head=("a", "b"), rows=(("x|y", "1"),), numeric=(1,), note="A note.")
SECTION = Section(title="One", text=("First.", "Second *not bold*."), table=TABLE, listed=("item",), code="a: ```1```")


def told(**more: Any) -> Document:
    words = {"kind": "A/B", "verdict": "Faster", "tone": "good", "lede": "because", "lines": ("fastloop FASTER",)}
    return Document(**{**words, "sections": (SECTION,), **more})


def test_markdown_has_every_part_in_order() -> None:
    text = document.markdown(told(also=("Also.",), closing="The end."))
    assert text == (
        "# fastloop A/B\n\n```\nfastloop FASTER\n```\n\nbecause\n\nAlso.\n\n## One\n\nFirst.\n\n"
        "Second \\*not bold\\*.\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n\nA note.\n\n* item\n\n"
        "````\na: ```1```\n````\n\nThe end.\n"
    )  # fmt: skip


def test_html_has_every_part_in_order() -> None:
    text = document.html(told(run=("resnet50",), also=("Also.",), flags=("PARTIAL",), closing="The end."))
    page = Page(text)
    parts = ["resnet50", "Faster", "because", "Also.", "PARTIAL", "One", "First.", "Second *not bold*.", "x|y",
             "A note.", "item", "a: ```1```", "The end."]  # fmt: skip
    said = page.said[page.said.index("resnet50") :]
    places = [said.index(part) for part in parts]
    assert places == sorted(places) and page.wrong == [] and page.open == [] and '<header class="good">' in text
    assert page.tags.count("h1") == 1 and text.startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("reason", ["jinja2", "markupsafe"])
def test_without_a_page_the_markdown_says_why(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = document.reports(told(closing="The end."))
    assert set(both) == {"report.md", "report.html"} and "There is no" not in both["report.md"]
    monkeypatch.setitem(sys.modules, reason, None)
    alone = document.reports(told(closing="The end."))
    assert set(alone) == {"report.md"}
    note, closing = alone["report.md"].strip().splitlines()[-3::2]
    assert note.startswith(f"There is no report.html: ModuleNotFoundError: import of {reason}")
    assert closing == "The end."


def test_what_is_hostile_stays_text() -> None:
    texts: dict[str, Any] = dict.fromkeys(("kind", "verdict", "lede", "picture_title", "closing"), HOSTILE)
    tuples: dict[str, Any] = dict.fromkeys(("run", "also", "flags", "lines"), (HOSTILE,))
    table = Table(title=HOSTILE, head=(HOSTILE,), rows=((HOSTILE,),))
    page = document.html(told(**texts, **tuples, sections=(Section(title=HOSTILE, text=(HOSTILE,), table=table,
                                                                    listed=(HOSTILE,), code=HOSTILE),)))  # fmt: skip
    read = Page(page)
    assert "script" not in read.tags and read.wrong == [] and "{{ 7 * 7 }}" in read.said
    assert read.said.count("<script>alert('x')</script>") > 8 and not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", page)


def test_a_picture_is_made_wide_and_narrow() -> None:
    widths = []

    def make(width: float) -> Any:
        widths.append(width)
        return canvas(width, 50)

    wide, narrow = document.drawn("some", "Title", "words", make)
    assert widths == [900.0, 340.0] and (wide.name, narrow.name) == ("some-wide", "some-narrow")
    assert 'viewBox="0 0 900 50"' in wide.markup and 'class="some-narrow"' in narrow.markup
    page = document.html(told(pictures=(wide, narrow)))
    assert page.count("<svg") == 2 and "n/a: there is nothing to draw" not in page
    assert 'svg[class$="-narrow"] { display: none;' in page, "one of the two is shown"


def test_a_picture_that_fails_says_why() -> None:
    def fails(width: float) -> Any:
        raise ValueError(f"<{width}>")

    pictures = document.drawn("some", "Title", "words", fails)
    assert [picture.why_not for picture in pictures] == ["ValueError: <900.0>", "ValueError: <340.0>"]
    page = document.html(told(pictures=pictures))
    assert "The picture could not be drawn: ValueError: &lt;340.0&gt;; ValueError: &lt;900.0&gt;." in page


def test_without_a_picture_the_page_says_so() -> None:
    assert document.drawn("some", "Title", "words", lambda width: None) == ()
    assert "n/a: no run finished." in document.html(told(no_picture="n/a: no run finished."))
    assert "could not be drawn" not in document.html(told(pictures=(Picture(name="a", title="b", markup="<svg/>"),)))


@pytest.mark.parametrize(
    ("hardware", "said"),
    [({}, ("n/a",)), ({"device_name": "GPU", "devices": 2, "torch": "2.11", "driver": None}, ("2x GPU", "torch 2.11")),
     ({"device_name": "cpu"}, ("cpu",))], ids=["nothing", "gpus", "cpu"])  # fmt: skip
def test_where_it_ran(hardware: dict[str, Any], said: tuple[str, ...]) -> None:
    assert document.machine(hardware) == said


def test_odd_contents_are_read_as_nothing() -> None:
    content = {"rows": [{"a": 1}, None, 3], "none": None, "text": "x"}
    assert document.entries(content, "rows") == [{"a": 1}] and document.entries(content, "none") == []
    assert document.part(content, "text") == {} and document.part({"a": {"b": 1}}, "a") == {"b": 1}
    assert document.flat(["a\n  b\x00", "  c"]) == ["a   b", "  c"]
