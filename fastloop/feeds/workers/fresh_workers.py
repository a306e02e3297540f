"""Workers that stay between epochs, but are restarted if the objects that they have copies of have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from fastloop.evidence.samples.state_mark import StateMark
from fastloop.feeds.lazy_loader import Epochs, begin_unchanged
from fastloop.feeds.workers.tried_workers import end_workers


class FreshWorkers:
    """The epochs of a loader whose workers a rung keeps.

    Attributes:
        kept, restarts: epochs that had the workers of the one before, and those for which they were restarted.

    Args:
        tell: receives a line the first time that the workers are restarted.
        epochs: makes the batches of an epoch.
    """

    def __init__(self, *, tell: Callable[[str], None], epochs: Epochs = begin_unchanged) -> None:
        self._tell, self._epochs = tell, epochs
        self.kept = self.restarts = 0
        self._mark: StateMark | None = None

    def batches(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the batches of one epoch, which begins with this call; `begin` makes the loader's iterator."""
        changed = None if self._mark is None else self._mark.find_change()
        kept = loader._iterator
        self.kept += kept is not None and changed is None
        if kept is not None and changed is not None:
            end_workers(kept)
            self.restarts += 1
            loader.__dict__["_iterator"] = None
            if self.restarts == 1:
                self._tell(f"{changed} changes between epochs, so the dataset's workers are restarted then")
        self._mark = StateMark(dataset=loader.dataset, collate_fn=loader.collate_fn)
        return self._epochs(loader, begin)
