"""Numbers out of a measurement that may lack any of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from fastloop.records.measurement import CEILINGS, Measurement
from fastloop.records.readings import (
    compute_gain_pct,
    count_micro_batches,
    is_beyond,
    list_syncing_lines,
    read_activity,
    read_family_shares,
    read_precision,
    read_step_ms,
    read_trace,
    to_number,
)
from tests.diagnose.scenes import cifar10_launches, with_trace


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.0, 0.0),
        (-0.1, None),
        (math.nan, None),
        (math.inf, None),
        (None, None),
        ("5", None),
        (True, None),
    ],
)
def test_a_number_or_none(value: Any, expected: float | None) -> None:
    assert to_number(value) == expected


@pytest.mark.parametrize("mean", [None, 0.0, -1.0, math.nan])
def test_a_step_that_is_none(mean: float | None) -> None:
    assert read_step_ms(Measurement(step_ms={"mean": mean})) is None and read_step_ms(Measurement(step_ms={})) is None


@pytest.mark.parametrize(
    ("traced", "there"),
    [
        (None, False),
        ({}, False),
        ({"skipped": "taken", "busy_ms": 1.0}, False),
        ({"busy_ms": 0.0}, False),
        ({"busy_ms": 1.0}, True),
    ],
)
def test_a_trace_that_was_skipped_is_none(traced: Any, there: bool) -> None:
    assert (read_trace(Measurement(kernels=traced)) is not None) is there


def test_families_are_shares_of_the_busy_time() -> None:
    seen = with_trace(cifar10_launches(), 4.0, {}, {"gemm": 1.0, "copy": 8.0, "nccl": None})
    assert read_family_shares(seen) == {"gemm": 0.25, "copy": 1.0} and read_family_shares(cifar10_launches()) == {}


@pytest.mark.parametrize(
    ("whole", "batch", "world", "count"),
    [
        (64, 8, 1, 8),
        (64, 8, 2, 4),
        (64, 64, 1, 1),
        (None, 8, 1, 1),
        (64, None, 1, 1),
        (8, 64, 1, 1),
    ],
)
def test_micro_batches_of_a_step(whole: Any, batch: Any, world: int, count: int) -> None:
    assert count_micro_batches(Measurement(global_batch=whole, micro_batch=batch, world_size=world)) == count


def test_the_counters_are_believed_before_nvml() -> None:
    assert read_activity(Measurement(gpu={"gr_active_pct": 54.0, "nvml_busy_pct": 99.0})) == (54.0, "counters")
    assert read_activity(Measurement(gpu={"nvml_busy_pct": 99.0})) == (99.0, "nvml")
    assert read_activity(Measurement())[0] is None


def test_lines_that_cost_come_first_and_rare_ones_not_at_all() -> None:
    often, dear, rare = ({"per_step": 1.0}, {"per_step": 0.1, "ms_per_step": 3.0}, {"per_step": 0.1})
    assert list_syncing_lines(Measurement(syncs=(often, rare, dear))) == [dear, often]


@pytest.mark.parametrize(
    ("rate", "now", "gain"),
    [
        (150.0, 100.0, 50.0),
        (90.0, 100.0, 0.0),
        (None, 100.0, None),
        (89.0, 100.0, None),
        (150.0, None, None),
        (150.0, 0.0, None),
    ],
)
def test_a_measured_gain(rate: Any, now: Any, gain: float | None) -> None:
    found = compute_gain_pct(Measurement(ceilings={"replayed": rate}, samples_per_s=now), "replayed")
    assert found == (None if gain is None else pytest.approx(gain))


@pytest.mark.parametrize(
    ("peaks", "named", "expected"),
    [
        ({"dtype": "fp32"}, "32-true", "fp32"),
        ({"dtype": "tf32"}, "32-true", "tf32"),
        ({"dtype": "bf16"}, None, "mixed"),
        ({"dtype": "fp32 + tf32"}, "32-true", "tf32"),
        ({}, "32-true", "fp32"),
        ({}, "bf16-mixed", "mixed"),
        ({"convolution_tf32": True}, "32-true", "tf32"),
        ({}, "64-true", "fp64"),
        ({}, None, None),
    ],
)
def test_the_numbers_of_products(peaks: Any, named: Any, expected: str | None) -> None:
    assert read_precision(Measurement(peaks=peaks, precision=named)) == expected


def test_tensor_cores_that_never_ran_show_fp32() -> None:
    seen = {"peaks": {"convolution_tf32": True, "dtype": None}, "precision": "32-true"}
    assert read_precision(Measurement(**seen, gpu={"tensor_active_pct": 0.0})) == "fp32"
    assert read_precision(Measurement(**seen, gpu={"tensor_active_pct": 12.0})) == "tf32"


@pytest.mark.parametrize(
    ("parts", "rate", "beyond"),
    [
        ({"data_wait": 1.0}, 118.0, False),
        ({"data_wait": 1.0}, 121.0, True),
        ({"data_wait": 80.0}, 500.0, False),
        ({"data_wait": 40.0, "epoch_gap": 40.0}, 500.0, False),
        ({"data_wait": 1.0}, 50.0, False),
        ({"data_wait": None}, 500.0, False),
        ({"data_wait": 1.0}, None, False),
    ],
)
def test_a_trial_saves_no_more_than_it_takes_away(parts: dict[str, Any], rate: Any, beyond: bool) -> None:
    seen = Measurement(step_ms={"mean": 100.0}, parts_ms=parts, samples_per_s=100.0, ceilings={"replayed": rate})
    assert is_beyond(seen, "replayed") is beyond and (compute_gain_pct(seen, "replayed") is None) is (
        beyond or rate is None or rate < 90
    )


def test_each_trial_takes_away_its_own_and_ranks_wait_in_their_backward() -> None:
    seen = Measurement(
        step_ms={"mean": 100.0},
        parts_ms={"data_wait": 1.0, "h2d": 45.0, "backward": 40.0},
        samples_per_s=100.0,
        ceilings=dict.fromkeys(CEILINGS, 200.0),
    )
    assert [name for name in CEILINGS if is_beyond(seen, name)] == ["replayed"]
    assert not any(is_beyond(dataclasses.replace(seen, world_size=2), name) for name in CEILINGS)
