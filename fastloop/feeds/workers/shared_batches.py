"""Finds out what batches share with their dataset, by making one batch twice in a forked process.

An object that is in both batches outlives them: the dataset holds it, or a global cache, or a mapped file.
"""

from __future__ import annotations

import enum
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from fastloop.evidence.batches.given_batches import UNKNOWN, Shared
from fastloop.evidence.samples.dataset import list_members
from fastloop.feeds.workers.forked import Fork, may_try
from fastloop.feeds.workers.read_twice import choose_indices

MOST_S = 5.0
"""The training waits no longer than this for the answer."""
_SAMPLES = 2
_MOST_PARTS = 100_000
_FIXED = (
    *(str, bytes, int, float, complex, bool, type(None), type, range, slice, np.generic, np.dtype, enum.Enum, PurePath),
    *(ModuleType, torch.dtype, torch.device, torch.layout, torch.memory_format, weakref.ref),
)
"""Objects that nobody can change."""


def find_shared(loader: DataLoader[Any]) -> Shared:
    """Return what the loader's batches share with what stays, as a forked process finds out; `UNKNOWN` if it cannot."""
    if sys.platform != "linux" or not may_try(loader):
        return UNKNOWN
    fork = Fork(_compare_two, loader)
    try:
        return Shared(*fork.answers.recv()) if fork.answers.poll(MOST_S) else UNKNOWN
    except (EOFError, OSError):
        return UNKNOWN
    finally:
        fork.end()


# -- in the forked process ---------------------------------------------------------------------------------------------


def _compare_two(answers: Any, loader: DataLoader[Any]) -> None:
    indices = None if isinstance(loader.dataset, IterableDataset) else _draw_indices(loader)
    answers.send(tuple(_compare(*(_make_batch(loader, indices) for _ in range(2)))))


def _draw_indices(loader: DataLoader[Any]) -> list[Any]:
    if found := choose_indices(loader)[:_SAMPLES]:
        return found
    return list(next(iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler))[:_SAMPLES])


def _make_batch(loader: DataLoader[Any], indices: Sequence[Any] | None) -> Any:
    dataset: Any = loader.dataset
    several = getattr(dataset, "__getitems__", None)
    if indices is None:
        samples = list(islice(iter(dataset), _SAMPLES))
    elif callable(several) and loader.batch_sampler is not None:
        samples = several(list(indices))
    else:
        samples = [dataset[index] for index in indices]
    return loader.collate_fn(samples if loader.batch_sampler is not None else samples[0])


def _compare(first: Any, second: Any) -> Shared:
    known = {key for key, _, _ in _list_parts(first)}
    least: dict[str, int] = {}
    for key, kind, depth in _list_parts(second):
        if key in known:
            least[kind] = min(depth, least.get(kind, depth))
    return Shared(**least)


def _list_parts(batch: Any) -> Iterator[tuple[Any, str, int]]:
    """Yield what can be changed in a batch: its identity or memory, its kind, and how many containers are around it.

    Raises:
        ValueError: there are too many parts.
    """
    queue, seen = deque([(batch, 0, False)]), set[int]()
    while queue:
        item, depth, is_inside = queue.popleft()
        if id(item) in seen or isinstance(item, _FIXED) or inspect.isroutine(item):
            continue
        seen.add(id(item))
        if len(seen) > _MOST_PARTS:
            raise ValueError
        if isinstance(item, torch.Tensor):
            yield _find_memory(item), "objects" if is_inside else "tensors", depth
            continue
        is_container = isinstance(item, (list, tuple, set, frozenset, deque, Mapping))
        if not isinstance(item, (tuple, frozenset)):
            yield ("id", id(item)), "containers" if is_container and not is_inside else "objects", depth
        if isinstance(item, np.ndarray):
            yield ("memory", item.__array_interface__["data"][0] if item.size else id(item)), "objects", depth
            members = list(item.flat) if item.dtype.hasobject else []
        elif is_container:
            members = list(item.values() if isinstance(item, Mapping) else item)
        else:
            members = [member for _, member in list_members(item)]
        queue.extend((member, depth + 1, is_inside or not is_container) for member in members)


def _find_memory(tensor: torch.Tensor) -> tuple[str, int]:
    is_plain = tensor.layout is torch.strided and tensor.numel() and not tensor.is_nested
    return ("memory", tensor.data_ptr()) if is_plain else ("id", id(tensor))
