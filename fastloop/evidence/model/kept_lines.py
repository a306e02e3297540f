"""The line of source that adds to an attribute or a global variable, and whether another line empties it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

_ADDS = {"append", "appendleft", "extend", "add", "insert", "update", "setdefault"}
_CLEARS = {"clear", "pop", "popleft", "popitem", "reset"}
_STARTS = {"__init__", "setup", "on_fit_start", "on_train_start"}
"""Functions in which an assignment creates the container and does not clear it."""


def find_line(places: Iterable[tuple[str, str | None]], name: str) -> tuple[str | None, bool]:
    """Return the first line that adds to ``self.name`` or ``name``, as ``train.py:42``, and whether some function
    empties it.

    Args:
        places: files, each with a class to search in; with None, the whole file.
    """
    where, cleared = None, False
    for file, kind in dict.fromkeys(places):
        for function, node in _list_statements(file, kind):
            if _adds(node, name):
                where = where or f"{_shorten(file)}:{getattr(node, 'lineno', 0)}"
            elif function not in _STARTS and _clears(node, name):
                cleared = True
    return where, cleared


def _shorten(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


@lru_cache(maxsize=8)
def _list_statements(file: str, kind: str | None) -> tuple[tuple[str, ast.AST], ...]:
    """Every node inside the functions of a class, or of a whole file, with the function's name."""
    try:
        tree: ast.AST = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ()
    if kind is not None:
        tree = next((each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == kind), tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return tuple((function.name, node) for function in functions for node in ast.walk(function))


def _is_named(node: ast.AST, name: str) -> bool:
    """Whether an expression is ``self.name``, ``name``, or an item of one of these."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)


def _adds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return (node.func.attr in _ADDS and _is_named(node.func.value, name)) or _is_named(node.func, name)  # a metric
    if isinstance(node, ast.AugAssign):
        return _is_named(node.target, name)
    if not isinstance(node, ast.Assign) or not any(_is_named(target, name) for target in node.targets):
        return False
    return any(isinstance(each, ast.Subscript) for each in node.targets) or any(
        _is_named(each, name) for each in ast.walk(node.value)
    )


def _clears(node: ast.AST, name: str) -> bool:
    """Call only for nodes that do not add."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _CLEARS and _is_named(node.func.value, name)
    targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else ()
    return any(_is_named(target, name) for target in targets)
