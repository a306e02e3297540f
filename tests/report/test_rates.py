"""The picture of an A/B: where its dots and intervals lie."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fastloop.report import rates
from tests.report.experiments import AB, judged, versus
from tests.report.test_figures import texts


def shown(content: dict[str, Any]) -> list[str]:
    """Markup, wide and narrow; fails where it could not be drawn."""
    made = rates.draw(content)
    assert [picture.why_not for picture in made if picture.why_not] == []
    return [picture.markup for picture in made]


@pytest.mark.parametrize("run", sorted(AB))
def test_any_content_is_drawn_or_left_out(run: str) -> None:
    content = AB[run]()
    pictures = shown(content)
    assert len(pictures) == (0 if run in ("base-failed", "nulls", "nothing") else 2)
    assert not any("nan" in text.lower() for markup in pictures for text in texts(markup))


def places(markup: str, colour: str) -> list[tuple[float, float]]:
    """Where the marks of one colour stand: runs, and last the one beside the arm's name. The band is drawn from 0."""
    found = re.findall(rf'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: {colour}', markup)
    return [(float(x), float(y)) for x, y in found if float(x) > 0]


def test_a_dot_for_each_run_where_it_stood_in_the_order() -> None:
    content = versus({"base": 344.0, "amp": 454.0}, [judged("amp", 1.32)], drift=0.2)
    markup = shown(content)[0]
    arms = content["arms"]
    for arm, colour in zip(arms, ("#8f9aa5", "#2f6fb5"), strict=True):
        *dots, _ = sorted(places(markup, colour), key=lambda place: place[0])
        assert len(dots) == 5
        steps = [round((dots[at + 1][0] - dots[at][0]) / (dots[1][0] - dots[0][0]), 2) for at in range(4)]
        ran = arm["places"]
        assert steps == [round((ran[at + 1] - ran[at]) / (ran[1] - ran[0]), 2) for at in range(4)]
        assert dots[-1][1] > dots[0][1], "the machine slowed down, and it shows"


def test_lost_runs_are_crosses_where_they_began() -> None:
    content = AB["six"]()
    gone = rates.lost(content)
    assert [at for at, _ in gone] == [place for place, name in enumerate(content["order"], 1) if name == "broken"]
    assert {index for _, index in gone} == {6}
    assert any("x: failed" in text for text in texts(shown(content)[0]))
    assert rates.lost(AB["faster"]()) == [] and "x: failed" not in " ".join(texts(shown(AB["faster"]())[0]))


def bar(markup: str, colour: str) -> tuple[float, float]:
    """Ends of the one rectangle of this colour that is 8 pixels high."""
    found = re.findall(rf'<path d="M ([\d.]+) ([\d.]+) L ([\d.]+) [\d.]+ L [\d.]+ ([\d.]+) [^"]*"[^>]*fill: {colour}',
                       markup)  # fmt: skip
    (ends,) = {(float(left), float(right)) for left, top, right, low in found if abs(float(top) - float(low)) == 8}
    return ends


@pytest.mark.parametrize("which", [0, 1], ids=["wide", "narrow"])
def test_intervals_share_a_scale_with_the_band(which: int) -> None:
    content = versus({"base": 1.0, "a": 1.2, "b": 0.8}, [judged("a", 1.2, 0.1), judged("b", 0.8, 0.05)], band_pct=5.0)
    markup = shown(content)[which]
    first, second = bar(markup, "#2f6fb5"), bar(markup, "#d9480f")
    scale = (first[1] - first[0]) / 0.2
    assert second[1] - second[0] == pytest.approx(0.1 * scale, rel=0.01)
    assert first[0] - second[0] == pytest.approx(0.35 * scale, rel=0.01)
    said = texts(markup)
    assert "FASTER 1.20x" in said and "SLOWER 0.80x" in said and "rate over the base's; shaded: within 5 %" in said


def test_a_failed_parity_is_hatched_and_has_no_ratio() -> None:
    said = texts(shown(AB["parity"]())[0])
    assert "PARITY FAILED" in said and not any("1.32" in text for text in said)
    assert "url(#rates-wide-h" in shown(AB["parity"]())[0] and "url(#rates-wide-h" not in shown(AB["faster"]())[0]


def test_an_arm_that_failed_and_one_that_was_not_judged_are_named() -> None:
    content = AB["six"]()
    content["comparisons"] = [one for one in content["comparisons"] if one["arm"] != "layout"]
    said = texts(shown(content)[1])
    assert "FAILED" in said and "not judged" in said and "base, 342 samples/s" in said


def test_the_picture_in_words() -> None:
    said = rates.words(AB["faster"]())
    assert "base 343 samples per second" in said and "amp over the base 1.29 to 1.35" in said
    assert rates.words({}).endswith("Medians: none.")
