"""The picture of an A/B: where its dots and intervals lie."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fastloop.report.drawing.bars import Chart, Row
from fastloop.report.drawing.document import Picture
from fastloop.report.experiments import ab_picture, ab_report
from tests.report.made_experiments import AB, judged, result_of, versus
from tests.report.run.test_figures import texts


def shown(content: dict[str, Any]) -> tuple[str, Chart]:
    """The runs' markup and the chart of the ratios; fails where they could not be drawn."""
    runs, ratios = ab_report.make_document(result_of(content)).pictures
    assert isinstance(runs, Picture) and isinstance(ratios, Chart) and not runs.why_not
    return runs.markup, ratios


def rows(content: dict[str, Any]) -> dict[str, Row]:
    return {row.name: row for row in shown(content)[1].rows}


@pytest.mark.parametrize("run", sorted(AB))
def test_any_content_is_drawn_or_left_out(run: str) -> None:
    content = AB[run]()
    pictures = ab_report.make_document(result_of(content)).pictures
    assert len(pictures) == (0 if run in ("base-failed", "nulls", "nothing") else 2)
    assert not pictures or not any("nan" in text.lower() for text in texts(shown(content)[0]))


def places(markup: str, colour: str) -> list[tuple[float, float]]:
    """Where the marks of one colour stand."""
    found = re.findall(rf'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: {colour}', markup)
    return [(float(x), float(y)) for x, y in found]


def test_a_dot_for_each_run_where_it_stood_in_the_order() -> None:
    content = versus({"base": 344.0, "amp": 454.0}, [judged("amp", 1.32)], drift=0.2)
    markup, _ = shown(content)
    for arm, colour in zip(content["arms"], ("#8f9aa5", "#2f6fb5"), strict=True):
        dots = sorted(places(markup, colour), key=lambda place: place[0])
        assert len(dots) == 5
        steps = [round((dots[at + 1][0] - dots[at][0]) / (dots[1][0] - dots[0][0]), 2) for at in range(4)]
        ran = arm["places"]
        assert steps == [round((ran[at + 1] - ran[at]) / (ran[1] - ran[0]), 2) for at in range(4)]
        assert dots[-1][1] > dots[0][1], "the machine slowed down, and it shows"


def test_lost_runs_are_crosses_where_they_began() -> None:
    content = AB["six"]()
    lost = {arm.name: arm.lost for arm in ab_report.picture_arms(result_of(content)) if arm.lost}
    order = enumerate(content["order"], 1)
    assert lost == {"broken": tuple(place for place, name in order if name == "broken")} and lost["broken"]
    assert any("x: failed" in text for text in texts(shown(content)[0]))
    assert not any(arm.lost for arm in ab_report.picture_arms(result_of(AB["faster"]())))
    assert "x: failed" not in " ".join(texts(shown(AB["faster"]())[0]))


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
    assert len({row.symbol for row in found}) == len({row.colour for row in found}) == len(found)
    assert (found[0].symbol, found[0].colour) == ("\u25cf", "#8f9aa5")


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
    markup, ratios = shown(AB["faster"]())
    assert "base 343 samples per second" in markup and "amp FASTER 1.32x" in ratios.alt_text


def test_plain_numbers_are_enough() -> None:
    arms = [ab_picture.Arm(name="base", runs=((1, 10.0),)), ab_picture.Arm(name="amp", runs=((2, 12.0),), lost=(3,))]
    assert len(ab_picture.draw(arms, 3.0)) == 2 and ab_picture.draw(arms[:0], 3.0) == ()
