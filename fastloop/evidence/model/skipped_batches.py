"""Finds, in its code, whether a training_step skips batches by returning None: merged ones would all be skipped."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.writes import name_called

_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def may_skip(module: Any) -> bool:
    """Whether training_step returns a loss in some places and none in others, or the result of a method that does."""
    if (function := sample_code.find_function(getattr(type(module), "training_step", None))) is None:
        return False
    called = {each: parsed[0] for each in sample_code.list_called([function], type(module)) if (parsed := _parse(each))}
    passed, queue = set[str](), ["training_step"]
    while queue:
        if (name := queue.pop()) not in passed:
            passed.add(name)
            trees = [tree for each, tree in called.items() if each.__name__ == name]
            queue += [inner for tree in trees for inner in _list_passed_on(tree)]
    return any(_returns_both(tree) for each, tree in called.items() if each.__name__ in passed)


def _parse(function: Any) -> tuple[ast.FunctionDef] | None:
    parsed = sample_code.parse(function)
    tree = None if parsed is None else next((n for n in ast.walk(parsed[0]) if isinstance(n, ast.FunctionDef)), None)
    return None if tree is None else (tree,)


def _list_returned(tree: ast.FunctionDef) -> Iterator[ast.expr | None]:
    """Yield what each ``return`` of the function itself returns, and both sides of ``a if condition else b``."""
    queue: list[ast.AST] = list(tree.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Return):
            yield from _list_sides(node.value)
        elif not isinstance(node, _INNER):
            queue += ast.iter_child_nodes(node)


def _list_sides(value: ast.expr | None) -> Iterator[ast.expr | None]:
    if isinstance(value, ast.IfExp):
        yield from (*_list_sides(value.body), *_list_sides(value.orelse))
    else:
        yield value


def _list_passed_on(tree: ast.FunctionDef) -> Iterator[str]:
    """Yield the names of functions whose result the function returns as it is."""
    for value in _list_returned(tree):
        if isinstance(value, ast.Call) and isinstance(value.func, (ast.Attribute, ast.Name)):
            yield name_called(value)


def _returns_both(tree: ast.FunctionDef) -> bool:
    nothing = [
        value is None or (isinstance(value, ast.Constant) and value.value is None) for value in _list_returned(tree)
    ]
    return not all(nothing) and (any(nothing) or not _ends(tree.body))


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Whether the statements always return or raise, as far as they show it."""
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return _ends(last.body) and _ends(last.orelse)
    if isinstance(last, (ast.With, ast.AsyncWith)):
        return _ends(last.body)
    if isinstance(last, ast.Try):
        tried = _ends(last.orelse or last.body) and all(_ends(each.body) for each in last.handlers)
        return tried or _ends(last.finalbody)
    if isinstance(last, ast.Match):
        return all(_ends(case.body) for case in last.cases)
    return isinstance(last, (ast.Return, ast.Raise, ast.While))
