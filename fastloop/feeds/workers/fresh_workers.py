"""Workers that stay between epochs, but are restarted if the objects that they have copies of have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from fastloop.evidence.samples.state_mark import StateMark
from fastloop.feeds.lazy_loader import Epochs, begin_unchanged, parts_in_place
from fastloop.feeds.workers.ending import end_workers
from fastloop.feeds.workers.read_twice import ReadTwice

PENDING = "it is not known yet whether reading samples changes them"


class FreshWorkers:
    """The epochs of a loader whose workers a rung keeps.

    Attributes:
        kept, restarts: epochs that kept the workers of the previous one, and epochs that restarted them.
        reason: why they were restarted last; None if they were not.

    Args:
        tell: receives a line the first time that the workers are restarted.
        epochs: makes the batches of an epoch.
        twice: a check whether reading a sample changes it; None if that does not matter.
        is_training: whether the training itself requests an epoch now, not a callback.
    """

    def __init__(
        self,
        *,
        tell: Callable[[str], None],
        epochs: Epochs = begin_unchanged,
        twice: ReadTwice | None = None,
        is_training: Callable[[], bool] = lambda: True,
    ) -> None:
        self._tell, self._epochs, self._twice, self._is_training = tell, epochs, twice, is_training
        self._is_read = False
        self.kept = self.restarts = 0
        self.reason: str | None = None
        self._mark: StateMark | None = None

    def batches(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the batches of one epoch, which begins with this call; `begin` makes the loader's iterator."""
        kept = loader._iterator
        if self._is_read and kept is not None and not self._is_training():
            return _begin_apart(loader, begin)
        changed = None if self._mark is None or kept is None else self._find_change()
        self.kept += kept is not None and changed is None
        if kept is not None and changed is not None:
            end_workers(kept)
            self.restarts, self.reason = self.restarts + 1, changed
            loader.__dict__["_iterator"] = None
            if self.restarts == 1:
                self._tell(f"{changed}, so the loader's workers are restarted between epochs")
        self._mark = StateMark(dataset=loader.dataset, collate_fn=loader.collate_fn)
        return self._read(self._epochs(loader, begin))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._is_read = True
        try:
            yield from batches
        finally:
            self._is_read = False

    def may_keep(self) -> bool:
        """Whether reading a sample is not known to change it, and no answer to that is still to come."""
        if self._twice is None:
            return True
        changes, _ = self._twice.find_change()
        return changes is False or (changes is None and not self._twice.is_pending)

    def _find_change(self) -> str | None:
        """Return why the workers must not stay; None if they may."""
        if self._twice is not None and not self.may_keep():
            return self._twice.find_change()[1] or PENDING
        changed = None if self._mark is None else self._mark.find_change()
        return None if changed is None else f"{changed} changes between epochs"


def _begin_apart(loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Start an iterator with its own workers, for a callback that reads the loader in mid-epoch. torch would reset the
    loader's one persistent iterator, which the training is reading."""
    with parts_in_place(loader, {"persistent_workers": False, "_iterator": None}):
        return begin()
