"""Keeps track of an epoch's batches: drawn from the sampler, waiting for DALI, being made, or to be made again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

from fastloop.errors import let_through
from fastloop.feeds.dali.changed_steps import StepsWatch
from fastloop.feeds.dali.graph import encode
from fastloop.feeds.dali.pixels import is_deep


class BatchRequest(NamedTuple):
    """A batch that the sampler requests."""

    indices: Sequence[Any]
    paths: tuple[str, ...]
    labels: Any
    """Collated as in the loader, on the device."""
    deep: str | None
    """One of its files that has more than 8 bits; None if there is none."""


class BatchQueue:
    """The batches of an epoch, in order, from the sampler until their pictures are taken.

    Args:
        changes: knows the dataset's current files.
        device: where labels end up.

    Attributes:
        under_way: batches that DALI is making, in order.
        failed: error of the user's sampler or labels; to be raised once the batches before it were returned.
    """

    def __init__(self, changes: StepsWatch, device: torch.device) -> None:
        self._changes, self._device = changes, device
        self._indices: Iterator[Any] = iter(())
        self._ready: deque[BatchRequest] = deque()
        """Batches to pass to DALI next."""
        self.under_way: deque[BatchRequest] = deque()
        self._again: deque[BatchRequest] = deque()
        """Batches that a dropped pipeline left unfinished."""
        self.failed: Exception | None = None
        self._depths = bytearray(changes.source.count)
        """For each sample: 0 if not yet checked, 1 if it has 8 bits, 2 if it has more."""

    def begin(self, batch_sampler: Any) -> None:
        """Begin an epoch."""
        self._indices, self.failed = iter(batch_sampler), None

    def draw(self) -> BatchRequest | None:
        """Return the next batch: one that was put back, else one from the sampler; None at the end, or if the user's
        code raised an error."""
        if self._again:
            return self._again.popleft()
        if self.failed is not None:
            return None
        try:
            indices = next(self._indices)
            located = [self._changes.source.locate(index) for index in indices]
            labels = default_collate([label for _, label in located])
        except StopIteration:
            return None
        except Exception as error:
            let_through(error)
            self.failed = error
            return None
        if isinstance(labels, torch.Tensor):
            labels = labels.to(self._device, non_blocking=True)
        paths = tuple(path for path, _ in located)
        deep = next((path for index, path in zip(indices, paths, strict=True) if self._is_deep(int(index), path)), None)
        return BatchRequest(indices, paths, labels, deep)

    def fill(self, batches: int) -> None:
        """Draw until this many batches wait for DALI, or there are no more."""
        while len(self._ready) < batches and (drawn := self.draw()) is not None:
            self._ready.append(drawn)

    def feed(self) -> list[Any]:
        """Return the paths of the next batch; DALI calls this."""
        if not self._ready:
            raise StopIteration
        request = self._ready.popleft()
        self.under_way.append(request)
        return [encode(path) for path in request.paths]

    def put_back(self) -> None:
        """Queue all unfinished batches to be drawn again, in the same order."""
        self._again = deque([*self.under_way, *self._ready, *self._again])
        self.under_way.clear()
        self._ready.clear()

    def drop_waiting(self) -> None:
        """Drop the batches that DALI has not begun."""
        self._ready.clear()
        self._again.clear()

    def _is_deep(self, index: int, path: str) -> bool:
        """Whether PIL reads more than 8 bits of gray; checked once per file."""
        if not self._depths[index]:
            self._depths[index] = 1 + is_deep(path)
        return self._depths[index] == 2
