"""How many workers keep up, and whether they pay, from the times of batches."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fastloop.feeds.workers.pace import Left, Pace


def pace(workers: int, waited_ms: float, took_ms: float, batches: int | None = None) -> Pace:
    found = Pace(workers)
    for _ in range(workers + 2 * max(4, workers) if batches is None else batches):
        found.note(waited_ms / 1e3, took_ms / 1e3)
    return found


@pytest.mark.parametrize(
    ("seen", "most", "left", "expected"),
    [
        (pace(4, 130, 180), 15, Left(1000, 1000), (15, True)),  # needs 4 * 180 / 50 = 14.4
        (pace(4, 130, 180), 7, Left(1000, 1000), (7, True)),
        (pace(4, 80, 180), 15, Left(1000, 1000), (11, True)),  # 7.2 keep up with steps of 100 ms
        (pace(4, 20, 180), 15, Left(1000, 1000), None),  # waits too little
        (pace(4, 130, 180), 4, Left(1000, 1000), None),  # may not have more
        (pace(4, 130, 180), 15, Left(), (15, True)),  # unknown lengths
        # It saves 130 ms a batch and costs 15 starts of 50 ms; it must pay twice.
        (pace(4, 130, 180), 15, Left(12, 12), (15, True)),
        (pace(4, 130, 180), 15, Left(11, 11), None),
        (pace(4, 130, 180), 15, Left(11, 1000), (15, False)),
        (pace(4, 130, 180), 15, Left(11, None), (15, False)),
        (pace(4, 43, 60, batches=11), 15, Left(1000, 1000), None),  # the first of each worker do not count
        (pace(4, 175, 190, batches=8), 15, Left(1000, 1000), (15, True)),  # unless a round was waited for long
        (pace(4, 174, 190, batches=8), 15, Left(1000, 1000), None),
        (pace(4, 650, 900, batches=7), 15, Left(1000, 1000), None),  # and a whole one
        (pace(4, 650, 900, batches=9), 15, Left(1000, 1000), None),
        (pace(1, 200, 200), 3, Left(1000, 1000), (3, True)),  # steps of no time at all
    ],
)
def test_more_start_where_they_pay(seen: Pace, most: int, left: Left, expected: Any) -> None:
    assert seen.find_more(most, left, loses=False) == expected


@pytest.mark.parametrize(("batches", "counts"), [(8, False), (7, True), (None, False)])
def test_the_start_of_an_epoch_does_not_count_where_there_is_more(batches: int | None, counts: bool) -> None:
    seen = pace(4, 0, 100)
    seen.begin_epoch(batches)
    for took_s in (0.9, 0.9, 0.9, 0.9, *[0.1] * 4):
        seen.note(0.0, took_s)
    assert seen.batch_s == pytest.approx(0.5 if counts else 0.1)


def test_batches_that_are_made_again_have_to_pay_too() -> None:
    """A batch of each of the old workers, 720 ms, besides the starts."""
    assert pace(4, 130, 180).find_more(15, Left(23, 23), loses=True) == (15, True)
    assert pace(4, 130, 180).find_more(15, Left(22, 22), loses=True) is None


def test_what_was_ready_before_it_was_asked_for_does_not_count() -> None:
    seen = Pace(2, ready=6)
    for waited_s in (*[0.0] * 6, *[0.1] * 7):
        seen.note(waited_s, 0.1)
    assert seen.batch_s is None, "seven of eight"
    seen.note(0.1, 0.1)
    assert seen.step_s == 0.0


def test_a_pace_forgets_what_is_long_ago() -> None:
    seen = pace(4, 130, 180)
    assert seen.batch_s == pytest.approx(0.18) and seen.step_s == pytest.approx(0.05)
    for _ in range(10):
        seen.note(0.0, 0.05)
    assert seen.batch_s == pytest.approx(0.05) and seen.find_more(15, Left(), loses=False) is None


@pytest.mark.parametrize(("batches", "is_known"), [(8, False), (49, False), (50, True), (90, True)])
def test_a_pace_is_that_of_half_a_second(batches: int, is_known: bool) -> None:
    """Eight batches of a fast loader are over in the time of one hiccup."""
    seen = Pace(2)
    for _ in range(2 + batches):
        seen.note(0.004, 0.0101)
    assert (seen.batch_s is not None) is is_known
    assert not is_known or (seen.batch_s, seen.step_s) == pytest.approx((0.0101, 0.0061))
    assert len(seen._spans) <= 51


def test_workers_that_stay_start_for_the_next_epoch_too() -> None:
    seen = pace(4, 130, 180)
    assert seen.find_more(15, Left(5, 1000), loses=False) == (15, False)
    assert seen.find_more(15, Left(5, 1000), loses=False, stay=True) == (15, True)
    assert seen.find_more(15, Left(5, None), loses=False, stay=True) == (15, True)
    assert seen.find_more(15, Left(5, 11), loses=False, stay=True) is None


def test_a_limit_below_zero_batches_is_none() -> None:
    assert pace(2, 100, 100).find_more(4, Left(0, 0), loses=False) is None
    assert pace(2, 100, 100).find_more(4, Left(0, math.ceil(1e6)), loses=False) == (4, False)
