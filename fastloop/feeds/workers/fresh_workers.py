"""Workers that stay between epochs, but are restarted if the objects that they have copies of have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from fastloop.evidence.samples.state_mark import StateMark
from fastloop.feeds.lazy_loader import Epochs
from fastloop.feeds.workers.tried_workers import end_workers


class FreshWorkers:
    """The epochs of a loader whose workers a rung keeps.

    Args:
        tell: receives a line the first time that the workers are restarted.
        epochs: makes the batches of an epoch; None if the loader itself does.
    """

    def __init__(self, *, tell: Callable[[str], None], epochs: Epochs | None = None) -> None:
        self._tell, self._epochs = tell, epochs
        self._mark: StateMark | None = None
        self._has_told = False

    def batches(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the batches of one epoch, which begins with this call; `begin` makes the loader's iterator."""
        changed = None if self._mark is None else self._mark.find_change()
        if (kept := loader._iterator) is not None and changed is not None:
            end_workers(kept)
            loader.__dict__["_iterator"] = None
            if not self._has_told:
                self._has_told = True
                self._tell(f"{changed} changes between epochs, so the dataset's workers are restarted then")
        self._mark = StateMark(dataset=loader.dataset, collate_fn=loader.collate_fn)
        return begin() if self._epochs is None else self._epochs(loader, begin)
