"""Makes batches that wait on the device anew if the objects that their samples were read from have changed.

A run without a feed makes each batch when it is needed, from what its dataset holds then.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset, _DatasetKind

from fastloop.evidence.samples.state_mark import StateMark
from fastloop.feeds.lazy_loader import SameOrder, makes_iterators, name_sampler


class DrawnIndices(SameOrder):
    """Stands in for a loader's (batch) sampler, and keeps the indices that the last ``iter`` has drawn."""

    _OWN: ClassVar[Collection[str]] = ("inner", "drawn")

    def __init__(self, inner: Any) -> None:
        self.inner, self.drawn = inner, deque[Any]()

    def __iter__(self) -> Iterator[Any]:
        drawn: deque[Any] | None = None
        for indices in self.inner:
            if drawn is None:  # not before: torch calls `iter` twice with workers
                self.drawn = drawn = deque()
            drawn.append(copy.copy(indices))  # some samplers reuse one list
            yield indices


class MadeAnew:
    """Finds out during one epoch whether waiting batches are outdated, and makes them anew.

    Args:
        loader: if its sampler is no `DrawnIndices`, outdated batches are not made anew, only counted for the report.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self._handed_out = loader, 0
        self._mark: StateMark | None = None
        self._drawn: deque[Any] | None = None
        self.due = deque[Any]()
        """Indices of the batches that have to be made anew, each when it is due."""

    def note_fetched(self) -> None:
        """Note that a batch was fetched. What its samples have left behind in this process is no change."""
        if self._mark is None:
            sampler = getattr(self._loader, name_sampler(self._loader))
            self._drawn = sampler.drawn if type(sampler) is DrawnIndices else None
            self._mark = StateMark(dataset=self._loader.dataset, collate_fn=self._loader.collate_fn)
        elif not self._loader.num_workers:
            self._mark.renew()

    def note_handed_out(self) -> None:
        """Note that the training got a batch."""
        self._handed_out += 1
        if self._drawn:
            self._drawn.popleft()

    def find_change(self, waiting: int) -> tuple[str, int] | None:
        """Return why the waiting batches are outdated, and how many outdated ones the training may use all the same;
        None if nothing has changed. Waiting batches that can be made anew become `due`."""
        if self._mark is None or (changed := self._mark.find_change()) is None:
            return None
        why = f"{changed} changed while batches waited on the device"
        is_late, self._mark = self._mark.is_late, None
        outdated = self._handed_out if is_late else 0
        is_theirs = is_late and not self._loader.num_workers  # samples may have changed it themselves, here
        if is_theirs or self._drawn is None or len(self._drawn) < waiting:
            return why, outdated + waiting
        self.due.extend(self._drawn.popleft() for _ in range(waiting))
        return why, outdated

    def make_due(self) -> Any:
        """Make the next due batch in this process."""
        loader: Any = self._loader
        kind: Any = _DatasetKind
        how = (loader._dataset_kind, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last)
        return kind.create_fetcher(*how).fetch(self.due.popleft())


def watch_loader(loader: Any, own: Any) -> Callable[[], MadeAnew] | None:
    """Prepare our copy of the user's `own` loader; return a function that begins to watch an epoch. None if its batches
    cannot be outdated (in a plain run, the user's workers have old copies too), or if nothing is known of them."""
    if not isinstance(loader, DataLoader) or loader is own or own.num_workers or makes_iterators(type(own)):
        return None
    if not isinstance(loader.dataset, IterableDataset):
        name = name_sampler(loader)
        loader.__dict__[name] = DrawnIndices(getattr(loader, name))
    return lambda: MadeAnew(loader)
