"""Pillow's bilinear resize of parts of pictures, on the device and bit for bit.

Pillow resizes in two passes, along rows and along columns, each a weighted sum of a few pixels with weights of 22 bits
behind the point, rounded to bytes in between. So which pass comes first shows; in Pillow 13 that depends on the sizes.
All of it is whole numbers here, too; only the weights are made by floating point, in double precision.
Source: libImaging/Resample.c (precompute_coeffs, normalize_coeffs_8bpc, ImagingResampleHorizontal_8bpc).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from fastloop.feeds.device_store.draws import Numbers

BITS = 22
AT_ONCE = 2**25
"""Pixels between the passes that are made at a time; what leads to them takes 8 bytes each, several times over."""


def resize_parts(
    pixels: torch.Tensor, starts: Numbers, heights: Numbers, widths: Numbers, parts: Numbers, size: tuple[int, int]
) -> torch.Tensor:
    """Bytes [B, 3, *size] as ``picture.crop(part).resize(size)`` makes them.

    Args:
        pixels: uint8 [all]; pictures are [3, height, width].
        starts: where each picture begins in it, int64 [B].
        heights: of the pictures, int64 [B].
        widths: of the pictures, int64 [B].
        parts: top, left, height and width of each part, int64 [B, 4].
    """
    made = pixels.new_empty(len(parts), 3, *size)
    upright = is_vertical_first(parts[:, 2], parts[:, 3], size)
    for vertical in (False, True):
        rows = np.flatnonzero(upright == vertical)
        together = max(1, AT_ONCE // (3 * max(size) * max(1, int(parts[rows, 2:].max(initial=1)))))
        for some in np.split(rows, range(together, len(rows), together)):
            if len(some):
                told = np.concatenate([np.stack([starts, heights, widths]), parts.T])[:, some]
                where = send(some, pixels.device)
                made[where] = _resize(pixels, send(told, pixels.device), told, size, vertical)
    return made


def send(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """To the device, without waiting for it: a copy from memory that is not pinned waits for all work before it."""
    here = torch.from_numpy(numbers)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def is_vertical_first(heights: Numbers, widths: Numbers, size: tuple[int, int]) -> Numbers:
    """Whether Pillow begins with the pass along columns, for parts of these sizes: bool [B]."""
    if not probe_order():
        return np.zeros(len(heights), dtype=bool)
    tall = heights - size[0]
    return (tall > 0) & (tall > 2 * (widths - size[1]))


@functools.cache
def probe_order() -> bool:
    """Whether this Pillow begins with columns where that is less work; older ones always began with rows."""
    from PIL import Image

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 16), dtype=np.uint8))
    whole = picture.resize((16, 16), Image.Resampling.BILINEAR).resize((8, 16), Image.Resampling.BILINEAR)
    return bool((np.asarray(picture.resize((8, 16), Image.Resampling.BILINEAR)) == np.asarray(whole)).all())


def _resize(
    pixels: torch.Tensor, told: torch.Tensor, known: Numbers, size: tuple[int, int], vertical: bool
) -> torch.Tensor:
    """Parts with the same order of passes; `told` and `known` are the same numbers [7, B], there and here."""
    start, picture_height, picture_width, top, left, height, width = told.view(7, -1, 1, 1, 1)
    along, across = (height, width) if vertical else (width, height)
    most_along, most_across = (int(known[5 if vertical else 6].max()), int(known[6 if vertical else 5].max()))
    first, weights = make_weights(along.view(-1), most_along, size[0 if vertical else 1])
    channel = torch.arange(3, device=pixels.device).view(1, 3, 1, 1)
    beside = torch.arange(most_across, device=pixels.device).view(1, 1, -1, 1)
    beside = torch.minimum(beside, across - 1)  # what is beyond a smaller part is made, and not used
    plane = start + channel * (picture_height * picture_width)
    if vertical:  # [B, 3, columns, S]
        begin, stride = plane + top * picture_width + left + beside, picture_width
    else:  # [B, 3, rows, S]
        begin, stride = plane + (top + beside) * picture_width + left, torch.ones_like(picture_width)
    half = _sum_taps(lambda tap: pixels[begin + stride * torch.minimum(first[:, None, None] + tap, along - 1)], weights)
    # The other pass: the sides change places, so that again the last dimension is summed over.
    half = half.transpose(2, 3)  # [B, 3, S, rows or columns]
    other = 1 if vertical else 0
    first, weights = make_weights(across.view(-1), most_across, size[other])
    shape = (*half.shape[:3], size[other])
    whole = _sum_taps(
        lambda tap: half.gather(3, torch.minimum(first[:, None, None] + tap, across - 1).expand(shape)), weights
    )
    return whole if vertical else whole.transpose(2, 3)


def _sum_taps(take: Callable[[int], torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """Bytes [B, 3, L, S] of the weighted sums over the taps; weights are int32 [B, S, taps]."""
    total = torch.full((), 1 << (BITS - 1), dtype=torch.int32, device=weights.device)
    for tap in range(weights.shape[2]):
        total = take(tap).int() * weights[:, None, None, :, tap] + total
    return (total >> BITS).clamp_(0, 255).to(torch.uint8)


def make_weights(lengths: torch.Tensor, longest: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of `size` pixels made of `lengths` pixels [B]: the first that it is made of [B, size], and the weights of
    that and the following ones, int32 [B, size, taps]."""
    length = lengths.double()[:, None]
    scale = length / size
    support = scale.clamp(min=1.0)
    center = (torch.arange(size, dtype=torch.float64, device=lengths.device) + 0.5) * scale
    first = (center - support + 0.5).long().clamp_(min=0)
    last = torch.minimum((center + support + 0.5).long(), lengths[:, None])
    taps = int(np.ceil(max(longest / size, 1.0))) * 2 + 1
    tap = torch.arange(taps, device=lengths.device)
    distance = (tap + first[:, :, None]).double() - center[:, :, None] + 0.5
    weights = (1.0 - (distance * (1.0 / support)[:, :, None]).abs()).clamp_(min=0.0)
    weights = torch.where(tap < (last - first)[:, :, None], weights, 0.0)
    total = torch.zeros_like(center)
    for each in range(taps):  # one after the other, as the sum is rounded
        total = total + weights[:, :, each]
    return first, (weights / total[:, :, None] * (1 << BITS) + 0.5).int()
