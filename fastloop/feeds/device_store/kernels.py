"""Crops, resizes and mirrors pictures and converts them to floats on a CUDA device, bit for bit like Pillow (bilinear).

A cut moves pixels only, so one kernel does it. Pillow resizes in two passes, along rows and along columns. Each is a
weighted sum of a few pixels, rounded to bytes; the weights are computed in double precision and then used as integers
with 22 fractional bits. Three Triton kernels do the same: weights, first pass, second pass. Pillow 13 chooses the order
of the passes by the sizes.
Source: libImaging/Resample.c (precompute_coeffs, normalize_coeffs_8bpc, ImagingResampleHorizontal_8bpc).
"""
# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from fastloop.feeds.device_store.draws import Numbers, send

BITS = 22
BLOCK = 512
"""Pixels that one program computes, in all three channels."""
POSITIONS = 128
"""Positions for which one program computes the weights."""
FIELDS = tl.constexpr(12)
"""Numbers that programs receive about each resized image."""
CUT_FIELDS = tl.constexpr(6)
"""Numbers that programs receive about each cut image."""
HALF, ONE = tl.constexpr(1 << (BITS - 1)), tl.constexpr(float(1 << BITS))


def resize_parts(
    pixels: torch.Tensor,
    starts: Numbers,
    heights: Numbers,
    widths: Numbers,
    parts: Numbers,
    mirrored: Numbers,
    size: tuple[int, int],
    table: torch.Tensor,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Return images [B, 3, *size]: ``picture.crop(part).resize(size)``, then mirrored if set, each byte then looked up.

    Args:
        pixels: uint8 [all]; pictures are [3, height, width].
        starts: offset of each picture in `pixels`, int64 [B].
        heights: of the pictures, int64 [B].
        widths: of the pictures, int64 [B].
        parts: top, left, height and width of each part, int64 [B, 4].
        mirrored: whether to mirror each image, bool [B].
        table: value for each byte, [3, 256].
        memory_format: of the images.
    """
    top, left, part_heights, part_widths = parts.T
    upright = is_vertical_first(part_heights, part_widths, size)
    # Intermediate result between the passes: bytes [3, rows, columns] of each image.
    between = np.where(upright, size[0] * part_widths, size[1] * part_heights)
    halves = np.cumsum(3 * between)
    # For each image and side, int32 [1 + taps, side]: each output pixel's first source pixel, and its weights.
    taps = (
        np.stack([2 * np.maximum(part_heights / size[0], 1), 2 * np.maximum(part_widths / size[1], 1)]).astype(int) + 2
    )
    ends = np.cumsum((1 + taps) * np.array(size)[:, None]).reshape(taps.shape)
    begins = ends - (1 + taps) * np.array(size)[:, None]
    fields = [starts + top * widths + left, widths, heights * widths, part_heights, part_widths, upright, mirrored]
    fields += [halves - 3 * between, *begins, *taps]
    sent = send(np.stack(fields, axis=1).astype(np.int64), pixels.device)
    half, weights = pixels.new_empty(int(halves[-1])), sent.new_empty(int(ends[-1, -1]), dtype=torch.int32)
    made = torch.empty(len(parts), 3, *size, dtype=table.dtype, device=table.device, memory_format=memory_format)
    strides = made.stride()[1], made.stride()[3]
    # Fused multiply-adds round only once, which would give other weights than Pillow's.
    _weigh[len(parts), 2, triton.cdiv(max(size), POSITIONS)](weights, sent, *size, POSITIONS, enable_fp_fusion=False)
    _pass_first[len(parts), triton.cdiv(int(between.max()), BLOCK)](pixels, half, weights, sent, *size, BLOCK)
    _pass_second[len(parts), triton.cdiv(size[0] * size[1], BLOCK)](
        half, made, *strides, table, weights, sent, *size, BLOCK
    )
    return made


def cut_parts(
    pixels: torch.Tensor,
    fields: torch.Tensor,
    size: tuple[int, int],
    fill: int,
    table: torch.Tensor,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Return images [B, 3, *size], pixel for pixel from the pictures, each byte then looked up.

    Args:
        pixels: uint8 [all]; pictures are [3, height, width].
        fields: int64 [B, 6] on the device: offset of each picture in `pixels`, its height and width, and where the
            image lies in it: pixel (y, x) is in row ``top + y`` and column ``left + step * x``.
        fill: the byte outside of the pictures.
        table: value for each byte, [3, 256].
        memory_format: of the images.
    """
    made = torch.empty(len(fields), 3, *size, dtype=table.dtype, device=table.device, memory_format=memory_format)
    strides = made.stride()[1], made.stride()[3]
    _cut[len(fields), triton.cdiv(size[0] * size[1], BLOCK)](pixels, made, *strides, table, fields, *size, fill, BLOCK)
    return made


def is_vertical_first(heights: Numbers, widths: Numbers, size: tuple[int, int]) -> Numbers:
    """Whether Pillow starts with the pass along columns, for parts of these sizes: bool [B]."""
    tall = heights - size[0]
    if not probe_order():  # Pillow before 13 does so for strips only
        return (tall > 0) & (heights > 100 * widths)
    return (tall > 0) & (tall > 2 * (widths - size[1]))


@functools.cache
def probe_order() -> bool:
    """Whether this Pillow starts with columns if that is less work; older versions always start with rows."""
    from PIL import Image

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 16), dtype=np.uint8))
    whole = picture.resize((16, 16), Image.Resampling.BILINEAR).resize((8, 16), Image.Resampling.BILINEAR)
    return bool((np.asarray(picture.resize((8, 16), Image.Resampling.BILINEAR)) == np.asarray(whole)).all())


