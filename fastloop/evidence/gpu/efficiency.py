"""Work, energy and money per sample, from counted FLOPs and measured rates. Arithmetic only; ``None`` in, ``None`` out.

FLOPs per sample are counted once, eager, on the unmodified model, so that every arm of an experiment uses the same
number: recomputing activations raises the load on the chip but not the MFU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fastloop.evidence.gpu import datasheets
from fastloop.records.measurement import Measurement
from fastloop.records.trial import DeviceRates

MFU_DOUBT = 1.0
"""An MFU above this means a wrong peak, dtype or count."""


def write_mfu_notes(shares: dict[str, float | None]) -> tuple[str, ...]:
    """One sentence for every share above 1."""
    meaning = {
        "datasheet": "the chip's table entry or the FLOP count is wrong",
        "measured_peak": "the matrix product timed here ran slower than the training's own: time it again, or the FLOP"
        " count is wrong",
        "dtype_in_use": "part of the work runs in a different dtype than assumed, or the FLOP count is wrong",
    }
    return tuple(
        f"mfu.{name} is {share:.2f}, above 1: {meaning.get(name, 'its peak is wrong')}"
        for name, share in shares.items()
        if share is not None and share > MFU_DOUBT
    )


def compute_joule_per_sample(joule: float | None, seconds: float | None, samples_per_s: float | None) -> float | None:
    """Energy of one sample: the board's mean power over its own window, divided by the rate.

    The function divides rates, not totals, because the two windows may differ by milliseconds.

    Args:
        joule, seconds: for one board; for several, the sum of their joules over the same seconds.
        samples_per_s: of the same devices.
    """
    return _divide(_divide(joule, seconds), samples_per_s)


def compute_usd_per_million_samples(usd_per_gpu_hour: float | None, samples_per_s: float | None) -> float | None:
    """Price of a million samples; ``samples_per_s`` is the rate of one device."""
    return _divide(None if usd_per_gpu_hour is None else usd_per_gpu_hour * 1e6 / 3600, samples_per_s)


def _divide(number: float | None, by: float | None) -> float | None:
    if number is None or by is None or not by > 0 or not math.isfinite(number / by):
        return None
    return number / by


# The work in a measurement: FLOPs per second, and their share of the GPU's peaks.


def add_work(
    seen: Measurement, *, flops: Mapping[str, Any] | None = None, rates: DeviceRates | None = None
) -> Measurement:
    """The measurement with TFLOP/s and MFU added.

    Args:
        flops: work per sample in the form of ``Measurement.flops``; None keeps the measurement's own.
        rates: measured rates of this device; None keeps the measurement's own.
    """
    counted = dict(seen.flops if flops is None else flops)
    on_gpu = seen.device == "cuda"
    chip = datasheets.find_peak(seen.device_name) if on_gpu else None
    per_sample, rate = counted.get("per_sample"), seen.samples_per_s
    done = None if per_sample is None or rate is None else per_sample * rate / seen.world_size / 1e12
    arithmetic = _find_arithmetic(seen, counted) if on_gpu else None
    of_dtype = datasheets.compute_effective_peak(chip, arithmetic)
    gemm, copy = (rates.gemm_tflop_per_s, rates.copy_tb_per_s) if rates is not None else (None, None)
    gemm = gemm if gemm is not None else seen.peaks.get("measured_tflop_per_s")
    copy = copy if copy is not None else seen.peaks.get("measured_copy_tb_per_s")
    peaks = {"datasheet": chip.bf16 if chip else None, "measured_peak": gemm, "dtype_in_use": of_dtype}
    shares = {name: _divide(done, peak) for name, peak in peaks.items()}
    known = {
        "dtype": arithmetic.dtype if arithmetic else None,
        "datasheet_tflop_per_s": peaks["datasheet"],
        "dtype_tflop_per_s": of_dtype,
        "measured_tflop_per_s": gemm,
        "dram_tb_per_s": chip.dram_tb_per_s if chip else None,
        "measured_copy_tb_per_s": copy,
    }
    notes = tuple(note for note in write_mfu_notes(shares) if note not in seen.state)
    return dataclasses.replace(
        seen,
        flops=counted,
        peaks={**seen.peaks, **known} if on_gpu else {},
        mfu=shares,
        tflop_per_s=done,
        state=(*seen.state, *notes),
    )


def _find_arithmetic(seen: Measurement, counted: Mapping[str, Any]) -> datasheets.Arithmetic | None:
    products = [counted[kind] for kind in ("matmul", "attention") if counted.get(kind) is not None]
    return datasheets.find_dtype_in_use(
        seen.precision,
        bool(seen.peaks.get("matmul_tf32")),
        bool(seen.peaks.get("convolution_tf32")),
        sum(products) if products else None,
        counted.get("convolution"),
    )
