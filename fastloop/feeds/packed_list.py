"""Millions of paths with their labels, as a few arrays instead of millions of Python objects.

A forked worker that looks at a Python object writes its count of references, and the page that holds it is copied: each
worker ends up with the whole list. Arrays are read in place.
Source: https://github.com/pytorch/pytorch/issues/13246
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from torch.utils.data import ConcatDataset, Subset

LONG = 100_000
"""Samples from which on the list is worth packing: about 15 MB for each worker."""


class PackedList(Sequence[tuple[str, int]]):
    """A list of ``(path, label)``, with the same items: equal to the list, and as long.

    Args:
        samples: tuples of a string and an int that fits into 64 bits.

    Raises:
        TypeError: there is another item among them.
        OverflowError: a label does not fit.
    """

    def __init__(self, samples: Iterable[tuple[str, int]]) -> None:
        text, ends, labels = bytearray(), [], []
        for sample in samples:
            if type(sample) is not tuple or len(sample) != 2 or type(sample[0]) is not str or type(sample[1]) is not int:
                raise TypeError(f"{sample!r} is no (path, label)")
            text += os.fsencode(sample[0])
            ends.append(len(text))
            labels.append(sample[1])
        self._text, self._ends = np.frombuffer(bytes(text), np.uint8), np.array(ends, np.int64)
        self._labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> tuple[str, int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, int]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """The tuple at `index`; a list of them for a slice."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        start = int(self._ends[place - 1]) if place else 0
        path = os.fsdecode(self._text[start : int(self._ends[place])].tobytes())
        return path, int(self._labels[place])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, PackedList)):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]