@triton.jit
def _cut(pixels, made, channel, step, table, fields, height, width, fill, BLOCK: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)
    fields += image * CUT_FIELDS
    picture_height, picture_width = tl.load(fields + 1).to(tl.int32), tl.load(fields + 2).to(tl.int32)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = place // width + tl.load(fields + 3).to(tl.int32)
    column = place % width * tl.load(fields + 5).to(tl.int32) + tl.load(fields + 4).to(tl.int32)
    there = place < height * width
    inside = there & (row >= 0) & (row < picture_height) & (column >= 0) & (column < picture_width)
    source, plane = pixels + tl.load(fields) + row * picture_width + column, picture_height * picture_width
    target = made + image * 3 * height * width + place * step
    index = 0
    while index < 3:
        byte = tl.where(inside, tl.load(source, mask=inside, other=0).to(tl.int32), fill)
        tl.store(target, tl.load(table + index * 256 + byte), mask=there)
        source, target, index = source + plane, target + channel, index + 1


@triton.jit
def _weigh(weights, fields, height, width, POSITIONS: tl.constexpr):
    fields += tl.program_id(0) * FIELDS
    side = tl.program_id(1)  # 0: output rows from input rows; 1: columns from columns
    length, size = tl.load(fields + 3 + side), tl.where(side == 0, height, width)
    weights, taps = weights + tl.load(fields + 8 + side), tl.load(fields + 10 + side)
    position = tl.program_id(2) * POSITIONS + tl.arange(0, POSITIONS)
    inside = position < size
    scale = length.to(tl.float64) / size
    support = tl.maximum(scale, 1.0)
    center = (position.to(tl.float64) + 0.5) * scale
    first = tl.maximum((center - support + 0.5).to(tl.int32), 0)
    count = tl.minimum((center + support + 0.5).to(tl.int32), length) - first
    tl.store(weights + position, first, mask=inside)
    total = tl.where(inside, 0.0, 1.0).to(tl.float64)
    tap = 0
    while tap < taps:  # not `for`, which Triton's interpreter does not support with NumPy 2.4
        total += _weigh_tap(tap, first, count, center, support)
        tap += 1
    tap = 0
    while tap < taps:
        weight = _weigh_tap(tap, first, count, center, support) / total * ONE + 0.5
        tl.store(weights + (1 + tap) * size + position, weight.to(tl.int32), mask=inside)
        tap += 1


