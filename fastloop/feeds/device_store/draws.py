"""What torchvision's random transforms draw, for a whole batch at once and out of the same stream of numbers.

The plain loader draws sample by sample, a call for each number. On the CPU each of these calls takes one word of 32
bits from the generator, so that a batch's words can be taken in one call and shared out afterwards.
Source: ATen/core/TransformationHelper.h (uniform_real, uniform_int_from_to), torchvision/transforms/transforms.py and
v2/_geometry.py (RandomCrop, RandomHorizontalFlip).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastloop.records.images import RandomCrop, RandomHorizontalFlip

Numbers = NDArray[Any]
_WORD, _MANTISSA = 2**32 - 1, 2**24 - 1


def draw_words(count: int) -> Numbers:
    """The next `count` words of 32 bits from the CPU's default generator, int64 [count]."""
    pairs = torch.empty(count // 2, dtype=torch.int64).random_(-(2**63), None).numpy()
    words = np.stack([pairs >> 32 & _WORD, pairs & _WORD], axis=1).reshape(-1)
    if count % 2:
        state = torch.get_rng_state()
        last = torch.empty(1, dtype=torch.int64).random_(-(2**63), None).numpy()
        torch.set_rng_state(state)
        torch.rand(1)  # moves on by one word
        words = np.concatenate([words, last >> 32 & _WORD])
    return words


@dataclass(frozen=True)
class Drawing:
    """A random step, and how the user's transform draws for it."""

    step: RandomCrop | RandomHorizontalFlip
    by_side: bool
    """A crop draws for each side that has more than one place (v2); else for both, unless neither has (v1)."""


@dataclass(frozen=True)
class Placement:
    """Where the pixels of a batch are in its stored pictures: row ``top + y`` and column ``left + step * x``. Outside
    of them is padding. All int64 [B]."""

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
    """Draw for pictures of these sizes [B], in their order, from the default generator."""
    needed = [column for each in _list_needs(drawings, heights, widths) for column in each]
    taken = np.stack(needed, axis=1) if needed else np.zeros((len(heights), 0), dtype=bool)
    words = np.zeros(taken.shape, dtype=np.int64)
    words[taken] = draw_words(int(taken.sum()))
    columns = iter(words.T)
    top, left, step = np.zeros_like(heights), np.zeros_like(widths), np.ones_like(widths)
    for each in drawings:
        if isinstance(each.step, RandomHorizontalFlip):
            flips = (next(columns) & _MANTISSA) * np.float32(2**-24) < np.float32(each.step.p)
            left = np.where(flips, left + step * (widths - 1), left)
            step = np.where(flips, -step, step)
        else:
            (height, width), (before, above, after, below) = each.step.size, each.step.padding
            top = top + next(columns) % (heights + above + below - height + 1) - above
            left = left + step * (next(columns) % (widths + before + after - width + 1) - before)
            heights, widths = np.full_like(heights, height), np.full_like(widths, width)
    return Placement(top, left, step)


def _list_needs(drawings: Sequence[Drawing], heights: Numbers, widths: Numbers) -> list[list[Numbers]]:
    """For each step, the pictures that take a word for each of its numbers: bool [B]."""
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
