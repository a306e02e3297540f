"""Keeps the indices of batches that a loader has asked for and not returned, so that others can make these batches."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
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
        """Whether the next ``iter`` only continues the sampler: others still make the pending batches."""
        self._reader = 0
        """Number of the last ``iter``, the only one that may continue."""
        self.failed: Exception | None = None
        """Exception that the sampler raised."""
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
            except Exception as error:
                self.failed = error
                raise
            self.pending.append(copy.copy(indices))  # some samplers reuse one list, and torch sends it later
            yield indices if self.send is None else self.send(self.pending[-1])
