"""Which micro-batches leave an optimizer step unchanged, how much memory they take, and which is the fastest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TOLERANCE = 0.02
"""Sizes within this share of the fastest rate count as equally fast; the user's wins, else the next larger one."""
WORSE = 0.03
"""A search ends when two sizes in a row are slower than the best by more than this share."""


@dataclass(frozen=True, kw_only=True)
class FoundSize:
    """The result of a search on one rank, or on all."""

    size: int
    """Samples; this size has run in this process."""
    rates: Mapping[int, float] = field(default_factory=dict)
    """Samples per second, forward and backward, of the sizes that were timed."""
    why: str = ""
    """What limits it, or why there was no search."""
    uncompiled: int | None = None
    """The size to use if the model is not compiled after all; None = the same."""
    later: int | None = None
    """A faster size that only fits with rungs that are not on yet; None if there is none."""
    room_bytes: float | None = None
    """Memory that larger sizes did not fit into; None if memory is not the limit."""


def list_sizes(own: int, batches: int) -> list[int]:
    """Return the micro-batch sizes, ascending, that divide an optimizer step evenly.

    Args:
        own: samples in the user's batch.
        batches: how many of these batches in a step may be merged.
    """
    parts = [size for size in range(1, own) if own % size == 0]
    return parts + [own * count for count in range(1, batches + 1) if batches % count == 0]


def predict_bytes(peaks: Mapping[int, int], size: int) -> float | None:
    """Memory of a micro-batch, extrapolated linearly from the two largest that ran; None if fewer ran.

    Args:
        peaks: bytes by size. Parameters, gradients, optimizer state and slack are the same in all, so the slope is the
            memory of one sample's activations.
    """
    if len(peaks) < 2:
        return None
    small, large = sorted(peaks)[-2:]
    slope = max(0.0, (peaks[large] - peaks[small]) / (large - small))
    return peaks[large] + slope * (size - large)


def are_last_two_slower(rates: Sequence[float]) -> bool:
    """Whether the last two of these rates are slower than the best by more than ``WORSE``."""
    return len(rates) > 2 and all(rate < max(rates) * (1 - WORSE) for rate in rates[-2:])


def choose_size(rates: Mapping[int, float], own: int) -> int:
    """Of the sizes that are about as fast as the fastest, return the user's own, else the smallest larger one, else the
    largest."""
    enough = [size for size, rate in rates.items() if rate >= max(rates.values()) * (1 - TOLERANCE)]
    return min((size for size in enough if size >= own), default=max(enough))
