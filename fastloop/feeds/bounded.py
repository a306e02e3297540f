"""Batches of an epoch, asked for as often as there are any, and not once more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from fastloop.feeds.standin import StandIn


class Bounded(StandIn):
    """Stands in for a batch sampler whose sampler shuffles by a generator of its own.

    Such a sampler draws from its generator once more when it is asked beyond its end, and then shuffles the next epoch
    differently. Lightning's loop counts batches and does not ask; worker processes and feeds, which read ahead, do.
    Source: torch/utils/data/sampler.py, RandomSampler, ``num_samples % n``.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.inner), len(self.inner))


def bounded(loader: Any) -> Any:
    """A stand-in for its batch sampler where one is needed, else None. A loader that can say where it stands asks its
    sampler's iterators for that, and so keeps its own."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    own = getattr(getattr(batch_sampler, "sampler", None), "generator", None) is not None
    return Bounded(batch_sampler) if own and hasattr(batch_sampler, "__len__") and not hasattr(loader, "state_dict") \
        else None  # fmt: skip
