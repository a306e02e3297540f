"""Finds state that a sampler reads and that training changes: read ahead of training, it would give other indices."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fastloop.evidence.samples import sample_code, writes
from fastloop.evidence.samples.between_batches import is_changeable, list_running, list_running_code
from fastloop.evidence.samples.dataset import walk
from fastloop.evidence.samples.random_draws import DRAWS

_SETS_EPOCH = ("set_epoch", "state_dict")
_TRAINING = ("Module", "Trainer", "Optimizer", "Callback")
_GENERATORS = ("Generator", "RandomState", "Random")
"""Classes of torch's, NumPy's and Python's random generators."""
_FIXED = (str, bytes, int, float, complex, bool, type(None))


def find_sampler_hazards(sampler: Any, dataset: Any, others: Iterable[Any] = ()) -> tuple[str, ...]:
    """Why drawing from this sampler early would give other samples, each with its location.

    Args:
        sampler: the loader's batch sampler, or its sampler.
        dataset: the loader's dataset, which a sampler may hold without reading it.
        others: callbacks and the module, which may change objects that they share with the user's sampler.
    """
    others = tuple(others)
    held, set_anew = dict(_list_shared(others)), dict(reversed(list(_list_set_anew(others))))  # hooks before helpers
    found: dict[str, None] = {}
    inside = {id(item) for _, item in walk(dataset)}
    parts: tuple[str, ...] = ()
    for path, item in walk(sampler, "sampler"):
        if id(item) in inside or path.startswith(parts):
            continue
        if isinstance(item, torch.Tensor):
            if item.requires_grad:
                found[f"{path} is a tensor with a gradient"] = None
        elif any(base.__name__ in _TRAINING for base in type(item).__mro__):
            found[f"{path} is a part of the training ({type(item).__name__})"] = None
            parts += (f"{path}.", f"{path}[")
            continue
        if id(item) in held and is_changeable(item):
            found[f"{path} is held by {held[id(item)]} too"] = None
        if not sample_code.is_installed(type(item)):
            for name, written in sample_code.list_writers(type(item)):
                if name not in _SETS_EPOCH:
                    found[f"{path}.{written} is changed by its {name}()"] = None
        for function in _list_running_for(item):
            for space, name, value in _list_outer(function):
                for inner, each in _list_parts(value, name):
                    if id(each) in held and id(each) not in inside:
                        found[f"{inner} is held by {held[id(each)]} too"] = None
                if (space, name) in set_anew:
                    found[f"{name} is set by {set_anew[space, name]}"] = None
    return tuple(found)


def list_draws(sampler: Any) -> tuple[str, ...]:
    """Return the user's functions in which a sampler draws from the global random streams between two indices: if it is
    read ahead, it draws other numbers, and so does the training. Draws before the first index stay where they are."""
    return tuple(
        dict.fromkeys(
            function.__qualname__.split(".<locals>.")[-1]
            for _, item in walk(sampler, "sampler")
            for function in sample_code.list_sample_functions(item)
            if _draws_between_yields(function)
        )
    )


def _draws_between_yields(function: Any) -> bool:
    """Whether a loop that yields draws random numbers from a stream that others may use: by a module's function without
    its own ``generator``, or by a method of an outer random generator."""
    if not inspect.isgeneratorfunction(function) or (parsed := sample_code.parse(function)) is None:
        return False
    outer = dict(sample_code.list_globals(function))
    loops = [node for node in ast.walk(parsed[0]) if isinstance(node, (ast.For, ast.While))]
    for node in (node for loop in loops if _yields(loop) for part in loop.body for node in ast.walk(part)):
        if not isinstance(node, ast.Call) or any(keyword.arg == "generator" for keyword in node.keywords):
            continue
        name = writes.name_called(node)
        root = outer.get(writes.find_root(node.func))
        if isinstance(node.func, ast.Attribute) and type(root).__name__ in _GENERATORS:
            return True
        if DRAWS.fullmatch(name) and (root if isinstance(node.func, ast.Name) else inspect.ismodule(root)):
            return True
    return False


