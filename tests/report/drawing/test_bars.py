"""Charts of bars: where things stand, and what the page makes of them."""

from __future__ import annotations

import re

import pytest

from fastloop.report.drawing.bars import Bar, Chart, Entry, Mark, Row, choose_ink, choose_ticks
from fastloop.report.drawing.document import Document
from fastloop.report.drawing.html import to_html
from tests.report.run.test_html import Page
from tests.report.samples import HOSTILE

CHART = Chart(
    alt_text="all of it",
    rows=(
        Row(
            name="first",
            bars=(Bar(0, 5, "#d9480f", "solid", "label", "50 %"), Bar(5, 10, style="hatched")),
            marks=(Mark(2.5, "diamond", "#e8a317"),),
            value="5 ms",
            detail="half",
            note="A note.",
        ),
        Row(name="head", height=0),
    ),
    high=10.0,
    unit=" ms",
    ticks=(0, 5, 10),
    legend=(Entry("solid", "#d9480f", "orange", "5 ms", "50 %"),),
)


def drawn(chart: Chart) -> str:
    return to_html(Document(kind="x", verdict="x", tone="good", lede="x", lines=(), pictures=(chart,)))


def test_places_and_sizes_are_shares_of_the_width() -> None:
    page = drawn(CHART)
    assert re.findall(r'class="(solid|hatched)" style="left:([\d.]+)%;width:([\d.]+)%', page) == [
        ("solid", "0.0", "50.0"),
        ("hatched", "50.0", "50.0"),
    ]
    assert re.findall(r'class="diamond" style="left:([\d.]+)%', page) == ["25.0"]
    assert re.findall(r'<span(?: class="(\w+)")? style="left:([\d.]+)%">([^<]*)', page) == [
        ("first", "0.0", "0 ms"),
        ("", "50.0", "5 ms"),
        ("last", "100.0", "10 ms"),
    ]
    assert page.count('class="track"') == 1, "a row without a height has no track"


def test_a_picture_has_its_words_and_every_text() -> None:
    page = Page(drawn(CHART))
    assert ("figure", "role", "img") in page.attributes and ("figure", "aria-label", "all of it") in page.attributes
    for said in ("first", "label", "50 %", "5 ms", "half", "A note.", "head", "orange"):
        assert said in page.said, said
    assert page.wrong == [] and page.open == []


def test_what_lies_outside_the_scale_stays_inside_the_picture() -> None:
    chart = Chart(alt_text="", rows=(), low=1.0, high=3.0)
    assert [chart.place(value) for value in (-5, 1, 2, 3, 9)] == [0, 0, 50, 100, 100]
    assert chart.size(Bar(-10, 2)) == 50


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 197.5, (0, 50, 100, 150)),
        (0, 0.004, (0, 0.001, 0.002, 0.003, 0.004)),
        (0.87, 1.1, (0.9, 1, 1.1)),
        (-3, 3, (-2, 0, 2)),
        (0, 1e9, (0, 5e8, 1e9)),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert choose_ticks(low, high) == pytest.approx(ticks)


def test_black_or_white_on_a_color() -> None:
    assert choose_ink("#ffffff") == choose_ink("#e8a317") == "#000000"
    assert choose_ink("#000000") == choose_ink("#2f6fb5") == "#ffffff"


def test_hostile_names_stay_text() -> None:
    row = Row(name=HOSTILE, bars=(Bar(0, 1, "#d9480f", "solid", HOSTILE),), value=HOSTILE, note=HOSTILE)
    page = Page(drawn(Chart(alt_text=HOSTILE, rows=(row,), high=1, note=HOSTILE)))
    assert "script" not in page.tags and page.wrong == [] and page.said.count("<script>alert('x')</script>") == 5
