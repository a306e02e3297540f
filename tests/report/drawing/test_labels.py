"""Texts that fit, and colours that differ."""

from __future__ import annotations

import pytest

from fastloop.report.drawing import labels
from tests.report.made_experiments import JAPANESE, LONG


@pytest.mark.parametrize(
    "text", [LONG, 2 * JAPANESE, "a" * 500, "e\u0301" * 300], ids=["long", "wide", "letters", "marks"]
)
@pytest.mark.parametrize("room", [40.0, 90.0, 200.0])
def test_what_is_too_long_is_cut_in_the_middle(text: str, room: float) -> None:
    said = labels.fit(text, room)
    assert labels.measure_width(said) <= room and "\u2026" in said
    assert said.startswith(text[:1]) and said.endswith(text[-1:])
    assert labels.measure_width(said) > room - 25, "it uses the room there is"


def test_what_fits_stays_as_it_is() -> None:
    assert labels.fit("amp", 40) == "amp" and labels.fit(" two \n lines\x00 ", 100) == "two lines"


def test_east_asian_letters_are_wider_and_marks_take_no_room() -> None:
    assert labels.measure_width(JAPANESE[:4]) > 1.5 * labels.measure_width("abcd")
    assert labels.measure_width("e\u0301") == labels.measure_width("e")


def test_arms_differ_in_colour_and_shape() -> None:
    assert (
        len({labels.choose_colour(index) for index in range(8)})
        == len({labels.choose_marker(index) for index in range(8)})
        == 8
    )
    assert labels.choose_colour(0) not in {labels.choose_colour(index) for index in range(1, 30)}, (
        "grey is the base's alone"
    )
