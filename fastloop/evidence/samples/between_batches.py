"""Code that may read or change a dataset during training: callbacks, the module, or their own methods.

A persistent worker keeps the dataset as it was at start-up.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.dataset import walk
from fastloop.evidence.samples.random_draws import draws_random, draws_random_numbers

BY_DATA = re.compile(r"(\w*_)?(dataset|dataloader|datamodule|sampler)s?\w*")
"""Names through which a hook accesses the data."""
_COUNTERS = {"global_step", "batch_idx", "total_batch_idx", "batch_progress"}
"""Counters of a Trainer or its loops that change with each batch."""
_GIVES_DATA = re.compile(r"(\w+_)?dataloader|setup|prepare_data|teardown|configure_\w+|__\w+__")
"""Methods that create the data, or run before it exists."""

_TRAINERS = {"lightning", "pytorch_lightning", "lightning_fabric", "torch", "fastloop", *sys.stdlib_module_names}
_TRAINERS -= {"__main__"}
"""Packages whose hooks leave the data alone; those of other installed packages are read like the user's."""
_OUTSIDE = tuple(f"on_{when}_{end}" for when in ("fit", "train", "train_epoch") for end in ("start", "end"))
"""Hooks that run before an epoch's first batch is requested, or after its last one."""


def depends_on_time(owner: Any, method: str) -> bool:
    """Whether a user's method draws random numbers, itself or through what its owner holds, or reads the training's
    progress: called earlier, it would return something else."""
    member: Any = getattr(owner, method, None)
    function = inspect.unwrap(getattr(member, "__func__", member))
    if not inspect.isfunction(function) or sample_code.is_installed(function):
        return False
    names = set(sample_code.list_names(function.__code__))
    held = {**vars(owner), **getattr(owner, "_modules", {})}
    parts = [held[name] for name in names if name in held]
    own = [member for name in names if inspect.isfunction(member := inspect.getattr_static(type(owner), name, None))]
    return bool(names & _COUNTERS) or any(map(draws_random_numbers, [function, *own])) or bool(draws_random(*parts))


def list_holders(
    dataset: Any, others: Iterable[Any], *, while_loading: bool = False, name: str = "dataset"
) -> tuple[str, ...]:
    """The callbacks and modules that can access the dataset.

    Args:
        while_loading: only consider access while batches are loaded, not in hooks that run at other times.
    """
    found: dict[str, None] = {}
    others = tuple(others)
    direct, within = dict(_list_held(others, while_loading)), dict(_list_held(others, while_loading, within=True))
    for path, item in walk(dataset, name):
        holder = direct.get(id(item)) or (within.get(id(item)) if _is_dataset_or_users(item) else None)
        if holder is not None and is_changeable(item):
            found[f"{path} is held by {holder}"] = None
    for other in others:
        for hook, function in list_running(other, while_loading):
            names = (each for each in _list_names(other, function) if not _is_part(other, each))
            if (named := next(filter(BY_DATA.fullmatch, names), None)) is not None:
                found[f"{type(other).__name__}.{hook} names {named}"] = None
    return tuple(found)


def _is_part(other: Any, name: str) -> bool:
    """Whether this names a layer of the model, such as ``up_sampler``, or one that is left out."""
    held = getattr(other, "__dict__", {})
    parts = {**held, **(held.get("_modules") or {})}
    return name in parts and (parts[name] is None or isinstance(parts[name], torch.nn.Module))


def _list_names(other: Any, function: Any) -> Iterator[str]:
    """Names in a method and in the user's functions that it calls, also those given to getattr."""
    for called in sample_code.list_with_called(function, type(other)):
        yield from (names := tuple(sample_code.list_names(called.__code__)))
        if "getattr" in names:
            yield from (const for const in called.__code__.co_consts if isinstance(const, str))


def _is_dataset_or_users(item: Any) -> bool:
    """Whether an object is a dataset, or of a user's class."""
    return isinstance(item, Dataset) or not (inspect.isroutine(item) or sample_code.is_installed(type(item)))


def _list_held(
    others: Iterable[Any], while_loading: bool = False, *, within: bool = False
) -> Iterator[tuple[int, str]]:
    """Objects that methods of callbacks and modules can access, as attributes or through globals and closures; `within`
    adds what these objects hold."""
    seen = set[int]()
    for other in others:
        for _, function in list_running(other, while_loading):
            own = {name: vars(other)[name] for name in sample_code.list_names(function.__code__) if name in vars(other)}
            outer = (*sample_code.list_closure(function), *sample_code.list_globals(function))
            for name, value in (*own.items(), *outer):
                label = f"{type(other).__name__} ({name})"
                yield id(value), label
                if within and id(value) not in seen:
                    seen.add(id(value))
                    yield from ((id(item), label) for _, item in walk(value, name))
        given = vars(other).items() if within else ()  # a LambdaCallback may have been given any callable
        for name, value in given:
            if name.startswith("on_"):
                yield from ((id(item), f"{type(other).__name__} ({name})") for _, item in walk(value, name))


def is_changeable(item: Any) -> bool:
    """Whether an object is a container, tensor or array, or of a user's class."""
    if inspect.isroutine(item) or inspect.ismodule(item) or isinstance(item, type):
        return False
    return hasattr(type(item), "__setitem__") or isinstance(item, set) or not sample_code.is_installed(type(item))


def list_running(other: Any, while_loading: bool = False) -> Iterator[tuple[str, Any]]:
    """The user's methods of a callback or module that run while it trains, or only those that run while batches are
    loaded."""
    kinds = [{} if base.__module__.split(".")[0] in _TRAINERS else dict(vars(base)) for base in type(other).__mro__]
    held, left_out = getattr(other, "__dict__", {}), _OUTSIDE if while_loading else ()
    own = {name: member for name, member in held.items() if inspect.isfunction(member)}  # a LambdaCallback's
    for members in (own, *kinds):
        for name, member in members.items():
            function = sample_code.find_function(member)
            if function is not None and not _GIVES_DATA.fullmatch(name) and name not in left_out:
                yield name, function


def list_running_code(others: Iterable[Any], while_loading: bool = False) -> Iterator[tuple[Any, str, Any]]:
    """The methods in `list_running` of all these objects and the functions that they call, each with its object and
    the method's name."""
    for other in others:
        for name, method in list_running(other, while_loading):
            yield from ((other, name, function) for function in sample_code.list_with_called(method, type(other)))
