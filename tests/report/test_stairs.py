"""The picture of a climb: heights, ceilings, attempts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fastloop.report import stairs
from tests.report.experiments import CLIMBS, climb, rung
from tests.report.test_figures import texts


def shown(content: dict[str, Any]) -> list[str]:
    made = stairs.draw(content)
    assert [picture.why_not for picture in made if picture.why_not] == []
    return [picture.markup for picture in made]


@pytest.mark.parametrize("run", sorted(CLIMBS))
def test_any_content_is_drawn_or_left_out(run: str) -> None:
    pictures = shown(CLIMBS[run]())
    assert len(pictures) == (0 if run in ("nulls", "nothing") else 2)
    assert not any(re.search(r"\b(nan|inf)\b", text.lower()) for markup in pictures for text in texts(markup))


def boxes(markup: str, colour: str) -> list[tuple[float, float, float]]:
    """Left edge, width and height of the solid rectangles of a colour."""
    found = re.findall(rf'<path d="M ([\d.]+) ([\d.]+) L ([\d.]+) [\d.]+ L [\d.]+ ([\d.]+) [^"]*"[^>]*'
                       rf'style="fill: {colour}"', markup)  # fmt: skip
    return [(float(x), float(right) - float(x), abs(float(y) - float(end))) for x, y, right, end in found]


def test_steps_rise_by_what_they_gain_and_failures_do_not() -> None:
    wide = shown(CLIMBS["climbed"]())[0]
    ((_, _, naive),), ((_, _, top),) = boxes(wide, "#8f9aa5"), boxes(wide, "#2a9d74")
    assert top / naive == pytest.approx(743 / 98, rel=0.01)
    risers = [height for _, _, height in boxes(wide, "#2f6fb5")]
    assert len(risers) == 5 and naive + sum(risers) == pytest.approx(top, rel=0.01)
    assert risers[0] / naive == pytest.approx(743 / 183 - 1, rel=0.01)


def test_on_a_phone_each_attempt_is_a_row_with_its_reason() -> None:
    narrow = shown(CLIMBS["climbed"]())[1]
    lengths = [width for _, width, _ in boxes(narrow, "#2f6fb5")]
    ((_, naive, _),) = boxes(narrow, "#8f9aa5")
    assert len(lengths) == 5 and lengths == sorted(lengths)
    assert lengths[0] / naive == pytest.approx(743 / 183, rel=0.01)
    said = texts(narrow)
    assert "rolled back: not faster within the noise" in said and narrow.count("url(#stairs-narrow-h") == 2


def test_names_gains_reasons_and_ceilings_are_said() -> None:
    said = texts(shown(CLIMBS["climbed"]())[0])
    assert {"naive", "top", "workers", "-560 ms", "1,399", "345", "predicted before it was tried",
            "replayed batches 2,697", "resident batch 2,720", "layout, rolled back: not faster within the noise"
            } <= set(said)  # fmt: skip
    assert said.count("rolled back") == 3


def test_the_top_stands_under_its_own_ceilings_where_they_are_known() -> None:
    above = CLIMBS["climbed"]() | {"ceilings_top_samples_per_s": {"replayed": 3100.0, "resident": None}}
    for markup in shown(above):
        assert any("replayed batches 3,100" in text for text in texts(markup))
        assert not any("2,697" in text for text in texts(markup)), "with other arithmetic it may be above the start's"
    assert "replayed batches 3,100" in stairs.words(above) and "2,720" in stairs.words(CLIMBS["climbed"]())


def test_every_prediction_has_a_mark_beside_the_legend_s() -> None:
    content = CLIMBS["climbed"]()
    for markup in shown(content):
        assert markup.count("fill: #e8a317; stroke") >= 9
    fewer = climb([rung("amp", 743, 200, predicted=None)], 543.0)
    assert shown(fewer)[0].count("<use") < shown(content)[0].count("<use")


def test_of_many_reasons_some_are_said_and_the_rest_counted() -> None:
    content = climb([rung(f"r{index}", 743, 1, kept=False) for index in range(15)], 743.0)
    said = texts(shown(content)[0])
    assert len([text for text in said if ", rolled back: " in text]) == 12 and "and 3 more, in the table" in said


def test_the_picture_in_words() -> None:
    said = stairs.words(CLIMBS["climbed"]())
    assert said.startswith("Samples per second: naive 345, workers 1,399,") and "layout 2,116 (rolled back)" in said
