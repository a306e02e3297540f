"""Turns accumulation windows into batches: the sampler joins their indices, the dataset builds them.

Each batch of a window is collated as in the user's loader; then they are concatenated if possible. This happens where
the loader collates: in its worker processes, if it has any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from fastloop.feeds.batch_tree import BatchWindow, CannotRegroup, count_rows
from fastloop.feeds.concatenation import concatenate
from fastloop.feeds.lazy_loader import StandIn, StandInDataset


class Joined(list[Any]):
    """The indices of a window's batches, one after the other, and how many each batch has."""

    sizes: tuple[int, ...] = ()


class WindowSampler(StandIn):
    """Joins every `window` batches of a batch sampler into one, and remembers their sizes in order.

    The sizes matter: Lightning gives every batch of a window the same weight (1/window), whatever its size, and so does
    a merged window when it is cut again. They are in a queue because batches are drawn ahead of their use.

    Args:
        inner: the user's batch sampler, any iterable of index lists.
        window: batches per window.
        limit: batches of an epoch to use (``limit_train_batches``); None for all.
    """

    def __init__(self, inner: Iterable[Any], window: int, limit: int | None = None) -> None:
        self.inner, self.window, self.limit = inner, window, limit
        self.limit_once: int | None = None
        """A lower limit for the next epoch: the batches that a resumed run has left in it."""
        self.first_once: int | None = None
        """Batches in that epoch's first window: a run may resume in the middle of a window."""
        self.sizes: deque[tuple[int, ...]] = deque()

    def __iter__(self) -> Iterator[Joined]:
        self.sizes.clear()
        limit, self.limit_once = self.limit if self.limit_once is None else self.limit_once, None
        size, self.first_once = self.first_once or self.window, None
        source = islice(iter(self.inner), limit)
        while window := [list(batch) for batch in islice(source, size)]:
            size = self.window
            joined = Joined(index for batch in window for index in batch)
            joined.sizes = tuple(len(batch) for batch in window)
            self.sizes.append(joined.sizes)
            yield joined

    def __len__(self) -> int:
        batches = len(self.inner)
        return -(-min(batches, batches if self.limit is None else self.limit) // self.window)


class WindowDataset(StandInDataset):
    """Stands in for a map-style dataset and returns whole windows.

    Torch's fetchers collate a whole request at once, and the dataset is the only place to intervene.
    Source: torch/utils/data/_utils/fetch.py, ``_MapDatasetFetcher.fetch``.

    Args:
        inner: the user's dataset.
        collate: the user's collate function.
        concatenates: False keeps each window's batches separate, for hooks that run on single batches first.
    """

    _OWN = ("inner", "collate", "concatenates")

    def __init__(self, inner: Any, collate: Callable[[Any], Any], concatenates: bool) -> None:
        self.inner, self.collate, self.concatenates = inner, collate, concatenates

    def __getitems__(self, indices: Joined) -> Callable[[], Any]:
        """Return a function that makes one window. The collate function calls it, because code that wraps the collate
        function expects errors there."""
        return partial(self._make, indices)

    def _make(self, indices: Joined) -> Any:
        """Make one window: the concatenation of its batches, or a `BatchWindow` if they cannot be concatenated."""
        batches, start = [], 0
        for size in indices.sizes:
            batches.append(self.collate(self._fetch(indices[start : start + size])))
            start += size
        if len(batches) == 1:
            return batches[0]
        # A collate function that drops samples would shift the cuts.
        if not self.concatenates or [count_rows(batch) for batch in batches] != list(indices.sizes):
            return BatchWindow(batches)
        try:
            return concatenate(batches)
        except CannotRegroup:
            return BatchWindow(batches)

    def _fetch(self, indices: list[Any]) -> Any:
        fetch = getattr(self.inner, "__getitems__", None)
        return fetch(indices) if fetch else [self.inner[index] for index in indices]


def collate_window(make: Callable[[], Any]) -> Any:
    """Collate function for a `WindowDataset`."""
    return make()
