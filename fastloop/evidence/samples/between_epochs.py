"""Finds code that may change what a loader's workers hold copies of between two epochs: dataset, collate_fn, globals.

A worker that is kept has the samples' code and data as they were when it started; a new one has them as they are now.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.before_epoch import find_memory
from fastloop.evidence.samples.between_batches import BY_DATA, list_holders, list_running, list_running_code
from fastloop.evidence.samples.dataset import walk
from fastloop.evidence.samples.shared_files import list_shared_files, list_shared_maps

_FIXED = (str, bytes, int, float, complex, bool, tuple, type(None))


def list_changes_between_epochs(
    dataset: Any, others: Iterable[Any], *, collate: Any = None, worker_init: Any = None, sampler: Any = None
) -> tuple[str, ...]:
    """What may change the samples' code or data between epochs, as found in code and attributes; empty if nothing does.

    Args:
        others: callbacks and the module.
        collate: the loader's collate_fn.
        worker_init: its worker_init_fn.
        sampler: its batch sampler, or its sampler.
    """
    others = tuple(others)
    roots = (dataset, "dataset"), (collate, "collate_fn")
    found = {each: None for root, name in roots for each in list_holders(root, others, name=name)}
    held = {each.partition(" is held by ")[0] for each in found}
    walked = [each for root, name in roots for each in walk(root, name)]
    for path, item in walked:
        for name, written in sample_code.list_writers(type(item)):
            found[f"{path}.{written} is changed by its {name}()"] = None
        for function in sample_code.list_sample_functions(item):
            names = set(sample_code.list_names(function.__code__))
            if "initial_seed" in names or {"get_worker_info", "seed"} <= names:
                found[f"{function.__qualname__} reads its worker's seed, which changes in each epoch"] = None
    read = dict(_list_read([*walked, *walk(worker_init, "worker_init_fn")]))
    running = list(_list_running_here(others, sampler, read))
    for owner, name, function in running:
        known = _find_names(read, _list_written(owner, function))
        found |= {f"{path} is changed by {type(owner).__name__}.{name}": None for path in known if path not in held}
    found |= dict.fromkeys(_list_changed_buffers(others, read, running))
    return (*found, *_list_trained(others, read))


def list_changes_during_epochs(
    dataset: Any, others: Iterable[Any], *, collate: Any = None, loader: Any = None
) -> tuple[str, ...]:
    """What training changes of the samples' code and data while batches are loaded, as found in code: a worker would
    make its samples from an older copy. Empty if nothing does.

    Args:
        others: callbacks and the module.
        collate: the loader's collate_fn.
        loader: the loader itself: workers are sent what its sampler drew before a change.
    """
    others = tuple(others)
    roots = (dataset, "dataset"), (collate, "collate_fn")
    walked = [each for root, name in roots for each in walk(root, name)]
    parts = [(loader, "the loader"), *((getattr(loader, name, None), name) for name in ("batch_sampler", "sampler"))]
    read = {id(part): name for part, name in parts if part is not None} | dict(_list_read(walked))
    running = list(_list_running_here(others, None, read, while_loading=True))
    changes = [*_list_called_writers(roots, walked, others, [function for _, _, function in running])]
    for owner, name, function in running:
        known = _find_names(read, _list_written(owner, function))
        changes += [f"{path} is changed by {type(owner).__name__}.{name}" for path in known]
        trained_on = _list_changed_by_trainer(function, _find_trainer_name(owner, name, function))
        changes += [f"{each} is changed by {type(owner).__name__}.{name}" for each in trained_on]
    changes += (*list_shared_files(walked, running), *list_shared_maps(walked, running))
    changes += _list_changed_buffers(others, read, running, while_loading=True)
    return (*dict.fromkeys(changes), *_list_trained(others, read))


def _list_called_writers(
    roots: Iterable[tuple[Any, str]], walked: Iterable[tuple[str, Any]], others: tuple[Any, ...], running: list[Any]
) -> Iterator[str]:
    """Changes that the samples' objects make to themselves in methods that these running functions call, if callbacks
    or the module hold the object."""
    held = (each for root, name in roots for each in list_holders(root, others, while_loading=True, name=name))
    reached = {each.partition(" is held by ")[0] for each in held}
    called = _list_called_names(others, running)
    for path, item in walked:
        if path in reached:
            writers = (name for name, _ in sample_code.list_writers(type(item)) if name in called)
            yield from (f"{path} is changed by its {name}(), called in training" for name in writers)


def _list_changed_by_trainer(function: Any, trainer: str | None) -> Iterator[str]:
    """The loaders and their parts that a function changes through the Trainer, whose name in the function is
    `trainer`."""
    for chain in sample_code.list_chains_written(function):
        place = 0 if chain[:1] == [trainer] else chain.index("trainer") if "trainer" in chain else len(chain)
        yield from islice(filter(BY_DATA.fullmatch, chain[place + 1 : -1]), 1)


def _list_trained(others: Iterable[Any], read: Mapping[Any, str]) -> Iterator[str]:
    """The outermost part of a model that samples are made from, if an optimizer may change its weights."""
    for model in others:
        if isinstance(model, torch.nn.Module):
            parts = [part for part in model.modules() if part is not model]
            weights = [each for each in model.parameters() if each.requires_grad]
            trained = [part for part in parts if any(each.requires_grad for each in part.parameters())]
            names = _find_names(read, (key for each in (*trained, *weights) for key in _list_keys(each)))
            yield from islice((f"{name} is being trained" for name in names), 1)


def _list_changed_buffers(
    others: Iterable[Any],
    read: Mapping[Any, str],
    running: Iterable[tuple[Any, str, Any]],
    *,
    while_loading: bool = False,
) -> Iterator[str]:
    """Buffers of the model that samples are made from, such as a memory bank, if these functions or its parts' own
    methods write to something of that name."""
    parts = (part for model in others if isinstance(model, torch.nn.Module) for part in model.modules())
    for part in parts:
        for buffer, value in part._buffers.items():
            if value is not None and (paths := list(_find_names(read, _list_keys(value)))):
                own = [(part, name, function) for name, function in list_running(part, while_loading)]
                for owner, name, function in (*running, *own):
                    chains = sample_code.list_chains_written(function, calls=False)
                    roots = sample_code.list_roots_written(function, type(owner))
                    if f".{buffer}" in roots or any(buffer in chain[1:] for chain in chains):
                        yield f"{paths[0]} is changed by {type(owner).__name__}.{name}"


def list_remembered(dataset: Any, collate: Any = None) -> tuple[str, ...]:
    """Containers that samples fill. New workers find them empty; in kept workers they would grow with each epoch, up to
    a copy of all samples in each worker, with the augmentation from when they were stored."""
    walked = [*walk(dataset), *walk(collate, "collate_fn")]
    return tuple(
        dict.fromkeys(f"{path}{state}" for path, item in walked for state in sample_code.list_remembered(item))
    )


def _list_called_names(others: Iterable[Any], functions: Iterable[Any]) -> set[str]:
    """Names in these functions, and in methods with such names of the objects that callbacks and the module hold, such
    as an agent that fills a replay buffer."""
    held = (value for other in others for name, value in vars(other).items() if not name.startswith("_"))
    kinds = {type(item) for value in held for _, item in walk(value) if not sample_code.is_installed(type(item))}
    names, waiting = set[str](), deque(functions)
    while waiting:
        new = set(sample_code.list_names(waiting.popleft().__code__)) - names
        names |= new
        methods = (inspect.getattr_static(kind, name, None) for kind in kinds for name in new)
        waiting.extend(found for method in methods if inspect.isfunction(found := inspect.unwrap(method)))
    return names


def _list_read(walked: Iterable[tuple[str, Any]]) -> Iterator[tuple[Any, str]]:
    """Objects that samples are made from, by id, each with its name; globals also by module and name, tensors and
    arrays by their memory."""
    functions: dict[Any, None] = {}
    for path, item in walked:
        yield from ((key, path) for key in _list_keys(item))
        yield from ((id(kind), kind.__name__) for kind in type(item).__mro__ if not sample_code.is_installed(kind))
        functions |= dict.fromkeys(sample_code.list_sample_functions(item))
    for function in functions:
        scope = id(function.__globals__)
        yield scope, f"the module of {function.__qualname__}"
        for name, value in (*sample_code.list_globals(function), *sample_code.list_closure(function)):
            yield (scope, name), name
            if not (isinstance(value, _FIXED) or inspect.isroutine(value) or _is_installed_value(value)):
                yield from ((key, name) for key in _list_keys(value))


def _list_keys(value: Any) -> Iterator[Any]:
    """An object's id, and the memory of a tensor or an array: a view is another object."""
    yield id(value)
    if (memory := find_memory(value)) is not None:
        yield memory


