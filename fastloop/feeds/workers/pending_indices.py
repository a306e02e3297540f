"""Keeps the indices of batches that a loader has requested but not returned, so that others can make these batches."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from traceback import walk_tb
from typing import Any

from fastloop.feeds.lazy_loader import StandIn


class PendingIndices(StandIn):
    """Stands in for the loader's (batch) sampler: keeps the indices of batches that were not yet returned.

    Args:
        send: makes what is sent to a worker in place of a batch's indices; None to send the indices.
    """

    def __init__(self, inner: Any = None, send: Callable[[Any], Any] | None = None) -> None:
        self.inner, self.send = inner, send
        self.pending: deque[Any] = deque()
        self.resumes = False
        """Whether the next ``iter`` starts with the pending indices and then continues the sampler."""
        self.goes_on = False
        """Whether the next ``iter`` only continues the sampler, since others still make the pending batches."""
        self._reader = 0
        """Number of the last ``iter``, the only one that may continue."""
        self._source: Iterator[Any] = iter(())

    def hand_over(self) -> None:
        """Let the next ``iter`` continue from here; the current reader gets no more indices."""
        self._reader += 1
        self.goes_on = True

    def take_back(self) -> None:
        """Undo `hand_over` before anything was read: the previous reader continues."""
        self._reader -= 1
        self.goes_on = False

    def begin_epoch(self) -> None:
        """Forget what the last epoch left: a reader that knows an epoch's length stops at its last batch."""
        self.resumes = self.goes_on = False
        self.pending = deque()

    def has_raised(self, error: BaseException) -> bool:
        """Whether the sampler raised this, so that its traceback leads through here. Keeping the exception would keep
        torch's half-made iterator, too, and its connections are closed twice where cyclic garbage is collected."""
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        return any(each.f_code is _READS and each.f_locals.get("self") is self for each in frames)

    def __iter__(self) -> Iterator[Any]:
        # Do nothing before the first index is requested: torch calls `iter` twice with workers, once without.
        if self.goes_on:
            self.goes_on = False
        else:
            self._source = chain(self.pending, self._source) if self.resumes else iter(self.inner)
            self.pending, self.resumes = deque(), False
        self._reader = reader = self._reader + 1
        while reader == self._reader:
            try:
                indices = next(self._source)
            except StopIteration:
                return
            self.pending.append(copy.copy(indices))  # some samplers reuse one list, and torch sends it later
            yield indices if self.send is None else self.send(self.pending[-1])


_READS = PendingIndices.__iter__.__code__
