"""Finds samples whose random draws all come from a generator that the sample makes and seeds itself."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

_DRAWING = ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal")
"""Functions of torch's that draw from their ``generator=`` alone."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_NAMING = (ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.ExceptHandler, ast.Match)
"""What may give a name another meaning, besides an assignment."""


def seeds_all_draws(function: Any, kind: type, draws: re.Pattern[str]) -> bool:
    """Whether a function is a ``__getitem__`` that draws only from a local ``torch.Generator().manual_seed(...)`` whose
    seed is the index and plain attributes of a `kind`: a sample is then the same wherever and whenever it is made.

    Args:
        draws: matches the names of what may draw.
    """
    method = _parse(function) if function.__name__ == "__getitem__" else None
    if method is None:
        return False
    nodes = list(ast.walk(method))
    written = [each.id for each in nodes if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)]
    given = [each.arg for each in method.args.args]
    if len(given) != 2 or {*given} & {*written} or any(isinstance(each, (*_SCOPES, *_NAMING)) for each in nodes[1:]):
        return False
    libraries = {name for name, value in function.__globals__.items() if value is torch} - {*written, *given}
    own = {
        name
        for name, value in _list_assigned(nodes)
        if written.count(name) == 1 and _is_seeded(value, libraries, given, kind)
    }
    calls = [each for each in nodes if isinstance(each, ast.Call) and _read_torch(each.func, libraries) in _DRAWING]
    passed = {
        id(word.value): call
        for call in calls
        for word in call.keywords
        if word.arg == "generator" and isinstance(word.value, ast.Name) and word.value.id in own
    }
    sure = {id(call.func) for call in passed.values()}
    named = [each for each in nodes if draws.fullmatch(getattr(each, "attr", getattr(each, "id", "")))]
    uses = [each for each in nodes if isinstance(each, ast.Name) and each.id in own and isinstance(each.ctx, ast.Load)]
    return all(id(each) in sure for each in named) and all(id(each) in passed for each in uses)


def _parse(function: Any) -> ast.FunctionDef | None:
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError):
        return None
    return found[0] if len(found) == 1 and isinstance(found[0], ast.FunctionDef) else None


def _list_assigned(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for each in nodes:
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            yield each.targets[0].id, each.value


def _read_torch(node: ast.expr, libraries: set[str]) -> str | None:
    """The function of torch's that an expression names."""
    is_torch = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in libraries
    return node.attr if is_torch and isinstance(node, ast.Attribute) else None


def _is_seeded(node: ast.expr, libraries: set[str], given: list[str], kind: type) -> bool:
    """Whether an expression is ``torch.Generator().manual_seed(...)`` with a seed that is the same for every call."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "manual_seed":
        return False
    made = node.func.value
    is_generator = isinstance(made, ast.Call) and _read_torch(made.func, libraries) == "Generator"
    plain = is_generator and len(node.args) == 1 and not node.keywords
    return plain and _is_steady(node.args[0], given, kind)


def _is_steady(node: ast.expr, given: list[str], kind: type) -> bool:
    """Whether a seed consists of numbers, the index and attributes that no code computes."""
    if isinstance(node, ast.BinOp):
        return _is_steady(node.left, given, kind) and _is_steady(node.right, given, kind)
    if isinstance(node, ast.Attribute):
        is_held = isinstance(node.value, ast.Name) and node.value.id == given[0]
        computed = (inspect.getattr_static(kind, name, None) for name in (node.attr, "__getattr__"))
        return is_held and not any(hasattr(each, "__get__") for each in computed)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id == given[1])
