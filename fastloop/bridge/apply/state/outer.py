"""Global variables that a module's code may change when it is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from fastloop.evidence.samples.sample_code import is_installed, list_called, list_globals, list_roots_written

MISSING = object()
"""The value of a variable that does not exist yet."""


def list_changeable(kind: type) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Variables that the forward of a user's class may change, with what it calls: each as the namespace that holds it,
    its name and its value. Objects of the user's classes count, whatever is done with them: their methods may write."""
    for space, name, is_written in _list_used(kind):
        value = space.get(name, MISSING)
        if inspect.ismodule(value):
            if is_written and not is_installed(SimpleNamespace(__module__=value.__name__)):
                inner = vars(value)
                yield from ((inner, each, inner[each]) for each in list(inner) if not _is_code(each, inner[each]))
        elif is_written or (not inspect.isroutine(value) and not is_installed(_find_class(value))):
            yield space, name, value


def restore_variable(space: dict[str, Any], name: str, before: Any) -> None:
    """Let a variable have the value that it had."""
    if before is MISSING:
        space.pop(name, None)
    elif space.get(name, MISSING) is not before:
        space[name] = before


@functools.lru_cache(maxsize=512)
def _list_used(kind: type) -> tuple[tuple[dict[str, Any], str, bool], ...]:
    """Namespaces and names of global variables in the code, and whether it writes to them or below them."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str, bool]] = {}
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    for function in list_called(forward, kind):
        space, written = function.__globals__, set(list_roots_written(function))
        read = {name: value for name, value in list_globals(function) if not isinstance(value, type)}
        names = {name for name in written if not name.startswith((".", " "))}
        names |= {name for name, value in read.items() if inspect.ismodule(value) and value.__name__ in written}
        for name in dict.fromkeys([*read, *names]):
            found[id(space), name] = space, name, name in names or found.get((id(space), name), (0, 0, False))[2]
    return tuple(found.values())


def _find_class(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _is_code(name: str, value: Any) -> bool:
    return name.startswith("__") or inspect.ismodule(value) or inspect.isroutine(value) or isinstance(value, type)
