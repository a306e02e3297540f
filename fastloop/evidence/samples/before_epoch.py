"""Finds code that may make samples of the next epoch differ if they are made before that epoch begins.

Data of which a worker has its own copy does not matter here: it is the same before and after. Shared memory and files
may not be.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastloop.errors import let_through
from fastloop.evidence.samples import dataset as datasets
from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.between_batches import list_running_code
from fastloop.evidence.samples.shared_files import READS, WRITES

_OF_TORCH = ("torch.utils.data.",)


def explain_not_ahead(
    dataset: Any, others: Iterable[Any], *, collate: Any = None, worker_init: Any = None
) -> str | None:
    """Return why samples made before their epoch may differ: what they read may change until then, and workers see that
    at once. None if nothing is found.

    Args:
        others: callbacks and the module.
        collate: the loader's collate_fn.
        worker_init: its worker_init_fn.
    """
    given = (dataset, "dataset"), (collate, "collate_fn"), (worker_init, "worker_init_fn")
    held = [each for item, name in given for each in datasets.walk(item, name)]
    functions, reached = datasets.list_running(held)
    reads = None
    for _, _, function in functions:
        names = set(sample_code.list_names(function.__code__))
        if "get_worker_info" in names:
            return f"{function.__qualname__} reads its worker's id, and a prefetched batch may go to another worker"
        reads = reads or next((function.__qualname__ for name in names if READS.fullmatch(name)), None)
    for path, item in (*held, *reached):
        if isinstance(find_block(item), np.memmap):
            reads = reads or path
        if _is_shared(item):
            return f"{path} is in shared memory and may change before the next epoch"
        if reads is None and isinstance(item, Dataset) and _may_read_files(type(item)):
            reads = type(item).__name__
    for other, name, function in list_running_code(others) if reads is not None else ():
        names = set(sample_code.list_names(function.__code__))
        if any(map(WRITES.fullmatch, names)) or {"os", "replace"} <= names:
            return f"{reads} reads files, and {type(other).__name__}.{name} may write some between epochs"
    return None


def _may_read_files(kind: type) -> bool:
    """Whether a dataset's class is from an installed package other than torch, whose own datasets read no files."""
    return sample_code.is_installed(kind) and not f"{kind.__module__}.".startswith(_OF_TORCH)


def _is_shared(item: Any) -> bool:
    """Whether an object is in shared memory, so that another process may change it."""
    if isinstance(item, torch.Tensor):
        return datasets.is_in_shared_memory(item)
    if isinstance(item, np.ndarray):
        block = find_block(item)
        return isinstance(block, (mmap.mmap, ctypes.Array)) or (isinstance(block, memoryview) and not block.readonly)
    kinds = type(item).__mro__
    return isinstance(item, (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)) or any(
        kind.__module__.startswith("multiprocessing.") for kind in kinds
    )


def find_memory(item: Any) -> range | None:
    """Return the addresses of a tensor's or an array's numbers, which its views share; None for anything else."""
    try:
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            start, size = item.data_ptr(), item.element_size()
            steps = [each * size for each in item.stride()]
        elif isinstance(item, np.ndarray):
            start, size, steps = item.ctypes.data, item.itemsize, [*item.strides]
        else:
            return None
    except Exception as error:  # a fake tensor, say, has no memory
        let_through(error)
        return None
    spans = [(count - 1) * step for count, step in zip(item.shape, steps, strict=True)]
    last = start + size + sum(span for span in spans if span > 0)
    return range(start + sum(span for span in spans if span < 0), last) if start and 0 not in item.shape else None


def find_block(array: Any) -> Any:
    """Return the owner of an array's memory: a mapped file, another object, or None if the array owns it. Anything else
    is returned as it is."""
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return array
