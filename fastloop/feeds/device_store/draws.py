"""Draws like torchvision's random transforms, but for a whole batch at once, from the same stream of numbers.

The plain loader draws sample by sample, one call per number. On the CPU each of these calls takes one 32-bit word from
the generator, so all words of a batch can be drawn in one call and distributed afterwards.
Source: ATen/core/TransformationHelper.h (uniform_real, uniform_int_from_to), torchvision/transforms/transforms.py and
v2/_geometry.py (RandomCrop, RandomHorizontalFlip, RandomResizedCrop).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastloop.records.images import RandomCrop, RandomHorizontalFlip, RandomResizedCrop

Numbers = NDArray[Any]
_WORD, _MANTISSA = 2**32 - 1, 2**24 - 1


def send(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """Copy to the device without a wait: a copy from unpinned memory would wait for all earlier work."""
    here = torch.from_numpy(numbers)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def draw_words(count: int) -> Numbers:
    """Draw the next `count` 32-bit words from the CPU's default generator, int64 [count]."""
    pairs = torch.empty(count // 2, dtype=torch.int64).random_(-(2**63), None).numpy()
    words = np.stack([pairs >> 32 & _WORD, pairs & _WORD], axis=1).reshape(-1)
    if count % 2:
        state = torch.get_rng_state()
        last = torch.empty(1, dtype=torch.int64).random_(-(2**63), None).numpy()
        torch.set_rng_state(state)
        torch.rand(1)  # advances the generator by one word
        words = np.concatenate([words, last >> 32 & _WORD])
    return words


def _to_uniform(words: Numbers) -> Numbers:
    """Convert words to numbers from 0 up to 1, as torch does."""
    return (words & _MANTISSA) * np.float32(2**-24)


@dataclass(frozen=True)
class Drawing:
    """A random step, and how the user's transform draws its numbers."""

    step: RandomCrop | RandomHorizontalFlip
    by_side: bool
    """True: a crop draws for each side that has more than one position (v2). False: for both if either has (v1)."""


@dataclass(frozen=True)
class Placement:
    """Position of a batch's pixels in the stored pictures: row ``top + y`` and column ``left + step * x``. Positions
    outside the picture are padding. All int64 [B]."""

    top: Numbers
    left: Numbers
    step: Numbers

    def is_inside(self, heights: Numbers, widths: Numbers, size: tuple[int, int]) -> bool:
        """Whether no picture of these sizes [B] needs padding for an image of `size`."""
        last = self.left + self.step * (size[1] - 1)
        left, right = np.minimum(self.left, last), np.maximum(self.left, last)
        return bool(
            (self.top.min() >= 0)
            and (left.min() >= 0)
            and (self.top + size[0] <= heights).all()
            and (right < widths).all()
        )


def draw(drawings: Sequence[Drawing], heights: Numbers, widths: Numbers) -> Placement:
    """Draw for pictures of these sizes [B], in order, from the default generator."""
    needed = [column for each in _list_needs(drawings, heights, widths) for column in each]
    taken = np.stack(needed, axis=1) if needed else np.zeros((len(heights), 0), dtype=bool)
    words = np.zeros(taken.shape, dtype=np.int64)
    words[taken] = draw_words(int(taken.sum()))
    columns = iter(words.T)
    top, left, step = np.zeros_like(heights), np.zeros_like(widths), np.ones_like(widths)
    for each in drawings:
        if isinstance(each.step, RandomHorizontalFlip):
            flips = _to_uniform(next(columns)) < np.float32(each.step.p)
            left = np.where(flips, left + step * (widths - 1), left)
            step = np.where(flips, -step, step)
        else:
            (height, width), (before, above, after, below) = each.step.size, each.step.padding
            top = top + next(columns) % (heights + above + below - height + 1) - above
            left = left + step * (next(columns) % (widths + before + after - width + 1) - before)
            heights, widths = np.full_like(heights, height), np.full_like(widths, width)
    return Placement(top, left, step)


def _list_needs(drawings: Sequence[Drawing], heights: Numbers, widths: Numbers) -> list[list[Numbers]]:
    """List, for each step and each number it draws, which pictures need a word: bool [B]."""
    needs = []
    for each in drawings:
        if isinstance(each.step, RandomHorizontalFlip):
            needs.append([np.ones(len(heights), dtype=bool)])
            continue
        (height, width), (before, above, after, below) = each.step.size, each.step.padding
        rows, columns = heights + above + below > height, widths + before + after > width
        needs.append([rows, columns] if each.by_side else [rows | columns] * 2)
        heights, widths = np.full_like(heights, height), np.full_like(widths, width)
    return needs


# -- random resized crops: the numbers themselves decide how many a picture needs -------------------------------------

TRIES = 10
"""Attempts to draw a part that lies within the picture; after that, the center is used."""


def draw_parts(
    step: RandomResizedCrop, flips: Sequence[RandomHorizontalFlip], heights: Numbers, widths: Numbers
) -> tuple[Numbers, Numbers]:
    """Draw each picture's part, as top, left, height and width, int64 [B, 4], and whether it is mirrored, bool [B]."""
    state = torch.get_rng_state()
    words = draw_words(len(heights) * ((2 * TRIES + 2) + len(flips)))  # at most
    areas, ratios = _list_shapes(step, words)
    mirrors = [(_to_uniform(words) < np.float32(flip.p)).tolist() for flip in flips]
    numbers, at = words.tolist(), 0
    parts, mirrored = [], []
    for height, width in zip(heights.tolist(), widths.tolist(), strict=True):
        part = None
        for _ in range(TRIES):
            area, ratio = height * width * areas[at], ratios[at + 1]
            at += 2
            part_width, part_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < part_width <= width and 0 < part_height <= height:
                top = numbers[at] % (height - part_height + 1)
                part = top, numbers[at + 1] % (width - part_width + 1), part_height, part_width
                at += 2
                break
        parts.append(part or _take_middle(step, height, width))
        odd = False
        for mirrors_at in mirrors:
            odd ^= mirrors_at[at]
            at += 1
        mirrored.append(odd)
    torch.set_rng_state(state)
    draw_words(at)  # as many as the plain loader draws
    return np.array(parts, dtype=np.int64), np.array(mirrored)


def _list_shapes(step: RandomResizedCrop, words: Numbers) -> tuple[list[float], list[float]]:
    """Convert each word to a share of the area, and to an aspect ratio, in single precision as in torch."""
    uniform = torch.from_numpy(_to_uniform(words)).float()
    log_ratio = torch.log(torch.tensor(step.ratio))
    scale = torch.tensor(step.scale)
    areas = uniform * (scale[1] - scale[0]) + scale[0]
    ratios = torch.exp(uniform * (log_ratio[1] - log_ratio[0]) + log_ratio[0])
    return areas.tolist(), ratios.tolist()


def _take_middle(step: RandomResizedCrop, height: int, width: int) -> tuple[int, int, int, int]:
    in_ratio = width / height
    part_height, part_width = height, width
    if in_ratio < min(step.ratio):
        part_height = round(width / min(step.ratio))
    elif in_ratio > max(step.ratio):
        part_width = round(height * max(step.ratio))
    return (height - part_height) // 2, (width - part_width) // 2, part_height, part_width
