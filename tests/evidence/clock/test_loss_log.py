"""The loss of every optimizer step: order, means and thinning."""

from __future__ import annotations

import pytest
import torch

from fastloop.evidence.clock.loss_log import MOST_POINTS, LossLog


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(float(value))


def test_one_batch_a_step_in_order() -> None:
    log = LossLog()
    for value in range(200):
        log.add(scalar(value), step_ends=True, batches_per_step=1)
    assert log.values() == tuple(float(value) for value in range(200))
    assert log.every == 1


def test_accumulation_gives_the_mean_of_the_window() -> None:
    log = LossLog()
    for raw in (1.0, 3.0, 5.0, 7.0, 2.0, 4.0):  # Lightning hands the loss over divided by the batches of a step
        log.add(scalar(raw / 2), step_ends=raw in (3.0, 7.0, 4.0), batches_per_step=2)
    assert log.values() == (2.0, 6.0, 3.0)


def test_a_short_last_window_has_its_own_mean() -> None:
    log = LossLog()
    for index, raw in enumerate((4.0, 8.0, 12.0, 16.0, 20.0)):
        log.add(scalar(raw / 4), step_ends=index in (3, 4), batches_per_step=4)
    assert log.values() == (10.0, 20.0)


def test_an_unfinished_window_is_no_point() -> None:
    log = LossLog()
    log.add(scalar(1.0), step_ends=True, batches_per_step=1)
    log.add(scalar(2.0), step_ends=False, batches_per_step=2)
    assert log.values() == (1.0,)


def test_steps_without_a_loss_are_left_out() -> None:
    log = LossLog()
    log.add(None, step_ends=True, batches_per_step=1)
    log.add(scalar(2.0), step_ends=True, batches_per_step=1)
    assert log.values() == (2.0,)
    assert LossLog().values() == ()


def test_a_loss_of_shape_1_and_of_half_precision() -> None:
    log = LossLog()
    log.add(torch.tensor([1.5]), step_ends=True, batches_per_step=1)
    log.add(torch.tensor([2.5]), step_ends=True, batches_per_step=1)
    assert log.values() == (1.5, 2.5)
    log = LossLog()
    log.add(torch.tensor(1.5, dtype=torch.bfloat16), step_ends=True, batches_per_step=1)
    assert log.values() == (1.5,)


@pytest.mark.parametrize("steps", [10_000, 10_001, 10_048, 12_345, 25_000, 45_678])
def test_thinning_keeps_every_nth_step(steps: int) -> None:
    log = LossLog()
    points = torch.arange(steps, dtype=torch.float32)
    for point in points:
        log.add(point, step_ends=True, batches_per_step=1)
    values = log.values()
    assert len(values) <= MOST_POINTS
    assert list(values) == [float(step) for step in range(0, steps, log.every)]
    assert log.every == {10_000: 1, 10_001: 2, 10_048: 2, 12_345: 2, 25_000: 4, 45_678: 8}[steps]


def test_asking_for_values_changes_nothing() -> None:
    log = LossLog()
    for value in range(30):
        log.add(scalar(value), step_ends=True, batches_per_step=1)
        log.values()
    assert log.values() == tuple(float(value) for value in range(30))
