"""Millions of paths with their labels, as three arrays instead of millions of Python objects.

When a forked worker reads a Python object, it changes the reference count, and the memory page is copied: gradually,
each worker gets a copy of the whole list. Arrays are read in place.
Source: https://github.com/pytorch/pytorch/issues/13246
"""

from __future__ import annotations

import copy
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from fastloop.feeds.images.nested import list_parts, replace_leaves

LONG = 100_000
"""Minimum number of samples for packing to pay off: their list takes about 20 MB in each worker."""


class PackedList(Sequence[tuple[str, int]]):
    """An immutable list of ``(path, label)``, equal to the original, item by item.

    Raises:
        TypeError: `samples` has an item of another form.
        OverflowError: a label does not fit into 64 bits.
    """

    def __init__(self, samples: Iterable[tuple[str, int]]) -> None:
        self._text, self._ends, self._labels = bytearray(), array("q"), array("q")
        for sample in samples:
            if [type(sample), *map(type, sample)] != [tuple, str, int]:
                raise TypeError(f"{sample!r} is not a (path, label) pair")
            self._text += sample[0].encode("utf-8", "surrogatepass")
            self._ends.append(len(self._text))
            self._labels.append(sample[1])

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> tuple[str, int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, int]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return the tuple at `index`, or a list of tuples for a slice."""
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = range(len(self))[index]
        text = self._text[self._ends[place - 1] if place else 0 : self._ends[place]]
        return text.decode("utf-8", "surrogatepass"), self._labels[place]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, PackedList)):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Packing:
    """Puts packed lists into a dataset."""

    samples: int
    """Samples in the dataset."""

    def wrap(self, dataset: Any) -> Any:
        """Return a copy of an image folder, or of a Subset, ConcatDataset or stand-in around it, with its file list
        packed; the user's object stays unchanged."""
        return replace_leaves(dataset, _pack)


def count_packable(dataset: Any) -> int:
    """Count the samples of all image folders with long lists in a dataset; 0 if there are none."""
    if parts := list_parts(dataset):
        return sum(map(count_packable, parts))
    return len(dataset.samples) if _is_folder(dataset) and len(dataset.samples) >= LONG else 0


def _pack(dataset: Any) -> Any:
    if not count_packable(dataset):
        return dataset
    twin = copy.copy(dataset)
    try:
        twin.samples = PackedList(dataset.samples)
    except (TypeError, OverflowError):  # the user's own kind of list
        return dataset
    if getattr(dataset, "imgs", None) is dataset.samples:
        twin.imgs = twin.samples
    return twin


def _is_folder(dataset: Any) -> bool:
    """Whether its class is torchvision's own, which only reads the list; a user's subclass may do anything with it."""
    folder = sys.modules.get("torchvision.datasets.folder")
    return folder is not None and type(dataset) in (folder.DatasetFolder, folder.ImageFolder)
