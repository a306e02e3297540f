"""Global variables that a module's code changes when it is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from fastloop.evidence.samples.sample_code import (
    is_installed,
    list_called,
    list_chains_written,
    list_globals,
    list_roots_written,
)

MISSING = object()
"""The value of a variable that does not exist yet."""


def list_changeable(kind: type) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield global variables that the code of a user's class may change, each as its namespace, name and value.

    Variables that are only read are left out, however large. An object of a user's class may change if one of its
    methods is called as a statement of its own.
    """
    for space, name, is_written in _list_used(kind):
        value = space.get(name, MISSING)
        if inspect.ismodule(value):
            if is_written and not is_installed(value):
                inner = vars(value)
                yield from ((inner, each, inner[each]) for each in list(inner) if not _is_code(each, inner[each]))
        elif is_written or (not inspect.isroutine(value) and not is_installed(_find_class(value))):
            yield space, name, value


def restore_variable(space: dict[str, Any], name: str, before: Any) -> None:
    """Restore a variable's earlier value."""
    if before is MISSING:
        space.pop(name, None)
    elif space.get(name, MISSING) is not before:
        space[name] = before


@functools.lru_cache(maxsize=512)
def _list_used(kind: type) -> tuple[tuple[dict[str, Any], str, bool], ...]:
    """List globals that ``forward``, ``training_step`` and the functions they call may change, as (namespace, name,
    is_written). `is_written` is False if the code only calls a method on the object and ignores the result."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str, bool]] = {}
    starts = [inspect.unwrap(getattr(kind, name)) for name in ("forward", "training_step") if hasattr(kind, name)]
    for function in list_called(starts, kind):
        space, written = function.__globals__, set(list_roots_written(function))
        names = {name for name in written if not name.startswith((".", " "))}
        modules = [(name, value) for name, value in list_globals(function) if inspect.ismodule(value)]
        names |= {name for name, value in modules if value.__name__ in written}
        called = {chain[0] for chain in list_chains_written(function) if len(chain) > 1 and chain[0] in space}
        for name in (*names, *called):
            found[id(space), name] = space, name, name in names or found.get((id(space), name), (0, 0, False))[2]
    return tuple(found.values())


def _find_class(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _is_code(name: str, value: Any) -> bool:
    return name.startswith("__") or inspect.ismodule(value) or inspect.isroutine(value) or isinstance(value, type)
