"""Notes of what a model's code did that stay: a rehearsal or a search puts back the lists that this code writes to."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any


class Noted:
    """A list out of reach: its items are in a queue, which nothing can save."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def add(self, item: Any) -> int:
        """Note it, and return how many there are."""
        self._queue.put(item)
        return self._queue.qsize()

    def take(self) -> list[Any]:
        """All items so far, which are gone then."""
        return [self._queue.get() for _ in range(self._queue.qsize())]
