"""The picture of an A/B: where its dots and intervals lie."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from fastloop.report.drawing.bars import Chart, Row
from fastloop.report.drawing.curves import Curve
from fastloop.report.drawing.html import draw_reports
from fastloop.report.experiments import ab_report
from tests.report.made_experiments import AB, judged, result_of, versus
from tests.report.run.test_html import Page


def shown(content: dict[str, Any]) -> tuple[Curve, Chart]:
    """The curve of the runs and the chart of the ratios."""
    runs, ratios = ab_report.make_document(result_of(content)).pictures
    assert isinstance(runs, Curve) and isinstance(ratios, Chart)
    return runs, ratios


def rows(content: dict[str, Any]) -> dict[str, Row]:
    return {row.name: row for row in shown(content)[1].rows}


@pytest.mark.parametrize("run", sorted(AB))
def test_any_content_is_drawn_or_left_out(run: str) -> None:
    content = AB[run]()
    pictures = ab_report.make_document(result_of(content)).pictures
    assert len(pictures) == (0 if run in ("base-failed", "nulls", "nothing") else 2)
    page = Page(draw_reports(ab_report.make_document(result_of(content)))["report.html"])
    assert page.tags.count("svg") == bool(pictures) and "nan" not in page.said.lower().replace("finance", "")


def test_a_symbol_for_each_run_where_it_stood_in_the_order() -> None:
    content = versus({"base": 344.0, "amp": 454.0}, [judged("amp", 1.32)], drift=0.2)
    runs, _ = shown(content)
    symbols = [line for line in runs.lines if line.symbol]
    for arm, line in zip(content["arms"], symbols, strict=True):
        assert [x - 1 for x, _ in line.points] == arm["places"] and len(line.points) == 5
        assert [y for _, y in line.points] == arm["samples_per_s"]
        assert runs.y(line.points[-1][1]) > runs.y(line.points[0][1]), "the machine slowed down, and it shows"
    medians = [line.points[0][1] for line in runs.lines if not line.symbol]
    assert medians == [median(arm["samples_per_s"]) for arm in content["arms"]]


def test_lost_runs_are_crosses_where_they_began() -> None:
    content = AB["six"]()
    lost = [place for place, name in enumerate(content["order"], 1) if name == "broken"]
    runs = shown(content)[0]
    assert lost and [x for x, _ in runs.lost] == lost and "x: failed" in runs.x_label
    assert not shown(AB["faster"]())[0].lost
    assert "x: failed" not in shown(AB["faster"]())[0].x_label


def test_intervals_share_a_scale_with_the_band() -> None:
    content = versus({"base": 1.0, "a": 1.2, "b": 0.8}, [judged("a", 1.2, 0.1), judged("b", 0.8, 0.05)], band_pct=5.0)
    chart, found = shown(content)[1], rows(content)
    for name, ends, ratio in (("a", (1.1, 1.3), 1.2), ("b", (0.75, 0.85), 0.8)):
        band, interval = found[name].bars
        assert (band.style, interval.style) == ("band", "interval")
        assert band[:2] == pytest.approx((0.95, 1.05)) and interval[:2] == pytest.approx(ends)
        assert [(mark.kind, mark.at) for mark in found[name].marks] == [("line", 1), ("tick", pytest.approx(ratio))]
    assert chart.low < 0.75 and chart.high > 1.3 and 1.0 in chart.ticks
    assert (found["a"].value, found["b"].value) == ("FASTER 1.20x", "SLOWER 0.80x")
    assert found["base"].bars == () and "within \u00b15 %" in chart.note


def test_symbols_are_those_of_the_runs() -> None:
    found = list(rows(AB["six"]()).values())
    assert len({row.symbol for row in found}) == len({row.color for row in found}) == len(found)
    assert (found[0].symbol, found[0].color) == ("\u25cf", "#8f9aa5")


def test_a_failed_parity_is_hatched_and_has_no_ratio() -> None:
    row = rows(AB["parity"]())["amp"]
    assert row.value == "PARITY FAILED" and [mark.kind for mark in row.marks] == ["line"]
    assert [bar.style for bar in row.bars] == ["band", "hatched"]
    assert "hatched" not in [bar.style for row in rows(AB["faster"]()).values() for bar in row.bars]


def test_an_arm_that_failed_and_one_that_was_not_judged_are_named() -> None:
    content = AB["six"]()
    content["comparisons"] = [one for one in content["comparisons"] if one["arm"] != "layout"]
    said = [row.value for row in rows(content).values()]
    assert "FAILED" in said and "not judged" in said and "base, 342 samples/s" in said


def test_the_picture_in_words() -> None:
    runs, ratios = shown(AB["faster"]())
    assert runs.alt_text == "samples per second over run, in order." and "amp FASTER 1.32x" in ratios.alt_text