def _find_names(read: Mapping[Any, str], keys: Iterable[Any]) -> Iterator[str]:
    """The names in `read` of these keys, and of the first memory that overlaps with theirs."""
    blocks = [key for key in read if isinstance(key, range)]
    for key in keys:
        if isinstance(key, range):
            overlapping = (each for each in blocks if each.start < key.stop and key.start < each.stop)
            yield from islice((read[each] for each in overlapping), 1)
        elif key in read:
            yield read[key]


def _is_installed_value(value: Any) -> bool:
    """Whether a value is an installed module or class, except os. What the training sets in one seldom affects samples,
    but ``os.environ`` does."""
    is_either = inspect.ismodule(value) or isinstance(value, type)
    return is_either and value is not os and sample_code.is_installed(value)


def _list_running_here(
    others: Iterable[Any], sampler: Any, read: Collection[Any], *, while_loading: bool = False
) -> Iterator[tuple[Any, str, Any]]:
    """Functions that run in this process while it trains, each with its object and the method that calls it; with
    `while_loading`, without hooks that run when no batch is loaded."""
    yield from list_running_code(others, while_loading)
    for _, item in walk(sampler, "sampler"):
        if id(item) not in read and not sample_code.is_installed(type(item)):
            own = dict(list_running(item)).values()
            yield from ((item, each.__name__, each) for each in (*own, *sample_code.list_sample_functions(item)))


