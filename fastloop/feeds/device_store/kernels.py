"""Parts of pictures resized, mirrored and made floats on a CUDA device by two Triton kernels, one for each pass.

The numbers are those of `resizing`, which is also what runs elsewhere: weights in double precision that become whole
numbers, and bytes between the passes. So the bits are the same. A kernel takes each part as large as it is, where
tensor operations take all as large as the largest.
"""
# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fastloop.feeds.device_store.draws import Numbers
from fastloop.feeds.device_store.resizing import is_vertical_first, send

ROWS, COLUMNS = 16, 128
"""Of the piece of an image that one program makes."""
EXACT = {"enable_fp_fusion": False}
"""A product and a sum that are rounded once, together, give other weights than Pillow's."""


def resize_parts(
    pixels: torch.Tensor,
    starts: Numbers,
    heights: Numbers,
    widths: Numbers,
    parts: Numbers,
    mirrored: Numbers,
    size: tuple[int, int],
    table: torch.Tensor,
) -> torch.Tensor:
    """Images [B, 3, *size], as `resizing.resize_parts` makes them, mirrored where that is so and then looked up.

    Args:
        mirrored: which images, bool [B].
        table: what becomes of each byte, [3, 256].
    """
    top, left, part_heights, part_widths = parts.T
    upright = is_vertical_first(part_heights, part_widths, size)
    rows, columns = np.where(upright, size[0], part_heights), np.where(upright, part_widths, size[1])
    ends = np.cumsum(3 * rows * columns)
    half = pixels.new_empty(int(ends[-1]))  # between the passes: bytes [3, rows, columns] of each image
    told = [starts + top * widths + left, widths, heights * widths, part_heights, part_widths, upright, mirrored]
    sent = send(np.stack([*told, ends - 3 * rows * columns], axis=1).astype(np.int64), pixels.device)
    made = table.new_empty(len(parts), 3, *size)
    blocks: dict[str, Any] = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    _pass_first[_lay_out(len(parts), int(rows.max()), int(columns.max()))](pixels, half, sent, *size, **blocks, **EXACT)
    _pass_second[_lay_out(len(parts), *size)](half, made, table, sent, *size, **blocks, **EXACT)
    return made


def _lay_out(images: int, height: int, width: int) -> tuple[int, int, int]:
    """The grid of programs."""
    return images, triton.cdiv(height, ROWS), triton.cdiv(width, COLUMNS)


@triton.jit
def _pass_first(pixels, half, told, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    told += tl.program_id(0) * 8
    part_height, part_width = tl.load(told + 3).to(tl.int32), tl.load(told + 4).to(tl.int32)
    upright = tl.load(told + 5) != 0
    row_count, column_count = tl.where(upright, height, part_height), tl.where(upright, part_width, width)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if (tl.program_id(1) * ROWS < row_count) & (tl.program_id(2) * COLUMNS < column_count):
        inside = (rows < row_count)[:, None] & (columns < column_count)[None, :]
        source, stride, plane = pixels + tl.load(told), tl.load(told + 1).to(tl.int32), tl.load(told + 2)
        if upright:
            red, green, blue = _sum_taps(source, plane, stride, rows, columns, inside, part_height, height, True)
        else:
            red, green, blue = _sum_taps(source, plane, stride, rows, columns, inside, part_width, width, False)
        target = half + tl.load(told + 7) + (rows[:, None] * column_count + columns[None, :])
        plane = row_count * column_count
        tl.store(target, red.to(tl.uint8), mask=inside)
        tl.store(target + plane, green.to(tl.uint8), mask=inside)
        tl.store(target + 2 * plane, blue.to(tl.uint8), mask=inside)


@triton.jit
def _pass_second(half, made, table, told, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)
    told += image * 8
    part_height, part_width = tl.load(told + 3).to(tl.int32), tl.load(told + 4).to(tl.int32)
    upright, mirrored = tl.load(told + 5) != 0, tl.load(told + 6) != 0
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    target = made + image * 3 * height * width + (rows[:, None] * width + columns[None, :])
    columns = tl.where(mirrored, width - 1 - columns, columns)
    source = half + tl.load(told + 7)
    if upright:
        red, green, blue = _sum_taps(
            source, height * part_width, part_width, rows, columns, inside, part_width, width, False
        )
    else:
        red, green, blue = _sum_taps(
            source, part_height * width, width, rows, columns, inside, part_height, height, True
        )
    plane = height * width
    tl.store(target, tl.load(table + red), mask=inside)
    tl.store(target + plane, tl.load(table + 256 + green), mask=inside)
    tl.store(target + 2 * plane, tl.load(table + 512 + blue), mask=inside)


@triton.jit
def _sum_taps(source, plane, stride, rows, columns, inside, length, size, VERTICAL: tl.constexpr):
    """Bytes [rows, columns] of three channels, as int32: sums over `length` pixels that become `size`."""
    along = tl.minimum(tl.maximum(rows if VERTICAL else columns, 0), size - 1)
    scale = length.to(tl.float64) / size
    support = tl.maximum(scale, 1.0)
    center = (along.to(tl.float64) + 0.5) * scale
    first = tl.maximum((center - support + 0.5).to(tl.int32), 0)
    count = tl.minimum((center + support + 0.5).to(tl.int32), length) - first
    taps = (2 * support).to(tl.int32) + 2
    total = center * 0.0
    tap = 0
    while tap < taps:  # not `for`, which Triton's interpreter cannot do under NumPy 2.4
        total += _weigh(tap, first, count, center, support)
        tap += 1
    red = tl.full([rows.shape[0], columns.shape[0]], 1 << 21, tl.int32)
    green, blue = red, red
    tap = 0
    while tap < taps:
        weight = (_weigh(tap, first, count, center, support) / total * 4194304.0 + 0.5).to(tl.int32)
        place = tl.minimum(first + tap, length - 1)
        if VERTICAL:
            weight = weight[:, None]
            pixels = source + (place[:, None] * stride + columns[None, :])
        else:
            weight = weight[None, :]
            pixels = source + (rows[:, None] * stride + place[None, :])
        red += tl.load(pixels, mask=inside, other=0).to(tl.int32) * weight
        green += tl.load(pixels + plane, mask=inside, other=0).to(tl.int32) * weight
        blue += tl.load(pixels + 2 * plane, mask=inside, other=0).to(tl.int32) * weight
        tap += 1
    return red >> 22, green >> 22, blue >> 22


@triton.jit
def _weigh(tap, first, count, center, support):
    """Of each pixel's tap, not yet divided by their sum."""
    distance = (tap + first).to(tl.float64) - center + 0.5
    return tl.where(tap < count, tl.maximum(1.0 - tl.abs(distance * (1.0 / support)), 0.0), 0.0)
