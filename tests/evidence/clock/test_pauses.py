"""Single long steps among all others."""

from __future__ import annotations

import pytest

from fastloop.evidence.clock.sampling import MOST_PAUSES, PAUSE, Pauses, find_pauses


def test_one_long_step_and_what_it_adds_to_the_mean() -> None:
    one, two = find_pauses([0.01] * 57 + [0.21]), find_pauses([0.01] * 57 + [0.21, 0.11])
    assert one is not None and one.steps == 1 and one.s_per_step == pytest.approx(0.2 / 58)
    assert two is not None and two.steps == 2 and two.s_per_step == pytest.approx(0.3 / 59)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [0.01] * 5 + [0.2],
        [0.01] * 60,
        [0.01] * 57 + [0.01 * PAUSE],
        [0.01] * 57 + [0.2] * (MOST_PAUSES + 1),
        [0.01, 0.3] * 20,
        [0.01] * 50 + [0.2, 0.15, 0.12, 0.1, 0.08],
    ],
    ids=["none", "too_few", "even", "not_far", "comes_again", "every_second", "uneven"],
)
def test_steps_without_a_single_pause(steps: list[float]) -> None:
    assert find_pauses(steps) is None


def test_at_most_so_many_and_beside_ordinary_unrest() -> None:
    found = find_pauses([0.01] * 57 + [0.06] * 5 + [0.9] * MOST_PAUSES)
    assert isinstance(found, Pauses) and found.steps == MOST_PAUSES
