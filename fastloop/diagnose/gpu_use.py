"""Classifies what keeps a GPU busy, good use or not, by its counters and the kernels of a trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from fastloop.records.measurement import Measurement
from fastloop.records.readings import (
    attends_by_hand,
    compiles,
    read_family_shares,
    read_gpu,
    read_precision,
    read_trace,
    to_number,
)

WELL_USED_MFU, WELL_USED_TENSOR_PCT = 0.35, 60.0
"""Share of the datasheet's peak, and percentage of time with active tensor cores, that good training code reaches."""
FP32_MFU, PRODUCTS_SHARE, TENSOR_PCT = 0.25, 0.5, 25.0
"""fp32 math is the reason if the rate reaches this share of the fp32 peak, or products this share of the kernels' time,
and the tensor cores are active for less than this percentage."""
DRAM_PCT, COPY_SHARE = 55.0, 0.6
"""Memory is the reason at or above this DRAM activity, or this share of a plain copy's bandwidth on this GPU."""
FUSED_ATTENTION = "scaled_dot_product_attention with a fused kernel (flash, cuDNN)"
KERNELS = {
    "optimizer": (
        0.15,
        "the optimizer takes",
        "its update is already fused; next would be fewer parameters or fewer updates",
    ),
    "attention": (0.3, "attention takes", FUSED_ATTENTION),
    "elementwise": (
        0.3,
        "elementwise work and normalization take",
        "the next step would be hand-written fused kernels",
    ),
}
"""Kernels that may be the reason: the smallest share of the busy time, the text, and what to do without a rung."""
ASK_A_TRACE = "a trace shows which kernels take the time (fastloop diagnose --trace 5, or watch.trace_steps: 5)"
WORTH_NAMING = 0.15
"""Smallest share of the kernels' time for naming attention without a fused kernel, or misaligned matmuls."""
_MISALIGNED = re.compile(r"tensorop_\w*gemm\w*_align[12](?!\d)")
"""Tensor-core products of older kernels, which cuBLAS takes if rows do not begin at addresses that are aligned. Source:
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/"""
_PAD = "pad that dimension to a multiple of 64, for example a vocabulary of 50,257 to 50,304"
FEW_SMS_PCT = 50.0
LITTLE_MFU = 0.02
"""Below this share of the peak, arithmetic does not take the time, no matter the dtype."""
PRODUCTS = ("gemm", "attention", "convolution")

Use = Literal["well_used", "fp32_math", "memory_bound", "slow"]


class Culprit(NamedTuple):
    """A reason for a low rate that is not a separate bottleneck."""

    cause: str
    """The cause's name in the rungs' cards; with spaces, its text in a headline."""
    says: str
    instead: str
    share: float | None = None
    """Share of the kernels' time."""


def classify_use(seen: Measurement, busy: float = 1.0) -> Use | None:
    """Classify what a GPU is busy with; returns None if that was not measured.

    Args:
        busy: share of the step in which it is busy. Counters and rates are means over the whole step.
    """
    whole = 1 / max(0.1, min(1.0, busy))
    mfu, tensor, dram = (
        None if value is None else min(most, value * whole)
        for value, most in (
            (to_number(seen.mfu.get("datasheet")), 1.0),
            (read_gpu(seen, "tensor_active_pct"), 100.0),
            (read_gpu(seen, "dram_active_pct"), 100.0),
        )
    )
    dtype_mfu, was_seen = whole * (to_number(seen.mfu.get("dtype_in_use")) or 0.0), None not in (tensor, dram)
    tensor, dram = tensor or 0.0, dram or 0.0
    if (mfu or 0.0) >= WELL_USED_MFU or tensor >= WELL_USED_TENSOR_PCT:
        return "well_used"
    in_products = dtype_mfu >= FP32_MFU or sum_products(seen) >= PRODUCTS_SHARE
    if read_precision(seen) == "fp32" and tensor < TENSOR_PCT and in_products:
        return "fp32_math"
    if dram >= DRAM_PCT or whole * (compare_with_copy(seen) or 0.0) >= COPY_SHARE:
        return "memory_bound"
    return "slow" if mfu is not None or was_seen or read_trace(seen) is not None else None


def sum_products(seen: Measurement) -> float:
    """Return the share of the kernels' time in matrix products and convolutions; 0 without a trace."""
    return min(1.0, sum(read_family_shares(seen).get(family, 0.0) for family in PRODUCTS))


