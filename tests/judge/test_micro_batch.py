"""Which micro-batches are tried, what they are expected to take, and which is chosen."""

from __future__ import annotations

import pytest

from fastloop.judge.micro_batch import are_last_two_slower, choose_size, list_sizes, predict_bytes


def test_sizes_divide_the_step() -> None:
    assert list_sizes(8, 1) == [1, 2, 4, 8]
    assert list_sizes(6, 4) == [1, 2, 3, 6, 12, 24]


def test_memory_is_a_line_through_the_largest_that_ran() -> None:
    """Small sizes may lie above it: what libraries take once is in their peak."""
    assert predict_bytes({}, 8) is None and predict_bytes({4: 100}, 8) is None
    assert predict_bytes({4: 100, 8: 140}, 16) == 220
    assert predict_bytes({2: 500, 4: 100, 8: 140}, 32) == 380
    assert predict_bytes({4: 140, 8: 140}, 16) == 140 == predict_bytes({4: 150, 8: 140}, 16)


@pytest.mark.parametrize(
    ("rates", "own", "best"),
    [
        ({8: 100.0, 16: 101.0, 32: 101.5}, 8, 8),
        ({8: 100.0, 16: 199.0, 32: 200.0, 64: 200.0}, 8, 16),
        ({8: 100.0, 16: 150.0, 32: 120.0}, 8, 16),
        ({2: 99.0, 4: 130.0, 8: 100.0}, 8, 4),
        ({2: 130.0, 4: 130.0, 8: 100.0}, 8, 4),
        ({2: 50.0}, 8, 2),
    ],
)
def test_the_knee(rates: dict[int, float], own: int, best: int) -> None:
    assert choose_size(rates, own) == best


def test_two_in_a_row_that_are_slower_end_it() -> None:
    assert are_last_two_slower([100.0, 90.0, 80.0]) and not are_last_two_slower([100.0, 90.0])
    assert not are_last_two_slower([100.0, 90.0, 99.0])
