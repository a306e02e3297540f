"""Datasheet peaks, the dtype in use and the peak of a mix."""

from __future__ import annotations

import pytest

from fastloop.evidence.gpu.datasheets import PEAKS, Arithmetic, compute_effective_peak, find_dtype_in_use, find_peak

H200 = find_peak("NVIDIA H200")


def test_the_h200_is_the_one_everybody_divides_by() -> None:
    assert H200 is not None
    assert (H200.bf16, H200.tf32, H200.fp32, H200.dram_tb_per_s) == (989, 494.5, 67, 4.8)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121),
    ],
)
def test_names_as_cuda_reports_them(name: str, bf16: float) -> None:
    found = find_peak(name)
    assert found is not None and found.bf16 == bf16


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        "NVIDIA",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA H200 MIG 1g.18gb",
        "AMD Instinct MI300X",
        "NVIDIA X9000",
        "H2000",
    ],
)
def test_an_unknown_chip_has_no_peak(name: str | None) -> None:
    assert find_peak(name) is None


def test_the_table_is_plausible() -> None:
    """Printed figures with sparsity, or a lost comma, would break one of these."""
    for name, chip in PEAKS.items():
        half = chip.fp16
        assert half is not None and 1.9 <= half / chip.fp32 <= 35, name
        assert chip.bf16 in (None, half), name
        assert chip.tf32 is None or half / chip.tf32 == pytest.approx(2, rel=0.02), name
        assert (chip.tf32 is None) == (chip.bf16 is None), name
        assert 0.2 < chip.dram_tb_per_s < 10, name


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-mixed", "bf16"), ("bf16-true", "bf16"), ("16-mixed", "fp16"), ("16-true", "fp16"), ("64-true", "fp64")],
)
def test_low_precision_has_one_dtype_whatever_the_flags(precision: str, dtype: str) -> None:
    for flags in ((False, False), (True, True), (False, True)):
        assert find_dtype_in_use(precision, *flags, 1.0, 1.0) == Arithmetic(dtype=dtype, shares={dtype: 1.0})


@pytest.mark.parametrize("precision", [None, "transformer-engine", "nf4", "transformer-engine-float16"])
def test_what_mixes_by_itself_is_unknown(precision: str | None) -> None:
    assert find_dtype_in_use(precision, False, True, 1.0, 1.0) is None


def test_fp32_splits_between_products_and_convolutions() -> None:
    both = find_dtype_in_use("32-true", False, True, 1.0, 3.0)
    assert both is not None and both.dtype == "fp32 + tf32" and both.shares == {"fp32": 0.25, "tf32": 0.75}
    only = find_dtype_in_use("32-true", False, True, 0.0, 5.0)
    assert only is not None and only.dtype == "tf32"
    plain = find_dtype_in_use("32-true", False, False)
    assert plain is not None and plain.dtype == "fp32"
    allowed = find_dtype_in_use("32-true", True, True)
    assert allowed is not None and allowed.dtype == "tf32"


@pytest.mark.parametrize("flops", [(None, None), (1.0, None), (0.0, 0.0)], ids=str)
def test_a_mix_of_unknown_weights_is_unknown(flops: tuple[float | None, float | None]) -> None:
    assert find_dtype_in_use("32-true", False, True, *flops) is None
    assert find_dtype_in_use("32-true", True, True, *flops) is not None, "one dtype needs no weights"


def test_the_mixed_peak_is_the_time_at_peak() -> None:
    mix = find_dtype_in_use("32-true", False, True, 67e12, 494.5e12)
    # One second of fp32 work and one of TF32 work: both peaks together in two seconds.
    assert compute_effective_peak(H200, mix) == pytest.approx((67 + 494.5) / 2)
    assert compute_effective_peak(H200, find_dtype_in_use("bf16-mixed", False, True)) == pytest.approx(989)
    arithmetic_mean = mix is not None and sum(share * (H200.of(dtype) or 0) for dtype, share in mix.shares.items())
    assert arithmetic_mean != pytest.approx((67 + 494.5) / 2, rel=0.3), "the control: another mean is another number"


def test_volta_ignores_the_flag_and_has_no_bf16() -> None:
    volta = find_peak("Tesla V100-SXM2-16GB")
    assert compute_effective_peak(volta, find_dtype_in_use("32-true", True, True)) == pytest.approx(15.7)
    assert compute_effective_peak(volta, find_dtype_in_use("bf16-mixed", True, True)) is None
    assert compute_effective_peak(volta, find_dtype_in_use("16-mixed", True, True)) == pytest.approx(125)


def test_no_peak_without_chip_arithmetic_or_figure() -> None:
    assert compute_effective_peak(None, find_dtype_in_use("32-true", False, False)) is None
    assert compute_effective_peak(H200, None) is None
    assert compute_effective_peak(H200, find_dtype_in_use("64-true", False, False)) is None