@triton.jit
def _weigh_tap(tap, first, count, center, support):
    """Return one weight, not yet normalized."""
    distance = (tap + first).to(tl.float64) - center + 0.5
    return tl.where(tap < count, tl.maximum(1.0 - tl.abs(distance * (1.0 / support)), 0.0), 0.0)


@triton.jit
def _pass_first(pixels, half, weights, fields, height, width, BLOCK: tl.constexpr):
    fields += tl.program_id(0) * FIELDS
    part_height, part_width = tl.load(fields + 3).to(tl.int32), tl.load(fields + 4).to(tl.int32)
    upright = tl.load(fields + 5) != 0
    plane, columns = tl.where(upright, height * part_width, part_height * width), tl.where(upright, part_width, width)
    if tl.program_id(1) * BLOCK < plane:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        source, stride = pixels + tl.load(fields), tl.load(fields + 1).to(tl.int32)
        row, column = place // columns, place % columns
        red, green, blue = _sum_taps(
            source, tl.load(fields + 2), stride, row, column, place < plane, weights, fields, height, width, upright
        )
        target = half + tl.load(fields + 7) + place
        tl.store(target, red.to(tl.uint8), mask=place < plane)
        tl.store(target + plane, green.to(tl.uint8), mask=place < plane)
        tl.store(target + 2 * plane, blue.to(tl.uint8), mask=place < plane)


@triton.jit
def _pass_second(half, made, channel, step, table, weights, fields, height, width, BLOCK: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)
    fields += image * FIELDS
    part_height, part_width = tl.load(fields + 3).to(tl.int32), tl.load(fields + 4).to(tl.int32)
    upright, mirrored = tl.load(fields + 5) != 0, tl.load(fields + 6) != 0
    plane = height * width
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, column = place // width, place % width
    column = tl.where(mirrored, width - 1 - column, column)
    stride = tl.where(upright, part_width, width)
    source, source_plane = half + tl.load(fields + 7), stride * tl.where(upright, height, part_height)
    red, green, blue = _sum_taps(
        source, source_plane, stride, row, column, place < plane, weights, fields, height, width, upright == 0
    )
    target = made + image * 3 * plane + place * step
    tl.store(target, tl.load(table + red), mask=place < plane)
    tl.store(target + channel, tl.load(table + 256 + green), mask=place < plane)
    tl.store(target + 2 * channel, tl.load(table + 512 + blue), mask=place < plane)


@triton.jit
def _sum_taps(source, plane, stride, row, column, inside, weights, fields, height, width, vertical):
    """Return bytes of three channels, as int32: weighted sums over pixels of a column if `vertical`, else of a row."""
    side = tl.where(vertical, 0, 1)
    size, taps = tl.where(vertical, height, width), tl.load(fields + 10 + side)
    weights += tl.load(fields + 8 + side) + tl.where(vertical, row, column)
    first = tl.load(weights, mask=inside, other=0)
    pixel = source + tl.where(vertical, first * stride + column, row * stride + first)
    red = first * 0 + HALF
    green, blue = red, red
    tap = 0
    while tap < taps:
        weights += size
        weight = tl.load(weights, mask=inside, other=0)
        there = weight != 0  # beyond the last pixel it is 0
        red += tl.load(pixel, mask=there, other=0).to(tl.int32) * weight
        green += tl.load(pixel + plane, mask=there, other=0).to(tl.int32) * weight
        blue += tl.load(pixel + 2 * plane, mask=there, other=0).to(tl.int32) * weight
        pixel += tl.where(vertical, stride, 1)
        tap += 1
    return red >> 22, green >> 22, blue >> 22
