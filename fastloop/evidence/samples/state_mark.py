"""A mark of what a dataset holds, to find out whether anything has changed it since workers got their copies."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.dataset import list_members, walk

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_MOST_BYTES = 2**16
"""Of a larger array, only numbers at even distances are read."""


def mark_state(*roots: Any) -> int:
    """A number that differs once attributes, items, tensors or arrays below these objects have changed, or plain values
    that their code reads from globals. Changes in large arrays or in deeply nested objects can be missed."""
    return hash(tuple(part for root in roots for part in _list_parts(root)))


def _list_parts(root: Any) -> Iterator[tuple[Any, ...]]:
    for path, item in walk(root):
        if isinstance(item, torch.Tensor):
            yield path, id(item), None if item.is_inference() else item._version
        elif isinstance(item, np.ndarray):
            yield path, id(item), item.shape, _sum(item)
        else:
            yield path, id(item)
            yield from ((path, step, value) for step, value in list_members(item) if isinstance(value, _PLAIN))
        for function in sample_code.list_sample_functions(item):
            for name, value in sample_code.list_globals(function):
                if isinstance(value, _PLAIN):
                    yield name, value
                elif isinstance(value, (list, dict)):
                    yield from ((name, step, inner) for step, inner in list_members(value) if isinstance(inner, _PLAIN))


def _is_file(array: Any) -> bool:
    """Whether an array is memory-mapped: sampling it would read from the disk."""
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return isinstance(array, (np.memmap, mmap.mmap))


def _sum(array: np.ndarray[Any, Any]) -> int | None:
    if array.dtype.hasobject or _is_file(array):
        return None
    every = 1 + array.nbytes // _MOST_BYTES
    return zlib.crc32(np.ascontiguousarray(array.reshape(-1)[::every] if every > 1 else array).tobytes())