def _find_trainer_name(owner: Any, name: str, function: Any) -> str | None:
    """A callback's own name for the Trainer, the first argument that Lightning passes to its hooks; None if the
    function is not such a hook."""
    is_hook = name.startswith("on_") and function.__name__ in (name, "<lambda>")
    if not is_hook or not any(base.__name__ == "Callback" for base in type(owner).__mro__):
        return None
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return next(islice(names, int(function.__name__ == name), None), None)


def _list_written(owner: Any, function: Any) -> Iterator[Any]:
    """Keys, as in `_list_read`, of the objects that a function writes to."""
    for written in sample_code.list_roots_written(function, type(owner)):
        yield from _find_written(owner, function, written)
    outer = sample_code.read_outer(function)
    local = function.__code__.co_varnames
    for chain in filter(None, sample_code.list_chains_written(function, calls=False)):
        value = owner if chain[:1] == [*local[:1]] else None if chain[0] in local else outer.get(chain[0])
        for name in chain[1:]:
            value = _list_attributes(value).get(name)
            if not isinstance(value, _FIXED):
                yield from _list_keys(value)


def _list_attributes(owner: Any) -> dict[str, Any]:
    """What an object holds by name; of a module also its parts, parameters and buffers."""
    held = getattr(owner, "__dict__", {})
    registered = (held.get(each) or {} for each in ("_modules", "_parameters", "_buffers"))
    is_module = isinstance(owner, torch.nn.Module)
    return {name: value for each in (*registered, held) for name, value in each.items()} if is_module else held


def _find_written(owner: Any, function: Any, written: str) -> Iterator[Any]:
    """Keys of the object at the root of what a function writes to."""
    if written.startswith("."):
        held = _list_attributes(owner)
        value = held.get(written[1:], held.get(f"_{written[1:]}"))
        yield id(owner)
    else:
        outer = sample_code.read_outer(function)
        value = outer.get(written, sys.modules.get(written))  # it may import a module itself
        if not inspect.ismodule(value):  # `torch.manual_seed(0)` sets nothing in this one
            yield id(function.__globals__), written
    if inspect.ismodule(value) and value is not os:
        yield id(vars(value))
    if not isinstance(value, _FIXED):
        yield from _list_keys(value)
