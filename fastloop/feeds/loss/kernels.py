"""Cross-entropy over many classes on a CUDA device: one Triton kernel reads the logits once, one writes their gradient.

A block of a row stays in registers while its maximum and its sum are taken. Of 65,536 rows of 50,304 logits they take
1.7 and 3.4 ms on an H200, Inductor's 4.5 and 4.4; copying the logits takes 3.1.
Source: https://arxiv.org/abs/2410.10989 (Liger), which writes the gradient over the logits.
"""
# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4
"""Logits that a program holds at once, and its warps: the best of ten for each kernel on an H200."""


def reduce_rows(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return losses [rows], 0 for ignored targets, and log-sum-exp [rows], both in float32.

    Args:
        logits: [rows, classes], the classes side by side in memory, in float32 or 16 bits.
        target: [rows], side by side in memory, classes or `ignore_index`; else the device asserts.
    """
    rows, classes = logits.shape
    is_there = ((target >= 0) & (target < classes)) | (target == ignore_index)
    torch._assert_async(is_there.all(), f"a target is not below the number of classes, {classes}")
    losses, sums = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    given = logits, target, losses, sums, logits.stride(0)
    with torch.cuda.device(logits.get_device()):
        _reduce_loss_rows[(rows,)](*given, ignore_index, classes, BLOCK, num_warps=WARPS)
    return losses, sums


def write_gradient(
    logits: Tensor, target: Tensor, sums: Tensor, scale: Tensor, gradient: Tensor, ignore_index: int
) -> None:
    """Write (softmax - one-hot) * scale of the row [rows] into `gradient`, whose rows may be padded."""
    rows, classes = logits.shape
    grid, strides = (rows, triton.cdiv(classes, BLOCK)), (logits.stride(0), gradient.stride(0))
    given = logits, target, sums, scale, gradient
    with torch.cuda.device(logits.get_device()):
        _write_loss_gradient[grid](*given, *strides, ignore_index, classes, BLOCK, num_warps=WARPS)


@triton.jit
def _reduce_loss_rows(logits, targets, losses, sums, stride, ignore_index, CLASSES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    highest, total = float("-inf"), 0.0
    for start in range(0, CLASSES, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(logits + place, mask=place < CLASSES, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(value, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # until the first finite logit
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(value - base), 0)
        highest = higher
    target = tl.load(targets + row)
    kept, whole = target != ignore_index, highest + tl.log(total)
    chosen = tl.load(logits + target, mask=kept, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(kept, whole - chosen, 0.0))
    tl.store(sums + row, whole)


@triton.jit
def _write_loss_gradient(
    logits,
    targets,
    sums,
    scales,
    gradient,
    stride,
    gradient_stride,
    ignore_index,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    scale = tl.where(target != ignore_index, tl.load(scales + row), 0.0)
    value = tl.load(logits + row * stride + place, mask=place < CLASSES, other=0.0).to(tl.float32)
    weight = tl.exp(value - tl.load(sums + row))
    made = tl.where(place == target, weight - 1.0, weight) * scale
    tl.store(gradient + row * gradient_stride + place, made, mask=place < CLASSES)
