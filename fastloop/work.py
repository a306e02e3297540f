"""Work, energy and money per sample, from counted FLOPs and measured rates. Arithmetic only; ``None`` in, ``None`` out.

Definitions: FLOPs per sample are counted once, eager, on the unmodified model, so that every arm of an experiment
divides the same number: recomputing activations raises the load on the chip and not the MFU.
"""

from __future__ import annotations

import math

MFU_DOUBT = 1.0
"""Above it an MFU is no utilisation but a wrong peak, a wrong dtype or a wrong count."""


def tflop_per_s(flops_per_sample: float | None, samples_per_s: float | None) -> float | None:
    """TFLOP/s of one device.

    Args:
        flops_per_sample: forward and backward of one sample.
        samples_per_s: of that device, not of all ranks.
    """
    if flops_per_sample is None or samples_per_s is None:
        return None
    return flops_per_sample * samples_per_s / 1e12


def mfu(
    tflop_per_s: float | None, *, datasheet: float | None, measured_peak: float | None, dtype_in_use: float | None
) -> dict[str, float | None]:
    """Shares (0..1) of three peaks, each in TFLOP/s.

    Args:
        tflop_per_s: what one device does.
        datasheet: dense bf16 of the datasheet, the yardstick that papers use.
        measured_peak: a large bf16 product on this very device.
        dtype_in_use: datasheet peak of the arithmetic the run uses.

    A share above 1 is returned as it is; ``mfu_notes`` says what to make of it.
    """
    peaks = {"datasheet": datasheet, "measured_peak": measured_peak, "dtype_in_use": dtype_in_use}
    return {name: _ratio(tflop_per_s, peak) for name, peak in peaks.items()}


def mfu_notes(shares: dict[str, float | None]) -> tuple[str, ...]:
    """One sentence for every share above 1."""
    meaning = {
        "datasheet": "the chip's table entry or the FLOP count is wrong",
        "measured_peak": "the product that was timed here ran slower than the training's own: time it again, or the "
                         "FLOP count is wrong",
        "dtype_in_use": "part of the work runs in another dtype than was taken for granted, or the FLOP count is wrong",
    }  # fmt: skip
    return tuple(
        f"mfu.{name} is {share:.2f}, above 1: {meaning.get(name, 'its peak is wrong')}"
        for name, share in shares.items()
        if share is not None and share > MFU_DOUBT
    )


def joule_per_sample(joule: float | None, seconds: float | None, samples_per_s: float | None) -> float | None:
    """Energy of one sample: the board's mean power over its own window, divided by the rate.

    The two windows need not be the same to the millisecond, which is why rates are divided and not totals.

    Args:
        joule, seconds: of one board; for several, the sum of their joules over the same seconds.
        samples_per_s: of the devices whose joules these are.
    """
    return _ratio(_ratio(joule, seconds), samples_per_s)


def usd_per_million_samples(
    devices: int | None, usd_per_gpu_hour: float | None, samples_per_s: float | None
) -> float | None:
    """Price of a million samples; ``samples_per_s`` is that of all ``devices`` together."""
    if devices is None or usd_per_gpu_hour is None:
        return None
    return _ratio(devices * usd_per_gpu_hour * 1e6 / 3600, samples_per_s)


def dram_share_of_copy(
    dram_active_pct: float | None, dram_tb_per_s: float | None, measured_copy_tb_per_s: float | None
) -> float | None:
    """Memory traffic as a share (0..1) of what a plain copy moves on this device, which no kernel exceeds by much.

    Args:
        dram_active_pct: the counter's reading, percent of the theoretical bandwidth.
        dram_tb_per_s: that theoretical bandwidth, from the datasheet.
        measured_copy_tb_per_s: bytes read plus bytes written by a copy, per second.
    """
    if dram_active_pct is None or dram_tb_per_s is None:
        return None
    return _ratio(dram_active_pct / 100 * dram_tb_per_s, measured_copy_tb_per_s)


def _ratio(number: float | None, by: float | None) -> float | None:
    if number is None or by is None or not by > 0 or not math.isfinite(number / by):
        return None
    return number / by
