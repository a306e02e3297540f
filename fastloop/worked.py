"""The work in a measurement: FLOPs per second, and which share of the GPU's peaks that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastloop import peaks, work
from fastloop.measurement import Measurement


def worked(seen: Measurement, *, flops: Mapping[str, Any] | None = None, gemm_tflop_per_s: float | None = None,
           copy_tb_per_s: float | None = None) -> Measurement:  # fmt: skip
    """The same measurement with TFLOP/s and MFU in it.

    Args:
        flops: work per sample as ``Measurement.flops`` holds it; None keeps what the measurement has.
        gemm_tflop_per_s, copy_tb_per_s: what this very device does, as far as that was measured.
    """
    counted = dict(seen.flops if flops is None else flops)
    on_gpu = seen.device == "cuda"
    chip = peaks.peak(seen.device_name) if on_gpu else None
    own_rate = None if seen.samples_per_s is None else seen.samples_per_s / seen.world_size
    done = work.tflop_per_s(counted.get("per_sample"), own_rate)
    arithmetic = _arithmetic(seen, counted) if on_gpu else None
    of_dtype = peaks.effective_peak(chip, arithmetic)
    datasheet = chip.bf16 if chip else None
    gemm = gemm_tflop_per_s if gemm_tflop_per_s is not None else seen.peaks.get("measured_tflop_per_s")
    copy = copy_tb_per_s if copy_tb_per_s is not None else seen.peaks.get("measured_copy_tb_per_s")
    shares = work.mfu(done, datasheet=datasheet, measured_peak=gemm, dtype_in_use=of_dtype)
    known = {
        "dtype": arithmetic.dtype if arithmetic else None, "datasheet_tflop_per_s": datasheet,
        "dtype_tflop_per_s": of_dtype, "measured_tflop_per_s": gemm,
        "dram_tb_per_s": chip.dram_tb_per_s if chip else None, "measured_copy_tb_per_s": copy,
    }  # fmt: skip
    notes = tuple(note for note in work.mfu_notes(shares) if note not in seen.state)
    return dataclasses.replace(seen, flops=counted, peaks={**seen.peaks, **known} if on_gpu else {}, mfu=shares,
                               tflop_per_s=done, state=(*seen.state, *notes))  # fmt: skip


def _arithmetic(seen: Measurement, counted: Mapping[str, Any]) -> peaks.Arithmetic | None:
    products = [counted[kind] for kind in ("matmul", "attention") if counted.get(kind) is not None]
    return peaks.dtype_in_use(seen.precision, bool(seen.peaks.get("matmul_tf32")),
                              bool(seen.peaks.get("convolution_tf32")), sum(products) if products else None,
                              counted.get("convolution"))  # fmt: skip
