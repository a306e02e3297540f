"""TFLOP/s and MFU of runs whose figures are known."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.evidence.gpu.efficiency import add_work
from fastloop.records.measurement import Measurement
from fastloop.records.trial import DeviceRates

pytestmark = pytest.mark.short

H200 = "NVIDIA H200"
GPT2 = {"per_sample": 36.1e12 / 40, "matmul": 33.1e12 / 40, "attention": 3e12 / 40, "convolution": 0.0}
RESNET = {"per_sample": 24e9, "convolution": 23e9, "matmul": 1e9, "attention": 0.0}


def seen(**given: Any) -> Measurement:
    run = {"device": "cuda", "device_name": H200, "precision": "32-true", "samples_per_s": 40.0}
    return Measurement(**{**run, **given})


def test_gpt2_in_plain_float32() -> None:
    """Naive gpt2 on an H200: busy, and at 3.7 % of what the chip's bf16 units do."""
    found = add_work(seen(flops=GPT2, peaks={"matmul_tf32": False, "convolution_tf32": True}))
    assert found.tflop_per_s == pytest.approx(36.1)
    assert found.mfu["datasheet"] == pytest.approx(0.0365, abs=1e-4)
    assert found.mfu["dtype_in_use"] == pytest.approx(0.54, abs=2e-3), "no convolution in it: all of it is fp32"
    assert found.mfu["measured_peak"] is None and found.peaks["measured_tflop_per_s"] is None
    assert found.peaks["dtype"] == "fp32" and found.peaks["dtype_tflop_per_s"] == 67
    assert (found.peaks["datasheet_tflop_per_s"], found.peaks["dram_tb_per_s"]) == (989, 4.8)
    assert found.peaks["matmul_tf32"] is False and found.state == ()


def test_bf16_is_measured_by_its_own_peak() -> None:
    found = add_work(seen(flops=GPT2, precision="bf16-mixed"))
    assert found.peaks["dtype"] == "bf16" and found.mfu["dtype_in_use"] == found.mfu["datasheet"]


def test_resnet50_is_a_mix_of_two_dtypes() -> None:
    """By default cuDNN may use TF32 and cuBLAS may not: each part of the work at its own peak."""
    found = add_work(seen(flops=RESNET, samples_per_s=1000.0, peaks={"matmul_tf32": False, "convolution_tf32": True}))
    peak = 1 / ((23 / 24) / 494.5 + (1 / 24) / 67)
    assert found.peaks["dtype"] == "fp32 + tf32" and found.peaks["dtype_tflop_per_s"] == pytest.approx(peak)
    assert found.tflop_per_s == pytest.approx(24.0) and found.mfu["dtype_in_use"] == pytest.approx(24 / peak)
    for flags, dtype in (((True, True), "tf32"), ((False, False), "fp32")):
        plain = add_work(seen(flops=RESNET, peaks=dict(zip(("matmul_tf32", "convolution_tf32"), flags, strict=True))))
        assert plain.peaks["dtype"] == dtype


def test_of_two_ranks_each_does_its_own_half() -> None:
    flags = {"matmul_tf32": False, "convolution_tf32": False}
    one, two = add_work(seen(flops=GPT2, peaks=flags)), add_work(seen(flops=GPT2, peaks=flags, world_size=2))
    assert two.tflop_per_s == pytest.approx((one.tflop_per_s or 0.0) / 2)
    assert two.mfu["datasheet"] == pytest.approx((one.mfu["datasheet"] or 0.0) / 2)
    assert add_work(seen(flops=GPT2, world_size=2, samples_per_s=80.0)).tflop_per_s == pytest.approx(36.1)


def test_on_the_cpu_there_is_a_rate_and_no_peak() -> None:
    found = add_work(seen(device="cpu", device_name=None, flops=GPT2))
    assert found.tflop_per_s == pytest.approx(36.1) and found.peaks == {} and set(found.mfu.values()) == {None}


def test_what_this_device_was_measured_at() -> None:
    found = add_work(
        seen(flops=GPT2, peaks={"matmul_tf32": False}), rates=DeviceRates(gemm_tflop_per_s=722.0, copy_tb_per_s=4.1)
    )
    assert found.mfu["measured_peak"] == pytest.approx(0.05) and found.peaks["measured_copy_tb_per_s"] == 4.1
    again = add_work(found)
    assert again == found, "measured rates stay, and so does everything else"
    assert add_work(found, rates=DeviceRates(gemm_tflop_per_s=361.0)).mfu["measured_peak"] == pytest.approx(0.1)


def test_work_that_is_counted_later_replaces_what_was_not() -> None:
    """Where the model is compiled, another process counts."""
    before = add_work(seen(flops={"per_sample": None, "why": "compiled"}))
    assert before.tflop_per_s is None and before.flops["why"] == "compiled" and set(before.mfu.values()) == {None}
    found = add_work(before, flops=GPT2)
    assert found.tflop_per_s == pytest.approx(36.1) and found.flops == GPT2 and before.flops != GPT2


@pytest.mark.parametrize(
    "given", [{"flops": {}}, {"flops": {"per_sample": None, "why": "compiled"}}, {"flops": GPT2, "samples_per_s": None}]
)
def test_unknown_stays_unknown(given: dict[str, Any]) -> None:
    found = add_work(seen(**given))
    assert found.tflop_per_s is None and set(found.mfu.values()) == {None}
    assert found.peaks["datasheet_tflop_per_s"] == 989, "what the chip can do is known all the same"


@pytest.mark.parametrize("name", ["NVIDIA Unheard-of", None])
def test_an_unknown_chip_has_a_rate_and_no_peak(name: str | None) -> None:
    found = add_work(seen(device_name=name, flops=GPT2))
    assert found.tflop_per_s == pytest.approx(36.1) and set(found.mfu.values()) == {None}
    assert found.peaks["datasheet_tflop_per_s"] is found.peaks["dram_tb_per_s"] is None


def test_a_share_above_1_is_said_once() -> None:
    found = add_work(seen(flops=GPT2, samples_per_s=4000.0, state=("it was hot",)))
    assert found.mfu["datasheet"] == pytest.approx(3.65, abs=0.01)
    assert found.state[0] == "it was hot" and any("mfu.datasheet is 3.65" in note for note in found.state)
    assert add_work(found).state == found.state
