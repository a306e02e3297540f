"""How long the trainings of a climb are."""

from __future__ import annotations

import pytest

from fastloop.commands.lengths import FEWEST_STEPS, LEAST_WARMUP, LONGEST_S, QUEUES, WINDOW_S, Length, length

PLAIN = {"queued": 0, "batches_per_step": 1.0, "warmup": 20}


@pytest.mark.parametrize(("step_ms", "warmup", "window"), [(750, 4, 15), (40, 20, 100), (1600, 3, 15), (5, 20, 800)])
def test_a_window_is_long_enough_and_no_longer(step_ms: float, warmup: int, window: int) -> None:
    assert length(step_ms, step_ms, **PLAIN) == Length(warmup=warmup, window=window)


def test_the_queues_decide_where_they_are_long() -> None:
    found = length(40, 130, queued=18, batches_per_step=4, warmup=20)
    assert found.window >= QUEUES * 18 / 4 and found.warmup >= 18 / 4
    assert length(2000, 2000, queued=100, batches_per_step=1, warmup=1).warmup == 100, "the window opens no earlier"


def test_a_slow_arm_does_not_pay_for_a_fast_one() -> None:
    found = length(10, 1000, queued=64, batches_per_step=1, warmup=20)
    assert found.window == LONGEST_S and length(10, 9000, **PLAIN).window == FEWEST_STEPS
    assert length(10, 10, **PLAIN).window * 10 / 1e3 >= WINDOW_S


def test_less_warm_up_than_compiling_takes_is_not_done() -> None:
    assert length(100, 100, queued=0, batches_per_step=1, warmup=0).warmup == LEAST_WARMUP


def test_seconds_count_the_start() -> None:
    assert Length(warmup=4, window=15).steps == 20
    assert Length(warmup=4, window=15).seconds(500, 12) == 22
