"""The peak rates of GPUs from their datasheets, and the peak for the arithmetic that a run really uses.

Products per second are dense (datasheets of Ampere and later print twice that, "with sparsity") and count a fused
multiply-add as two operations. 16-bit figures are those with 32-bit accumulation, which PyTorch uses; on GeForce cards
that is half the printed figure. An unlisted chip has no peak: a wrong one is worse than none.

Source, where the maker prints them (here per GPU):
  H200, H100, GH200  https://www.nvidia.com/en-us/data-center/h200/ · /h100/ · /grace-hopper-superchip/ (halved)
  B200               https://www.nvidia.com/en-us/data-center/hgx/ and /dgx-b200/ (eight GPUs; halved). Memory as the
                     DGX B200 datasheet has it, 64 TB/s; the one of the HGX B200 prints 62, 7.7 for each
  A100               https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf
  A10, A30, A40      https://www.nvidia.com/en-us/data-center/products/a10-gpu/ · a30-gpu/ · ../a40/
  L4, L40, L40S      https://www.nvidia.com/en-us/data-center/l4/ · /l40/ · /l40s/
  V100, T4           https://www.nvidia.com/en-us/data-center/v100/ · /tesla-t4/
  RTX 3090, A6000    NVIDIA Ampere GA102 GPU architecture, whitepaper, appendices A and B
  RTX 4090, 6000 Ada NVIDIA Ada GPU architecture, whitepaper, appendices A and B
  RTX 5090           NVIDIA RTX Blackwell GPU architecture, whitepaper, appendix A
All but RTX 6000 Ada were also compared with a second table (Lightning's `fabric/utilities/throughput.py`, copies of the
datasheets). If they differ, the other one prints sparse figures, a pair of GPUs (H100 NVL) or the 16-bit rate without
tensor cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peak:
    """Dense TFLOP/s by dtype, and TB/s of the memory. ``None``: the chip has no units for the dtype."""

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    dram_tb_per_s: float

    def of(self, dtype: str) -> float | None:
        """TFLOP/s of one dtype. On a chip without TF32, TF32 runs as fp32, whatever the flags say."""
        if dtype == "tf32" and self.tf32 is None:
            return self.fp32
        return {"bf16": self.bf16, "fp16": self.fp16, "tf32": self.tf32, "fp32": self.fp32}.get(dtype)


PEAKS: Mapping[str, Peak] = {
    "B200": Peak(2250, 2250, 1125, 75, 8.0),
    "H200": Peak(989, 989, 494.5, 67, 4.8),
    "H200 NVL": Peak(835.5, 835.5, 417.5, 60, 4.8),
    "GH200 480GB": Peak(990, 990, 494, 67, 4.0),
    "GH200 144G HBM3e": Peak(990, 990, 494, 67, 4.9),
    "H100 80GB HBM3": Peak(989, 989, 494.5, 67, 3.35),
    "H100 NVL": Peak(835.5, 835.5, 417.5, 60, 3.9),
    "H100 PCIe": Peak(756.5, 756.5, 378, 51, 2.0),
    "A100-SXM4-80GB": Peak(312, 312, 156, 19.5, 2.039),
    "A100 80GB PCIe": Peak(312, 312, 156, 19.5, 1.935),
    "A100-SXM4-40GB": Peak(312, 312, 156, 19.5, 1.555),
    "A100-PCIE-40GB": Peak(312, 312, 156, 19.5, 1.555),
    "A30": Peak(165, 165, 82, 10.3, 0.933),
    "A10": Peak(125, 125, 62.5, 31.2, 0.6),
    "A40": Peak(149.7, 149.7, 74.8, 37.4, 0.696),
    "L4": Peak(121, 121, 60, 30.3, 0.3),
    "L40": Peak(181.05, 181.05, 90.5, 90.5, 0.864),
    "L40S": Peak(362.05, 362.05, 183, 91.6, 0.864),
    "V100-SXM2-16GB": Peak(None, 125, None, 15.7, 0.9),
    "V100-SXM2-32GB": Peak(None, 125, None, 15.7, 0.9),
    "V100-PCIE-16GB": Peak(None, 112, None, 14, 0.9),
    "V100-PCIE-32GB": Peak(None, 112, None, 14, 0.9),
    "V100S-PCIE-32GB": Peak(None, 130, None, 16.4, 1.134),
    "T4": Peak(None, 65, None, 8.1, 0.32),
    "RTX A6000": Peak(154.8, 154.8, 77.4, 38.7, 0.768),
    "RTX 6000 Ada Generation": Peak(364.2, 364.2, 182.1, 91.1, 0.96),
    "RTX 3090": Peak(71, 71, 35.6, 35.6, 0.936),
    "RTX 4090": Peak(165.2, 165.2, 82.6, 82.6, 1.008),
    "RTX 5090": Peak(209.5, 209.5, 104.8, 104.8, 1.792),
}
"""Keyed by the name that CUDA reports, without the brand names before it."""

_MAKERS_WORDS = ("NVIDIA ", "Tesla ", "GeForce ")


def find_peak(device_name: str | None) -> Peak | None:
    """The datasheet of a GPU, by its CUDA name; None if it is unknown, a MIG slice, or a variant of a known GPU ("RTX
    4090 Laptop GPU"): only whole names match."""
    name = device_name or ""
    for words in _MAKERS_WORDS:
        name = name.removeprefix(words)
    return PEAKS.get(name)


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The dtype in which a run multiplies."""

    dtype: str
    """``bf16``, ``fp16``, ``tf32``, ``fp32``, ``fp64``, or two that share the work: ``fp32 + tf32``."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the FLOPs by dtype; they add up to 1."""


_BY_PRECISION = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16", "64-true": "fp64"}


def find_dtype_in_use(
    precision: str | None,
    matmul_tf32: bool,
    cudnn_tf32: bool,
    matmul_flops: float | None = None,
    conv_flops: float | None = None,
) -> Arithmetic | None:
    """The arithmetic behind one of Lightning's precisions.

    An fp32 model does not use only fp32: by default cuDNN may use TF32 for convolutions and cuBLAS may not for matrix
    products (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices), so
    the result depends on the FLOPs of both kinds. Attention belongs to ``matmul_flops``.

    Returns None if unknown: a precision that is not Lightning's own or that mixes dtypes by itself
    (``transformer-engine``), or two dtypes without FLOPs to weight them.
    """
    if precision != "32-true":
        dtype = _BY_PRECISION.get(precision or "")
        return Arithmetic(dtype=dtype, shares={dtype: 1.0}) if dtype else None
    matmul, conv = ("tf32" if allowed else "fp32" for allowed in (matmul_tf32, cudnn_tf32))
    if matmul == conv:
        return Arithmetic(dtype=matmul, shares={matmul: 1.0})
    if matmul_flops is None or conv_flops is None or matmul_flops + conv_flops <= 0:
        return None
    shares = {matmul: matmul_flops / (matmul_flops + conv_flops), conv: conv_flops / (matmul_flops + conv_flops)}
    shares = {dtype: share for dtype, share in sorted(shares.items()) if share > 0}
    return Arithmetic(dtype=" + ".join(shares), shares=shares)


def compute_effective_peak(chip: Peak | None, arithmetic: Arithmetic | None) -> float | None:
    """TFLOP/s at which ``chip`` would do this mix of work if each part ran at its own peak: a harmonic mean.

    None for an unknown chip or arithmetic, and for a dtype without a figure in the table (fp64, bf16 on Volta).
    """
    if chip is None or arithmetic is None:
        return None
    time = 0.0
    for dtype, share in arithmetic.shares.items():
        rate = chip.of(dtype)
        if rate is None:
            return None
        time += share / rate
    return 1 / time if time else None
