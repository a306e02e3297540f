"""How long the trainings of a climb are."""

from __future__ import annotations

import pytest

from fastloop.experiments.climb.budget import (
    FEWEST_STEPS,
    FILL_S,
    FILLS,
    LEAST_WARMUP,
    LONGEST_S,
    QUEUES,
    SCREEN_S,
    WINDOW_S,
    Length,
    choose_length,
    estimate_gradient_s,
)

PLAIN = {"queued": 0, "batches_per_step": 1.0, "warmup": 20}


@pytest.mark.parametrize(("step_ms", "warmup", "window"), [(750, 4, 10), (40, 20, 100), (1600, 3, 10), (5, 20, 800)])
def test_a_window_is_long_enough_and_no_longer(step_ms: float, warmup: int, window: int) -> None:
    assert choose_length(step_ms, step_ms, **PLAIN) == Length(warmup=warmup, window=window)


def test_the_queues_decide_where_they_are_long() -> None:
    found = choose_length(40, 130, queued=18, batches_per_step=4, warmup=20)
    assert found.window >= QUEUES * 18 / 4 and found.warmup >= 18 / 4
    assert choose_length(2000, 2000, queued=100, batches_per_step=1, warmup=1).warmup == 100, (
        "the window opens no earlier"
    )


def test_a_slow_arm_does_not_pay_for_a_fast_one() -> None:
    found = choose_length(10, 1000, queued=64, batches_per_step=1, warmup=20)
    assert found.window == LONGEST_S and choose_length(10, 9000, **PLAIN).window == FEWEST_STEPS
    assert choose_length(10, 10, **PLAIN).window * 10 / 1e3 >= WINDOW_S


def test_a_screen_of_two_that_are_far_apart_is_short() -> None:
    """Naive steps of a second beside some of 160 ms, 16 batches in the queues, four batches a step."""
    far = {"queued": 16, "batches_per_step": 4.0, "warmup": 20}
    assert choose_length(160, 1000, **far).window == QUEUES * 16 / 4
    assert choose_length(160, 1000, screen=True, fill_read=True, **far).window == SCREEN_S
    assert choose_length(160, 1000, screen=True, fill_read=False, **far).window == QUEUES * 16 / 4, (
        "queues nobody can read"
    )
    near = {"queued": 0, "batches_per_step": 1.0, "warmup": 20}
    assert choose_length(95, 100, screen=True, **near) == choose_length(95, 100, **near), (
        "nothing is saved where it is close"
    )


@pytest.mark.parametrize("queued", [16, 24, 32])
def test_queues_turn_over_in_a_screen_too(queued: int) -> None:
    found = choose_length(100, 1000, queued=queued, batches_per_step=1.0, warmup=5, screen=True, fill_read=True)
    assert found.window == min(FILLS * queued, LONGEST_S) and found.warmup == FILL_S
    proof = choose_length(100, 1000, queued=queued, batches_per_step=1.0, warmup=5, screen=False, fill_read=True)
    assert proof.window == LONGEST_S, "a confirmation keeps its rule"
    assert choose_length(100, 1000, queued=queued, batches_per_step=1.0, warmup=5).warmup == queued, (
        "queues nobody can read"
    )
    fast = choose_length(100, 110, queued=queued, batches_per_step=1.0, warmup=5, screen=True, fill_read=True)
    assert fast.warmup == queued, "and where it takes no longer"


def test_less_warm_up_than_compiling_takes_is_not_done() -> None:
    assert choose_length(100, 100, queued=0, batches_per_step=1, warmup=0).warmup == LEAST_WARMUP


def test_seconds_count_the_start() -> None:
    assert Length(warmup=4, window=15).steps == 20
    assert Length(warmup=4, window=15).seconds(500, 12) == 22
    assert 12 + 6 * 0.5 <= estimate_gradient_s(500, 12) <= 12 + 12 * 0.5
