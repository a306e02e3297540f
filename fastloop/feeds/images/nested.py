"""Finds, lists and replaces datasets that are inside a Subset, a ConcatDataset, or one of our stand-ins."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from fastloop.feeds.lazy_loader import StandInDataset


def find_user_dataset(dataset: Any) -> Any:
    """Return the user's dataset behind our stand-ins."""
    while isinstance(dataset, StandInDataset):
        dataset = dataset.inner
    return dataset


def list_parts(dataset: Any) -> list[Any]:
    """List the datasets directly inside a Subset or ConcatDataset."""
    if type(dataset) is Subset:
        return [dataset.dataset]
    return list(dataset.datasets) if type(dataset) is ConcatDataset else []


def list_leaves(dataset: Any) -> list[Any]:
    """List the innermost datasets of Subset and ConcatDataset, each once."""
    parts = list_parts(dataset)
    leaves = [leaf for part in parts for leaf in list_leaves(part)] if parts else [dataset]
    return list({id(leaf): leaf for leaf in leaves}.values())


def replace_leaves(dataset: Any, replace: Callable[[Any], Any]) -> Any:
    """Copy a dataset with its innermost datasets replaced; the user's objects stay unchanged."""
    if isinstance(dataset, StandInDataset):
        make, (inner, *others) = dataset.__reduce__()
        return make(replace_leaves(inner, replace), *others)
    if type(dataset) not in (Subset, ConcatDataset):
        return replace(dataset)
    twin = copy.copy(dataset)
    if type(dataset) is Subset:
        twin.dataset = replace_leaves(dataset.dataset, replace)
    else:
        twin.datasets = [replace_leaves(part, replace) for part in dataset.datasets]
    return twin
