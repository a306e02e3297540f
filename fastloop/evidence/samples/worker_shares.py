"""Whether each worker reads an iterable dataset whole, so that an epoch has every sample several times."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils.data import IterableDataset

from fastloop.evidence.samples import dataset as datasets
from fastloop.evidence.samples import random_draws, sample_code

_TELLS_WORKERS = {"get_worker_info", "current_process", "parent_process", "getpid", "environ", "getenv"}
"""Names of what a stream may ask for its share."""
_HARMLESS = (
    "torch",
    "numpy",
    "builtins",
    "collections",
    "functools",
    "pathlib",
    "re",
    "json",
    "csv",
    "PIL",
    "itertools",
    "math",
    "os",
    "io",
)
"""Packages whose objects share nothing out among workers."""


def explain_repeats(loader: Any) -> str | None:
    """Say that each worker yields the whole dataset; None where it may take its share, or code does not show it."""
    dataset = loader.dataset
    if loader.num_workers < 2 or not isinstance(dataset, IterableDataset) or loader.worker_init_fn is not None:
        return None
    if sample_code.is_installed(type(dataset)) or random_draws.draws_random(dataset):
        return None
    held = list(datasets.walk(dataset))
    running, reached = datasets.list_running(held)
    functions = [function for _, _, function in running]
    if not _TELLS_WORKERS.isdisjoint(name for each in functions for name in sample_code.list_names(each.__code__)):
        return None
    imported = {name for each in functions for name in sample_code.list_arguments(each.__code__, "IMPORT_NAME")}
    outer = [value for each in functions for value in sample_code.read_outer(each).values()]
    if imported or any(map(_may_share_out, [*outer, *(item for _, item in (*held, *reached))])):
        return None
    kind, workers = type(dataset).__name__, loader.num_workers
    return (
        f"{kind}.__iter__ does not split its samples with torch.utils.data.get_worker_info, so each of the {workers}"
        f" workers may yield all of them: an epoch would then train on every sample {workers} times"
    )


def _may_share_out(item: Any) -> bool:
    """Whether an object belongs to a package that may know about workers, or hands each item to one process only."""
    if isinstance(item, torch.Tensor):
        return datasets.is_in_shared_memory(item)
    if inspect.ismodule(item):
        return item.__name__.partition(".")[0] not in _HARMLESS and sample_code.is_installed(item)
    thing = item if isinstance(item, type) or inspect.isroutine(item) else type(item)
    packages = {thing.__module__ or "builtins"} if inspect.isroutine(thing) else _list_packages(thing)
    return any(name.partition(".")[0] not in _HARMLESS for name in packages) and sample_code.is_installed(thing)


def _list_packages(kind: type) -> set[str]:
    return {base.__module__ for base in kind.__mro__ if not issubclass(IterableDataset, base)}
