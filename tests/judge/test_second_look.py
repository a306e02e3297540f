"""When steps are looked at again, and what batches with a rung and without say."""

from __future__ import annotations

import random

import pytest

from fastloop.judge.second_look import Timed, TimedComparison, compare, is_suspicious
from fastloop.records.plan import Rehearsed

PROMISED = Rehearsed(eager_ms=177.0, changed_ms=48.0, of_batch=True)


def alike(*ms: float, size: int = 100) -> list[Timed]:
    return [Timed(each, size) for each in ms]


@pytest.mark.parametrize(
    ("seen", "promised", "suspicious"),
    [
        (alike(*[160, 200] * 4), PROMISED, True),
        (alike(*[60, 70] * 4), PROMISED, False),
        (alike(*[110, 120] * 4), PROMISED, False),  # far above the promise, and still much gained
        (alike(60, 60, 60, 60, 60, 900, 900, 60), PROMISED, False),  # pauses
        (alike(5, 5, 5, 900, 900, 900, 900, 900), PROMISED, True),
        (alike(0, 0, 0, *[180] * 5), PROMISED, False),  # a queue that fills: the mean
        (alike(*[180] * 4), PROMISED, False),  # too few
        (alike(*[180] * 8), Rehearsed(eager_ms=177.0, changed_ms=48.0), False),  # of some calls only
        (alike(*[180] * 8), Rehearsed(of_batch=True), False),
        ([Timed(180.0, 400)] * 8, PROMISED, False),  # four times as large: 45 ms for as much
        ([Timed(180.0, 25)] * 8, PROMISED, True),  # a smaller one has no reason to take longer
        ([Timed(180.0, 0)] * 8, PROMISED, True),  # sizes are not known
        (alike(*[0.9] * 8), Rehearsed(eager_ms=0.3, changed_ms=0.2, of_batch=True), False),  # less than a millisecond
    ],
)
def test_a_broken_promise(seen: list[Timed], promised: Rehearsed, suspicious: bool) -> None:
    assert is_suspicious(seen, promised, 100) is suspicious


@pytest.mark.parametrize(("steps_left", "suspicious"), [(None, False), (999, False), (1_000, True)])
def test_a_long_run_looks_at_smaller_excesses(steps_left: int | None, suspicious: bool) -> None:
    promised = Rehearsed(eager_ms=51.0, changed_ms=50.0, of_batch=True)
    assert is_suspicious(alike(*[69] * 8), promised, 100, steps_left) is suspicious
    assert not is_suspicious(alike(*[55] * 8), promised, 100, steps_left)


def test_slower_beyond_doubt() -> None:
    found = compare(alike(181, 175, 190, 160, 200, 185, 179, 2000), alike(127, 120, 130, 140, 125, 128, 126, 900))
    assert found is not None and found.is_slower and found.n == 8
    assert 30 < found.low_ms < found.high_ms < 100, "single pauses in either do not count"
    assert str(found).startswith("forward and backward take 183 ms with it, 128 ms without it (8 batches each, slower")


@pytest.mark.parametrize(
    ("with_it", "without"),
    [
        (alike(*[60] * 8), alike(*[127] * 8)),
        (alike(*[133] * 8), alike(*[127] * 8)),  # certain, and too little
        (alike(*[1.5] * 8), alike(*[1.1] * 8)),  # certain, and of no account
        (alike(50, 60, 400, 500, 55, 450, 70, 60), alike(*[52, 62] * 4)),  # much, and uncertain
    ],
)
def test_not_slower(with_it: list[Timed], without: list[Timed]) -> None:
    found = compare(with_it, without)
    assert found is not None and not found.is_slower


def test_too_few_are_not_compared() -> None:
    assert compare(alike(*[200] * 4), alike(*[100] * 8)) is None


def test_larger_batches_are_no_fault_of_a_rung() -> None:
    """Proportional times, by chance larger batches with the rung; the control has them smaller, and as slow."""
    large, small = [Timed(200.0, 200)] * 8, [Timed(100.0, 100)] * 8
    assert not _slower(large, small)
    assert _slower([Timed(200.0, 100)] * 8, [Timed(100.0, 200)] * 4 + [Timed(90.0, 100)] * 4)
    assert not _slower([Timed(100.0, 50)] * 8, [Timed(100.0, 100)] * 8), "nor is a cost that no size explains"


def _slower(with_it: list[Timed], without: list[Timed]) -> bool:
    found = compare(with_it, without)
    assert isinstance(found, TimedComparison)
    return found.is_slower


def test_of_two_hundred_honest_and_noisy_rungs_hardly_one_is_called_slower() -> None:
    """And nine of ten that take half as long again are."""
    draw, called = random.Random(0), {1.0: 0, 1.5: 0}
    for slower in called:
        for _ in range(200):
            times = [[draw.gauss(100, 10) + 300 * (draw.random() < 0.05) for _ in range(8)] for _ in range(2)]
            called[slower] += _slower(alike(*[slower * ms for ms in times[0]]), alike(*times[1]))
    assert called[1.0] <= 1 and called[1.5] > 170
