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
        send: what goes to a worker in place of a batch's indices.
    """

    def __init__(self, inner: Any = None, send: Callable[[Any], Any] | None = None) -> None:
        self.inner, self.send = inner, send
        self.pending: deque[Any] = deque()
        self.resumes = False
        """Whether the next ``iter`` starts with the pending indices and then continues the sampler."""
        self.goes_on = False
        """Whether the next ``iter`` only continues the sampler: others still make the pending batches."""
        self._reader = 0
        """Which ``iter`` may go on: the last one."""
        self.failed: Exception | None = None
        """What the sampler raised."""
        self._source: Iterator[Any] = iter(())

    def hand_over(self) -> None:
        """Let the next ``iter`` go on from here, while who reads now gets no more indices."""
        self._reader += 1
        self.goes_on = True

    def take_back(self) -> None:
        """Undo `hand_over` before anybody has read: who read before goes on."""
        self._reader -= 1
        self.goes_on = False

    def begin_epoch(self) -> None:
        """Forget what the last epoch left: whoever knows an epoch's length stops at its last batch."""
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
            self.pending.append(copy.copy(indices))  # some fill one list again and again, and torch sends it later
            yield indices if self.send is None else self.send(self.pending[-1])
