"""What was drawn of a dataset in one epoch, in whatever order: the same samples have the same tally.

The ids are kept as they come and looked at in bulk, some ten nanoseconds each, when the epoch ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

_AT_MOST = 2**17
"""Bytes of ids that are kept before they are looked at."""
_MARKED = 2**27
"""Datasets of more samples are not looked through for samples that were drawn twice."""


class Sum(NamedTuple):
    """All of one epoch."""

    digest: int
    """Sum of a hash of each id, modulo 2**64."""
    again: int | None
    """Ids that had been drawn before; None where ids do not count the samples of a dataset."""


class Epoch(NamedTuple):
    """What one loader gave to an epoch, in whatever order."""

    complete: bool
    """All batches that the loader had."""
    digest: int | None = None
    """See `Tally`; None where only the content is known."""
    again: int | None = None
    """Samples that had been drawn before in this epoch; None = unknown."""


class Tally:
    """Adds up the ids of an epoch.

    Args:
        dataset: samples that there are, with ids from 0 on; None = unknown.
    """

    def __init__(self, dataset: int | None = None) -> None:
        self.dataset = dataset
        self._begin()

    def add(self, ids: bytes) -> None:
        """Ids of 8 bytes each."""
        self._kept.append(ids)
        self._size += len(ids)
        if self._size >= _AT_MOST:
            self._look()

    def take(self) -> Sum:
        """All since it was last asked."""
        self._look()
        again = None if self._seen is None else self._ids - int(numpy.count_nonzero(self._seen))
        found = Sum(self._digest, again)
        self._begin()
        return found

    def _begin(self) -> None:
        self._kept: list[bytes] = []
        self._size = self._ids = self._digest = 0
        known = self.dataset is not None and self.dataset <= _MARKED
        self._seen = numpy.zeros(self.dataset or 0, dtype=bool) if known else None

    def _look(self) -> None:
        ids = numpy.frombuffer(b"".join(self._kept), dtype=numpy.uint64)
        self._kept.clear()
        self._size = 0
        self._ids += len(ids)
        self._digest = (self._digest + int(_mixed(ids).sum(dtype=numpy.uint64))) % 2**64
        if self._seen is not None and len(ids):
            if int(ids.max()) < len(self._seen):  # a negative id is a large one here
                self._seen[ids.astype(numpy.int64)] = True
            else:
                self._seen = None


def together(epochs: Sequence[Epoch]) -> Epoch:
    """An epoch of several loaders, whose samples are told apart."""
    complete = bool(epochs) and all(epoch.complete for epoch in epochs)
    digests = [epoch.digest for epoch in epochs if epoch.digest is not None]
    known = bool(epochs) and len(digests) == len(epochs)
    digest = sum(each * (2 * number + 1) for number, each in enumerate(digests)) % 2**64
    return Epoch(complete, digest if known else None, epochs[0].again if len(epochs) == 1 else None)


def _mixed(ids: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """A hash of each id: splitmix64, https://prng.di.unimi.it/splitmix64.c"""
    out = ids + numpy.uint64(0x9E3779B97F4A7C15)
    out ^= out >> numpy.uint64(30)
    out *= numpy.uint64(0xBF58476D1CE4E5B9)
    out ^= out >> numpy.uint64(27)
    out *= numpy.uint64(0x94D049BB133111EB)
    out ^= out >> numpy.uint64(31)
    return out
