"""The picture of a climb: rates, ceilings, attempts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fastloop.records.climb import ClimbFile
from fastloop.records.store import decode
from fastloop.report.drawing.bars import Chart, Row
from fastloop.report.experiments import climb_report
from tests.report.drawing.test_bars import drawn
from tests.report.made_experiments import CLIMBS, climb, rung
from tests.report.run.test_html import Page


def shown(content: dict[str, Any]) -> tuple[Chart, ...]:
    """The picture of a climb.json."""
    found = decode(content, ClimbFile)
    assert found is not None
    pictures = climb_report.make_document(found).pictures
    assert all(isinstance(picture, Chart) for picture in pictures)
    return tuple(picture for picture in pictures if isinstance(picture, Chart))


def rows(chart: Chart) -> dict[str, Row]:
    return {row.name: row for row in chart.rows}


@pytest.mark.parametrize("run", sorted(CLIMBS))
def test_any_content_is_drawn_or_left_out(run: str) -> None:
    pictures = shown(CLIMBS[run]())
    assert len(pictures) == (0 if run in ("nulls", "nothing") else 1)
    assert not any(re.search(r"\b(nan|inf)\b", Page(drawn(chart)).said.lower()) for chart in pictures)


def test_bars_grow_by_what_they_gain_and_failures_do_not() -> None:
    (chart,) = shown(CLIMBS["climbed"]())
    naive, *tried, top = chart.rows
    assert (naive.name, top.name) == ("naive", "top")
    assert top.bars[0].end / naive.bars[0].end == pytest.approx(743 / 98, rel=0.01)
    kept = [row for row in tried if row.detail != "rolled back"]
    assert len(kept) == 5 and len(tried) == 8
    level = naive.bars[0].end
    for row in tried:
        before, *gained = row.bars
        assert before.style == "faint" and before.end == pytest.approx(level, rel=1e-6)
        if row in kept:
            assert gained[0].style == "solid" and gained[0].start == pytest.approx(level)
            level = gained[0].end
        else:
            assert {bar.style for bar in gained} <= {"hatched", "whisker"}
    assert level == pytest.approx(top.bars[0].end, rel=0.01)
    first = kept[0].bars[1]
    assert first.end / first.start == pytest.approx(743 / 183, rel=0.01)


def test_names_gains_reasons_and_ceilings_are_said() -> None:
    (chart,) = shown(CLIMBS["climbed"]())
    found = rows(chart)
    assert (found["workers"].value, found["workers"].detail) == ("1,399", "-560 ms") and found["naive"].value == "345"
    assert (found["layout"].detail, found["layout"].note) == ("rolled back", "not faster within the noise")
    assert [row.detail for row in chart.rows].count("rolled back") == 3
    assert found["workers"].note == "", "what was kept needs no reason"
    said = Page(drawn(chart)).said
    for words in ("predicted before it was tried", "replayed batches", "2,697 samples/s", "resident batch", "2,720"):
        assert words in said, words


def test_the_top_stands_under_its_own_ceilings_where_they_are_known() -> None:
    (chart,) = shown(CLIMBS["climbed"]())
    limits = [mark.at for mark in chart.rows[-1].marks if mark.kind == "dashed"]
    assert limits == [2697, 2720] and chart.high > 2720
    assert all(row.marks[:2] == chart.rows[0].marks for row in chart.rows)
    (above,) = shown(CLIMBS["climbed"]() | {"ceilings_top_samples_per_s": {"replayed": 3100.0, "resident": None}})
    assert [(entry.label, entry.value) for entry in above.legend[:-1]] == [("replayed batches", "3,100 samples/s")]
    assert "replayed batches 3,100" in above.alt_text and "2,720" in chart.alt_text


def test_every_prediction_has_a_mark_and_the_legend_says_so_only_where_there_is_one() -> None:
    (chart,) = shown(CLIMBS["climbed"]())
    marks = [mark for row in chart.rows for mark in row.marks if mark.kind == "diamond"]
    assert len(marks) == 8 and chart.legend[-1].kind == "diamond"
    (fewer,) = shown(climb([rung("amp", 743, 200, predicted=None)], 543.0))
    assert "diamond" not in [entry.kind for entry in fewer.legend]
    assert "diamond" not in [mark.kind for row in fewer.rows for mark in row.marks]


def test_the_picture_in_words() -> None:
    (chart,) = shown(CLIMBS["climbed"]())
    assert chart.alt_text.startswith("Samples per second: naive 345, workers 1,399,")
    assert "layout 2,116 (rolled back)" in chart.alt_text