def compare_with_copy(seen: Measurement) -> float | None:
    """Return the memory bandwidth in use as a share of what a plain copy reaches on this GPU."""
    dram, peak = read_gpu(seen, "dram_active_pct"), to_number(seen.peaks.get("dram_tb_per_s"))
    copy = to_number(seen.peaks.get("measured_copy_tb_per_s"))
    return dram / 100 * peak / copy if dram is not None and peak and copy else None


def find_attention_by_hand(seen: Measurement) -> float | None:
    """Return the share of the kernels' time in attention without a fused kernel; None if not worth naming."""
    traced = read_trace(seen) or {}
    busy, spent = to_number(traced.get("busy_ms")), to_number(traced.get("attention_by_hand_ms"))
    return min(1.0, spent / busy) if busy and spent and spent >= WORTH_NAMING * busy else None


def find_misaligned_matmuls(seen: Measurement) -> float | None:
    """Return the share of the kernels' time in misaligned matmuls, at least: only the ten names with the most time are
    known. None if not worth naming."""
    traced = read_trace(seen) or {}
    busy = to_number(traced.get("busy_ms"))
    spent = sum(to_number(each["ms"]) or 0.0 for each in traced.get("top") or () if _MISALIGNED.search(each["name"]))
    return min(1.0, spent / busy) if busy and spent >= WORTH_NAMING * busy else None


def find_culprit(seen: Measurement, is_answered: Callable[[str], bool] = lambda _cause: False) -> Culprit | None:
    """Find why a GPU is slow that is neither well used nor limited by fp32 math or memory.

    Args:
        is_answered: whether a rung against a cause is in effect, so that code which is written so may not run so.
    """
    shares, sms = read_family_shares(seen), read_gpu(seen, "sm_active_pct")
    parts = {family: shares.get(family, 0.0) for family in KERNELS}
    parts["elementwise"] += shares.get("normalisation", 0.0)
    by_hand, misaligned = find_attention_by_hand(seen), find_misaligned_matmuls(seen)
    if misaligned is not None and misaligned >= max(by_hand or 0.0, *parts.values()):
        says = f"misaligned matmuls{_name_size(seen)} take at least {100 * misaligned:.0f} % of the kernels' time"
        return Culprit("misaligned_matmuls", says, _PAD, misaligned)
    if by_hand is not None and by_hand >= parts["optimizer"]:
        says = f"hand-written attention takes at least {100 * by_hand:.0f} % of the kernels' time"
        return Culprit("attention", says, FUSED_ATTENTION, by_hand)
    if large := [family for family, part in parts.items() if part >= KERNELS[family][0]]:
        largest = max(large, key=parts.__getitem__)
        share, (_, takes, instead) = min(1.0, parts[largest]), KERNELS[largest]
        return Culprit(largest, f"{takes} {100 * share:.0f} % of that time", instead, share)
    dtype_mfu = 0.0 if seen.flops.get("no_products") else to_number(seen.mfu.get("dtype_in_use"))
    is_little = dtype_mfu is not None and dtype_mfu < LITTLE_MFU and not seen.flops.get("at_least")
    if read_precision(seen) in ("fp32", "tf32") and not is_little:
        says = f"its matrix products run in {seen.peaks.get('dtype') or read_precision(seen)}"
        return Culprit("32-bit_math", says, "Trainer(precision='bf16-mixed')")
    if sms is not None and sms < FEW_SMS_PCT:
        return Culprit("small_kernels", f"only {sms:.0f} % of its SMs have work", "more work in each kernel")
    if read_trace(seen) is None and attends_by_hand(seen) and not is_answered("attention"):
        says = "the model's attention is hand-written; a trace shows how much time it takes"
        return Culprit("attention", says, FUSED_ATTENTION)
    part, whole = to_number(seen.flops.get("misaligned")), to_number(seen.flops.get("per_sample"))
    if read_trace(seen) is None and part and whole and part >= WORTH_NAMING * whole and not compiles(seen):
        says = f"{100 * part / whole:.0f} % of its FLOPs are in misaligned matmuls{_name_size(seen)}"
        return Culprit("misaligned_matmuls", f"{says}; a trace shows how much time they take", _PAD)
    return None


def _name_size(seen: Measurement) -> str:
    """Name the dimension that misaligns them, if it is known."""
    size = to_number(seen.flops.get("misaligned_size"))
    return "" if not size else f" ({size:,.0f} is not a multiple of 8)"
