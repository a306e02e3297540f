"""A batch sampler that hands out whole accumulation windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any


class WindowSampler:
    """Joins each `window` batches of a batch sampler into one, and remembers their sizes in order.

    The sizes matter: Lightning weighs every batch of a window the same (1/window), whatever its size, and so does a
    merged window when it is cut again. They are kept in a queue because batches are drawn ahead of their use.

    Args:
        batches: the user's batch sampler, any iterable of index lists.
        window: batches per window.
        limit: batches of an epoch to use (``limit_train_batches``); None = all.
    """

    def __init__(self, batches: Iterable[Any], window: int, limit: int | None = None) -> None:
        self.batches, self.window, self.limit = batches, window, limit
        self.sizes: deque[tuple[int, ...]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        self.sizes.clear()
        source = islice(iter(self.batches), self.limit)
        while window := [list(batch) for batch in islice(source, self.window)]:
            self.sizes.append(tuple(len(batch) for batch in window))
            yield [index for batch in window for index in batch]

    def __len__(self) -> int:
        batches = len(self.batches)  # type: ignore[arg-type]
        return -(-min(batches, batches if self.limit is None else self.limit) // self.window)

    def __getattr__(self, name: str) -> Any:
        if name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)
