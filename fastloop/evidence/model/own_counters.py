"""Finds what a module itself counts in each training_step and also reads there: fewer and larger batches would change
it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from fastloop.evidence.samples import sample_code, writes


def list_step_counters(module: Any) -> tuple[str, ...]:
    """Attributes that training_step, or what it calls, raises by a fixed number and also reads (``self.n += 1``), and
    iterators that it takes the next item from."""
    if (function := sample_code.find_function(getattr(type(module), "training_step", None))) is None:
        return ()
    counted, read = dict[str, None](), set[str]()
    for called in sample_code.list_with_called(function, type(module)):
        if (parsed := sample_code.parse(called)) is None:
            continue
        tree, me = parsed
        raised = dict(_list_raised(tree, me))
        counted |= dict.fromkeys(raised.values())
        logged = _list_logged(tree)
        own = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and writes.is_own(node.value, me))
        read |= {node.attr for node in own if isinstance(node.ctx, ast.Load) and node not in logged | raised.keys()}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "next" and node.args:
                taken = node.args[0]
                if isinstance(taken, ast.Attribute) and writes.is_own(taken.value, me):
                    counted[taken.attr] = None
    return tuple(f"self.{name}" for name in counted if name in read)


def _list_raised(tree: ast.AST, me: str | None) -> Iterator[tuple[ast.AST, str]]:
    """The places where a statement raises one of the object's own attributes by a fixed number, with the attribute's
    name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and _is_number(node.value):
            place: ast.AST = node.target
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and _is_number(node.value.right):
            place = node.value.left
            if ast.unparse(place) != ast.unparse(node.targets[0]):
                continue
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add_", "sub_"):
            if len(node.args) != 1 or not _is_number(node.args[0]) or not isinstance(node.func, ast.Attribute):
                continue
            place = node.func.value
        else:
            continue
        if isinstance(place, ast.Attribute) and writes.is_own(place.value, me):
            yield place, place.attr


def _list_logged(tree: ast.AST) -> set[ast.AST]:
    """The nodes that are only logged: inside calls that log, or assigned to a name that is read only there."""
    logged = {inner for node in ast.walk(tree) if _is_log(node) for inner in ast.walk(node)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    used = {node.id for node in names if node not in logged}
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Name) and target.id not in used:
            logged |= set(ast.walk(node.value))
    return logged


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("log", "log_dict", "print")


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
