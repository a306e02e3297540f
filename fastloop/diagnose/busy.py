"""What keeps a GPU busy: good use of it, or what else, as its counters and the kernels of a trace have it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fastloop.diagnose.reading import families, gpu, kernels, micro_batches, number, precision
from fastloop.measurement import Measurement

WELL_USED_MFU, WELL_USED_TENSOR_PCT = 0.35, 60.0
"""Of the datasheet's peak, and of the tensor cores' time: what good training code reaches."""
FP32_MFU, PRODUCTS_SHARE, TENSOR_PCT = 0.25, 0.5, 25.0
"""fp32 math is the reason from this share of the fp32 peak, or of the kernels' time spent in products, where the tensor
cores are active for less than this."""
DRAM_PCT, COPY_SHARE = 55.0, 0.6
"""Memory is the reason from this activity of the DRAM, or from this share of what a plain copy reaches here."""
LEAST = {"the optimizer": 0.15, "attention": 0.3, "elementwise work": 0.3}
"""Shares of the kernels' time from which a family is the reason."""
FEW_SMS_PCT = 50.0
LITTLE_MFU = 0.02
"""Below this share of its peak the arithmetic is not what takes the time, in whatever dtype."""
PRODUCTS = ("gemm", "attention", "convolution")

Use = Literal["well_used", "fp32_math", "memory_bound", "slow"]


class Culprit(NamedTuple):
    """A reason for a low rate that has no bottleneck's name of its own."""

    name: str
    says: str
    rungs: tuple[str, ...]
    instead: str
    share: float | None = None
    """Of the kernels' time."""


def use(seen: Measurement) -> Use | None:
    """What a busy GPU is busy with; None where nothing was measured that tells."""
    mfu, dtype_mfu = number(seen.mfu.get("datasheet")), number(seen.mfu.get("dtype_in_use")) or 0.0
    tensor, dram = gpu(seen, "tensor_active_pct") or 0.0, gpu(seen, "dram_active_pct") or 0.0
    if (mfu or 0.0) >= WELL_USED_MFU or tensor >= WELL_USED_TENSOR_PCT:
        return "well_used"
    in_products = dtype_mfu >= FP32_MFU or products_share(seen) >= PRODUCTS_SHARE
    if precision(seen) == "fp32" and tensor < TENSOR_PCT and in_products:
        return "fp32_math"
    if dram >= DRAM_PCT or (copy_share(seen) or 0.0) >= COPY_SHARE:
        return "memory_bound"
    return "slow" if mfu is not None or kernels(seen) is not None else None


def is_well_used(seen: Measurement) -> bool:
    """Near what this GPU can do in practice."""
    return use(seen) == "well_used"


def products_share(seen: Measurement) -> float:
    """Share of the kernels' time in matrix products and convolutions; 0 without a trace."""
    return min(1.0, sum(families(seen).get(family, 0.0) for family in PRODUCTS))


def copy_share(seen: Measurement) -> float | None:
    """Memory bandwidth in use as a share of what a plain copy reaches on this GPU."""
    dram, peak = gpu(seen, "dram_active_pct"), number(seen.peaks.get("dram_tb_per_s"))
    copy = number(seen.peaks.get("measured_copy_tb_per_s"))
    return dram / 100 * peak / copy if dram is not None and peak and copy else None


def culprit(seen: Measurement) -> Culprit | None:
    """What makes a GPU slow that is neither well used nor held up by fp32 math or memory."""
    shares, sms = families(seen), gpu(seen, "sm_active_pct")
    parts = {"the optimizer": shares.get("optimizer", 0.0), "attention": shares.get("attention", 0.0),
             "elementwise work": shares.get("elementwise", 0.0) + shares.get("normalisation", 0.0)}  # fmt: skip
    large = [name for name, share in parts.items() if share >= LEAST[name]]
    if large:
        return _family(max(large, key=parts.__getitem__), min(1.0, max(parts[name] for name in large)))
    dtype_mfu = number(seen.mfu.get("dtype_in_use"))
    if precision(seen) in ("fp32", "tf32") and (dtype_mfu is None or dtype_mfu >= LITTLE_MFU):
        says = f"its products work in {seen.peaks.get('dtype') or precision(seen)}"
        return Culprit("32-bit math", says, ("amp",), "Trainer(precision='bf16-mixed')")
    if sms is not None and sms < FEW_SMS_PCT:
        rungs = ("batch",) if micro_batches(seen) > 1 else ()
        return Culprit("small kernels", f"only {sms:.0f} % of its SMs have work", rungs, "more work in each kernel")
    return None


def _family(name: str, share: float) -> Culprit:
    rungs, instead = {
        "the optimizer": (("fused", "compile"), "its update is fused; fewer parameters or fewer updates would be next"),
        "attention": ((), "torch.nn.functional.scaled_dot_product_attention with a fused kernel (flash, cuDNN)"),
        "elementwise work": (("compile",), "compile is on; fused kernels written by hand would be next"),
    }[name]
    takes = f"{name}{' and normalisation take' if name == 'elementwise work' else ' takes'} {100 * share:.0f} % of it"
    return Culprit(name.removeprefix("the ").removesuffix(" work"), takes, rungs, instead, share)
