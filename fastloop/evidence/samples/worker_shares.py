"""Whether each worker reads an iterable dataset whole, so that an epoch has every sample several times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from fastloop.evidence.samples import dataset as datasets
from fastloop.evidence.samples import sample_code

_TELLS_WORKERS = {"get_worker_info", "current_process", "parent_process", "getpid", "environ", "getenv"}
"""Names of what a stream may ask for its share."""
_HARMLESS = ("torch", "numpy", "builtins", "collections", "functools", "pathlib", "re", "json", "csv", "PIL")
"""Packages whose objects share nothing out among workers."""


def explain_repeats(loader: Any) -> str | None:
    """Say that each worker yields the whole dataset; None where it may take its share, or code does not show it."""
    dataset = loader.dataset
    if loader.num_workers < 2 or not isinstance(dataset, IterableDataset) or loader.worker_init_fn is not None:
        return None
    if sample_code.is_installed(type(dataset)) or datasets.draws_random(dataset):
        return None
    held = list(datasets.walk(dataset))
    functions = [function for _, _, function in datasets.list_running(held)]
    if not _TELLS_WORKERS.isdisjoint(name for each in functions for name in sample_code.list_names(each.__code__)):
        return None
    if any(_may_share_out(item) for _, item in held):
        return None
    kind, workers = type(dataset).__name__, loader.num_workers
    return (
        f"{kind}.__iter__ does not ask torch.utils.data.get_worker_info for its worker's share, so each of the"
        f" {workers} workers yields all of it: an epoch trains every sample {workers} times"
    )


def _may_share_out(item: Any) -> bool:
    """Whether an object belongs to a package that may know about workers, or hands each item to one process only."""
    kind = item if isinstance(item, type) else type(item)
    names = _list_packages(kind)
    return any(name not in _HARMLESS and sample_code.is_installed(kind) for name in names)


def _list_packages(kind: type) -> Iterator[str]:
    return (base.__module__.partition(".")[0] for base in kind.__mro__ if not issubclass(IterableDataset, base))
