"""Finds code that needs the default memory layout of images, as ``view`` does; reads only the names in functions."""

from __future__ import annotations

import functools
import inspect
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from fastloop.evidence.samples import sample_code

_MOST_ITEMS = 32
"""Limit on the items examined in a list."""
_CALLS = {"view", "view_as", "parameters_to_vector"}
"""``parameters_to_vector`` is torch's own function, and takes a view of each parameter."""
_LIBRARIES = ("torch.", "torchvision.", "torchmetrics.", "fastloop.", "lightning.", "pytorch_lightning.", "builtins.")


def list_views(starts: Iterable[Any], *, in_modules: bool = True) -> Iterator[str]:
    """Names of functions that call ``view``, see `walk_functions`. Code compiled to C has no names."""
    for function in walk_functions(starts, in_modules=in_modules):
        if _CALLS.intersection(list_names(function)):
            yield function.__qualname__


def walk_functions(starts: Iterable[Any], *, in_modules: bool = True) -> Iterator[types.FunctionType]:
    """The functions among these functions and objects and the user's code that they name.

    Functions of installed packages are among them, but are not followed.

    Args:
        in_modules: whether to also look into classes of torch modules.
    """
    queue, seen = deque(starts), set[int]()
    while queue:
        item = queue.popleft()
        if isinstance(item, (list, tuple, dict)) and id(item) not in seen:
            seen.add(id(item))
            queue.extend(islice(item.values() if isinstance(item, dict) else item, _MOST_ITEMS))
        item = _find_code(item)
        if id(item) in seen or f"{item.__module__}.".startswith(_LIBRARIES):
            continue
        seen.add(id(item))
        is_users = not sample_code.is_installed(item)
        if inspect.isfunction(item):
            yield item
            if is_users:
                names = set(list_names(item))
                outer = [value for _, value in (*sample_code.list_globals(item), *sample_code.list_closure(item))]
                queue.extend(value for value in outer if not inspect.ismodule(value))
                queue.extend(vars(each).get(name) for each in outer if inspect.ismodule(each) for name in names)
        elif in_modules if issubclass(item, torch.nn.Module) else is_users:
            queue.extend(
                filter(inspect.isfunction, (_find_code(each) for base in item.__mro__ for each in vars(base).values()))
            )


def list_names(item: Any) -> Iterator[str]:
    """The names in a function's code; empty if it is not a function."""
    if inspect.isfunction(code := _find_code(item)):
        yield from sample_code.list_names(code.__code__)


def _find_code(item: Any) -> Any:
    """The function or class that runs when this object is called."""
    while isinstance(item, functools.partial):
        item = item.func
    if isinstance(item, (types.MethodType, staticmethod, classmethod)):
        item = item.__func__
    elif isinstance(item, property):
        item = item.fget
    item = inspect.unwrap(item) if inspect.isfunction(item) else item
    return item if inspect.isfunction(item) or isinstance(item, type) else type(item)