def _yields(node: ast.AST) -> bool:
    return any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node))


def _list_running_for(item: Any) -> tuple[Any, ...]:
    """The user's functions, in any module, that run when this part of a sampler yields indices."""
    return sample_code.list_called(sample_code.list_sample_functions(item), type(item))


def _list_outer(function: Any) -> Iterator[tuple[int, str, Any]]:
    """What a function reads from outside: the id of the namespace, the name in it, and the value; also the members of
    the user's modules and classes that it names."""
    yield from ((0, name, value) for name, value in sample_code.list_closure(function))
    named = set(sample_code.list_names(function.__code__))
    for name, value in sample_code.list_globals(function):
        yield id(function.__globals__), name, value
        if (space := _find_space(value)) is not None:
            key, members = space
            yield from ((key, each, member) for each, member in list(members.items()) if each in named)


def _find_space(value: Any) -> tuple[int, Mapping[str, Any]] | None:
    """The variables of a user's module or class, with an id of their namespace; None for anything else."""
    if not (inspect.ismodule(value) or isinstance(value, type)) or sample_code.is_installed(value):
        return None
    return id(vars(value) if inspect.ismodule(value) else value), vars(value)


def _list_parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """An object that can change, and the user's objects in it."""
    if is_changeable(value):
        yield name, value
        yield from ((path, each) for path, each in walk(value, name) if _is_users(each))


def _is_users(item: Any) -> bool:
    return is_changeable(item) and not sample_code.is_installed(type(item))


def _list_shared(others: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """Objects that training may change, with who holds them: attributes, globals and closures that hooks read, and what
    the user's objects among them change in themselves. Functions that hooks call add no settings that they only
    read."""
    seen = set[int]()
    for other in others:
        for _, hook in list_running(other):
            for function in sample_code.list_with_called(hook, type(other)):
                held = vars(other)
                own = [(name, held[name]) for name in sample_code.list_names(function.__code__) if name in held]
                outer = [(name, value) for _, name, value in _list_outer(function)]
                for name, value in (*own, *outer):
                    label = f"{type(other).__name__} ({name})"
                    if function is hook or not _is_setting(name, value, function, type(other)):
                        yield id(value), label
                    if id(value) not in seen:
                        seen.add(id(value))
                        yield from ((id(each), label) for each in _list_changed_in(value))


def _is_setting(name: str, value: Any, function: Any, kind: type) -> bool:
    """Whether a function only reads this container of plain values."""
    if isinstance(value, (torch.Tensor, np.ndarray)) or not isinstance(value, (dict, list, set)):
        return False
    members = value.values() if isinstance(value, dict) else value
    is_plain = all(isinstance(member, _FIXED) for member in members)
    return is_plain and name not in set(sample_code.list_roots_written(function, kind))


def _list_changed_in(value: Any) -> Iterator[Any]:
    """The user's objects inside an object, and those of their attributes that their own methods change."""
    for _, item in walk(value, "") if is_changeable(value) else ():
        if _is_users(item):
            yield item
            own = getattr(item, "__dict__", {})
            written = {name for _, name in sample_code.list_writers(type(item))}
            written |= {state.removeprefix(".") for state in sample_code.list_changed_state(item)}
            yield from (own[name] for name in written if name in own and is_changeable(own[name]))


def _list_set_anew(others: Iterable[Any]) -> Iterator[tuple[tuple[int, str], str]]:
    """Names in modules and classes that training reassigns, each with the id of the namespace and where it happens."""
    for other, hook, function in list_running_code(others):
        where = f"{type(other).__name__}.{hook}"
        for name in sample_code.list_arguments(function.__code__, "STORE_GLOBAL", "DELETE_GLOBAL"):
            yield (id(function.__globals__), name), where
        names = set(sample_code.list_arguments(function.__code__, "STORE_ATTR"))
        values = [value for _, value in sample_code.list_globals(function)] if names else []
        spaces = [_find_space(value) for value in values]
        yield from (((space[0], name), where) for space in spaces if space for name in names)
