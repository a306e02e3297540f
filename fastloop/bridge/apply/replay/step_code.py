"""The user's code that may run in a training step: its functions, the names in them, and what forbids a recording."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import torch

from fastloop.bridge import namespaces
from fastloop.bridge.apply.state.untouched import StateSnapshot
from fastloop.evidence.samples.sample_code import (
    is_installed,
    list_arguments,
    list_called,
    list_closure,
    list_global_names,
    list_globals,
    list_names,
    list_roots_written,
    walk_code,
)

_ENTRY = ("training_step", "forward")
"""Lightning's hooks that run in a step."""
_OUTSIDE = ("time", "datetime", "os", "io", "pathlib", "socket", "subprocess", "logging", "wandb", "mlflow")
"""Modules whose values change by themselves, or whose calls have an effect each time."""
_CALLS = ("print", "open", "input")


def list_step_functions(module: torch.nn.Module, kept: StateSnapshot) -> list[Any]:
    """The user's functions that may run in a step: training_step and forward, methods of kept objects whose names
    appear in them, functions that objects keep, and whatever all of these call."""
    kinds, hooks = kept.list_kinds() | {type(module)}, _list_hooks(module)
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if not is_installed(base))
    methods = _list_methods(bases, hooks)
    found, names, known = tuple[Any, ...](), {*_ENTRY, "__call__"}, -1
    while len(found) > known:
        known = len(found)
        starts = [*kept.list_functions(), *(function for name, function in methods if name in names)]
        found = list_called(starts, type(module))
        names.update(name for function in found for name in list_names(function.__code__))
    return list(found)


def list_read_names(module: torch.nn.Module, kinds: Iterable[type]) -> set[str]:
    """Names that the code of a step may read: all that occur in the methods of these classes, except hooks, and in the
    functions that training_step calls."""
    lightning, hooks = _find_lightning(module), _list_hooks(module)
    bases = {base for kind in kinds for base in kind.__mro__} - {*lightning.__mro__}
    functions = [function for _, function in _list_methods(bases, hooks)]
    functions += list_called([inspect.unwrap(getattr(type(module), "training_step", list_names))], type(module))
    return {name for function in functions for name in _list_texts(function.__code__)} - hooks


def find_outside(functions: Iterable[Any]) -> str | None:
    """Name something that a step reads or writes outside the module: the clock, a file, the terminal, a Trainer in a
    global variable, or any global that it sets; None if there is nothing."""
    for function in functions:
        code, outer = function.__code__, function.__globals__
        named = [(name, _find_module(value)) for name, value in (*list_globals(function), *list_closure(function))]
        found = [
            *(name for name, source in named if _is_outside(source)),
            *(name for name in list_arguments(code, "IMPORT_NAME") if _is_outside(name)),
            *(name for name in _CALLS if name in list_global_names(code) and name not in outer),
            *list_arguments(code, "STORE_GLOBAL", "DELETE_GLOBAL"),
            *(name for name in list_roots_written(function) if _is_shared(outer.get(name))),
        ]
        if found:
            return f"{found[0]} in {function.__qualname__}"
    return None


def list_outer_values(functions: Iterable[Any], names: set[str]) -> list[tuple[Any, str]]:
    """List global variables that these functions read, and attributes in `names` of the user's classes and modules that
    are globals, each as a mapping and a name in it."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    for function in functions:
        for name, value in list_globals(function):
            if _is_shared(value):
                for inner in names & vars(value).keys():
                    if not _is_code(vars(value)[inner]):
                        found[id(value), inner] = vars(value), inner
            elif not _is_code(value):
                found[id(function.__globals__), name] = function.__globals__, name
    return list(found.values())


def _is_code(value: Any) -> bool:
    kinds = (type, staticmethod, classmethod, property)
    return isinstance(value, kinds) or inspect.ismodule(value) or inspect.isroutine(value)


def _is_shared(value: Any) -> bool:
    """Whether the value is one of the user's classes or modules."""
    return (inspect.ismodule(value) or isinstance(value, type)) and not is_installed(value)


def _is_outside(source: str) -> bool:
    return source.partition(".")[0] in _OUTSIDE or source.endswith(".trainer.trainer")


def _find_module(value: Any) -> str:
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def _find_lightning(module: torch.nn.Module) -> Any:
    return namespaces.load(namespaces.find_namespace(module), "core.module.LightningModule")


def _list_hooks(module: torch.nn.Module) -> set[str]:
    """Names of Lightning's methods that run outside of steps or are replaced while a step is recorded."""
    return {*dir(_find_lightning(module))} - {*_ENTRY}


def _list_methods(bases: Iterable[type], hooks: set[str]) -> list[tuple[str, Any]]:
    """Name and function of the methods that these classes define, except hooks."""
    members = [(name, member) for base in bases for name, member in vars(base).items() if name not in hooks]
    return [(name, function) for name, member in members for function in _list_functions(member)]


def _list_functions(member: Any) -> Iterator[Any]:
    """The functions in a member of a class: its own, and those that decorators have wrapped."""
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    member = member.func if isinstance(member, (functools.partial, functools.partialmethod)) else member
    while member is not None:
        if inspect.isfunction(member):
            yield member
        member = getattr(member, "__wrapped__", None)


def _list_texts(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code and its string constants, which may be keys, inner functions included."""
    for each in walk_code(code):
        yield from each.co_names
        yield from (constant for constant in each.co_consts if isinstance(constant, str))
