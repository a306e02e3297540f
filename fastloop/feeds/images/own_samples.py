"""Compares samples that we make from a dataset's files with those that the dataset itself makes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fastloop.errors import NotApplicable, describe, let_through
from fastloop.feeds.images.nested import list_leaves
from fastloop.feeds.images.reading import METHOD, spread_indices

COMPARED = 4
"""Samples of each dataset; each is made twice."""


def check_named(
    dataset: Any, make: Callable[[Any], Callable[[int], Any]], collate: Callable[[Any], Any] = lambda sample: sample
) -> None:
    """Compare a few samples of each dataset that names its files by a method: otherwise nothing shows that its samples
    are the transformed images with these labels. Restores the random generators.

    Args:
        make: takes such a dataset, and returns a function that makes the sample of an index in its place.
        collate: applied to the dataset's own samples first.

    Raises:
        NotApplicable: they differ.
    """
    for leaf in list_leaves(dataset):
        if hasattr(leaf, METHOD):
            _compare(leaf, make(leaf), collate)


def _compare(dataset: Any, make: Callable[[int], Any], collate: Callable[[Any], Any]) -> None:
    name = type(dataset).__name__
    for index in spread_indices(len(dataset), COMPARED):
        try:
            own, drawn = _draw(lambda index: collate(dataset[index]), index)
        except Exception as error:  # the training will report it when it gets there
            let_through(error)
            continue
        try:
            made, redrawn = _draw(make, index)
        except Exception as error:
            why = f"sample {index} of {name} cannot be made without its __getitem__: {describe(error)}"
            raise NotApplicable(why) from error
        if (part := find_difference(own, made)) is not None:
            raise NotApplicable(explain(dataset, part, index))
        if drawn != redrawn:
            raise NotApplicable(f"{name}'s __getitem__ draws other random numbers than its transform")


def _draw(make: Callable[[int], Any], index: int) -> tuple[Any, Any]:
    """Make a sample; also return the random generators' next numbers."""
    with untouched_generators():
        return make(index), (torch.rand(1).item(), random.random(), np.random.random())


def explain(dataset: Any, part: str, index: int) -> str:
    """Say which part of a dataset's own sample differs from the one made in its place."""
    name = type(dataset).__name__
    return f"{name}'s __getitem__ returns a different {part} for sample {index} than {METHOD} and transform do"


def find_difference(one: Any, other: Any) -> str | None:
    """Return which part of two samples differs: their form, picture or label; None if they are equal, bit for bit."""
    forms = [(type(each), len(each)) if isinstance(each, (list, tuple)) else None for each in (one, other)]
    if forms[0] != forms[1] or forms[0] is None or len(one) != 2:
        return "form"
    return next((part for part, *pair in zip(("image", "label"), one, other, strict=True) if not is_same(*pair)), None)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, bit for bit, and of one type."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):  # torchvision's classes are tensors too
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(np.array_equal(one, other))


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Restore the random generators on exit."""
    python, host = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(host)
