"""What a busy GPU is busy with. The findings made of it are tested in test_device.py."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.diagnose.gpu_use import classify_use, compare_with_copy, find_culprit, sum_products
from fastloop.records.measurement import Measurement
from tests.diagnose.scenes import gpt2_naive, gpt2_tuned, resnet50_resident, with_trace


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (gpt2_naive(), "fp32_math"),
        (gpt2_tuned(), "well_used"),
        (resnet50_resident(), "memory_bound"),
        (gpt2_tuned(mfu={"datasheet": 0.34}), "slow"),
        (gpt2_tuned(mfu={}, gpu={}), None),
        (Measurement(), None),
    ],
    ids=["gpt2 naive", "gpt2 tuned", "resnet50 resident", "low MFU", "nothing known", "empty"],
)
def test_use(seen: Measurement, expected: str | None) -> None:
    assert classify_use(seen) == expected


def test_products_in_a_trace_are_fp32_math_where_the_work_was_not_counted() -> None:
    for gemm, expected in ((51.0, "fp32_math"), (49.0, "slow")):
        assert classify_use(with_trace(gpt2_naive(mfu={}), 100.0, {}, {"gemm": gemm})) == expected


def test_bandwidth_is_held_against_what_a_copy_reaches() -> None:
    assert compare_with_copy(resnet50_resident()) == pytest.approx(0.55 * 4.8 / 4.3)
    assert compare_with_copy(resnet50_resident(peaks={"dram_tb_per_s": 4.8})) is None


@pytest.mark.parametrize(
    ("families", "name"),
    [
        ({"optimizer": 15.0}, "optimizer"),
        ({"optimizer": 14.0}, None),
        ({"attention": 30.0}, "attention"),
        ({"attention": 29.0}, None),
        ({"elementwise": 16.0, "normalisation": 15.0}, "elementwise"),
        ({"elementwise": 29.0}, None),
        ({"optimizer": 20.0, "attention": 40.0}, "attention"),
    ],
)
def test_a_family_is_the_culprit_from_its_share_on(families: dict[str, Any], name: str | None) -> None:
    found = find_culprit(with_trace(gpt2_tuned(), 100.0, {}, families))
    assert (found.cause if found else None) == name


@pytest.mark.parametrize(("none", "cause"), [(True, None), (False, "32-bit_math")])
def test_a_step_without_products_is_not_slow_because_of_their_precision(none: bool, cause: str | None) -> None:
    found = find_culprit(gpt2_naive(mfu={}, flops={"per_sample": None, "no_products": none}))
    assert (found.cause if found else None) == cause


@pytest.mark.parametrize(("at_least", "cause"), [(True, "32-bit_math"), (False, None)])
def test_few_products_in_a_part_of_the_step_do_not_mean_few_in_all(at_least: bool, cause: str | None) -> None:
    found = find_culprit(gpt2_naive(mfu={"dtype_in_use": 0.01}, flops={"per_sample": 1e6, "at_least": at_least}))
    assert (found.cause if found else None) == cause


def test_shares_of_products_never_exceed_the_whole() -> None:
    assert sum_products(with_trace(gpt2_tuned(), 100.0, {}, {"gemm": 80.0, "attention": 70.0})) == 1.0
    assert sum_products(gpt2_tuned()) == 0.0
