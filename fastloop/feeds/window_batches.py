"""The batches of an accumulation window: each collated as the user's loader does it, then concatenated where that goes.

All of it happens where the loader collates: in its worker processes, if it has any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastloop.feeds.accumulation_windows import Joined
from fastloop.feeds.batch_tree import Window, samples
from fastloop.feeds.concatenation import CannotConcatenate, concatenate
from fastloop.feeds.lazy_loader import StandInDataset


class WindowDataset(StandInDataset):
    """Stands in for a map-style dataset and hands out whole windows.

    Torch's fetchers collate all they were asked for at once, and their only door is the dataset.
    Source: torch/utils/data/_utils/fetch.py, ``_MapDatasetFetcher.fetch``.

    Args:
        inner: the user's dataset.
        collate: the user's collate function.
        concatenates: False: leave each window's batches apart, for hooks that come first.
    """

    _OWN = ("inner", "collate", "concatenates")

    def __init__(self, inner: Any, collate: Callable[[Any], Any], concatenates: bool) -> None:
        self.inner, self.collate, self.concatenates = inner, collate, concatenates

    def __getitems__(self, indices: Joined) -> Callable[[], Any]:
        """What makes one window, for the collate function to call: who wraps that expects trouble there."""
        return partial(self._make, indices)

    def _make(self, indices: Joined) -> Any:
        """One window: the concatenation of its batches, or a `Window` of them where that is none."""
        batches, start = [], 0
        for size in indices.sizes:
            batches.append(self.collate(self._fetch(indices[start : start + size])))
            start += size
        if len(batches) == 1:
            return batches[0]
        # A collate function that drops samples would shift the cuts.
        if not self.concatenates or [samples(batch) for batch in batches] != list(indices.sizes):
            return Window(batches)
        try:
            return concatenate(batches)
        except CannotConcatenate:
            return Window(batches)

    def _fetch(self, indices: list[Any]) -> Any:
        fetch = getattr(self.inner, "__getitems__", None)
        return fetch(indices) if fetch else [self.inner[index] for index in indices]


def collate_window(make: Callable[[], Any]) -> Any:
    """The collate function that goes with a `WindowDataset`."""
    return make()
