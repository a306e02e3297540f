"""Finds code that keeps gradients themselves, instead of copies, for longer than a function runs, or moves them.

By default each backward makes new gradients. In gradient bucket views it writes over those of the last step instead,
which changes what such code has kept, and ranks exchange the buckets' memory, which is not that of a gradient whose
``data`` was replaced.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastloop.evidence.model import picture_views
from fastloop.evidence.samples import sample_code

_SAME = (
    *("data", "T", "mT", "detach", "view", "view_as", "reshape", "flatten", "ravel", "squeeze", "unsqueeze", "t"),
    *("transpose", "permute", "narrow", "contiguous", "cpu", "cuda", "to", "type", "float", "double", "numpy"),
    *("get", "items", "values", "pop", "copy"),
)
"""Attributes and methods of a gradient, or of what holds gradients, whose result may be or hold the same memory."""
_PASS_ON = {"list", "tuple", "dict", "zip", "enumerate", "filter", "map", "reversed", "sorted", "iter", "next"}
_PUT = {"append", "appendleft", "add", "extend", "insert", "update", "setdefault", "put", "setattr"} | {
    "vector_to_parameters"
}
"""Calls that put an argument elsewhere; torch's ``vector_to_parameters`` sets the ``data`` of what it is given."""
_BACKWARD = {"backward", "manual_backward"}
_PARTS: dict[type[ast.AST], tuple[str, ...]] = {
    **dict.fromkeys((ast.Subscript, ast.Starred, ast.NamedExpr, ast.DictComp), ("value",)),
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.GeneratorExp), ("elt",)),
    **dict.fromkeys((ast.List, ast.Tuple, ast.Set), ("elts",)),
    **dict.fromkeys((ast.Dict, ast.BoolOp), ("values",)),
    ast.IfExp: ("body", "orelse"),
    ast.Lambda: ("body",),
}
"""The fields of an expression whose value its own value may be or hold."""
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)


def list_keepers(owners: Sequence[Any]) -> Iterator[str]:
    """Names of the user's functions that keep, return or move gradients, among those of these objects and the code that
    they name."""
    functions = [
        value for owner in owners for value in getattr(owner, "__dict__", {}).values() if inspect.isroutine(value)
    ]
    for function in picture_views.walk_functions([*owners, *functions]):
        if sample_code.is_installed(function) or not {"grad", "getattr"} & {*picture_views.list_names(function)}:
            continue
        if (parsed := sample_code.parse(function)) is not None and _keeps(parsed[0]):
            yield function.__qualname__.rpartition("<locals>.")[2]


def _keeps(tree: ast.AST) -> bool:
    """Whether a gradient gets out of this function (into an attribute, into a container from outside, or returned) or
    into other memory, or is in a local variable of a function that calls ``backward``."""
    nodes = [*ast.walk(tree)]
    held, own, before = set[str](), {*_list_own(nodes)}, -1
    while before < len(held):
        before = len(held)
        for node in nodes:
            for target in _list_targets(node, held):
                root = _find_root(target)
                if isinstance(target, ast.Name) or root in own:
                    held.add(root)
                elif not (isinstance(target, ast.Attribute) and target.attr == "grad"):
                    return True
    if held and any(isinstance(node, ast.Attribute) and node.attr in _BACKWARD for node in nodes):
        return True
    results = (node.value for node in nodes if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)))
    return any(_holds(value, held) for value in results) or any(_moves(node, held) for node in nodes)


def _moves(node: ast.AST, held: set[str]) -> bool:
    """Whether this gives a gradient other memory: ``grad.data = new`` or ``grad.set_(new)``."""
    if isinstance(node, ast.Assign):  # `grad.data += more` gives it its own memory again
        moved = [target for target in _spread(node.targets) if getattr(target, "attr", "") == "data"]
    else:
        moved = [node] if isinstance(node, ast.Attribute) and node.attr == "set_" else []
    return any(_holds(each.value, held) for each in moved)  # type: ignore[attr-defined]


def _list_targets(node: ast.AST, held: set[str]) -> Iterator[ast.AST]:
    """What this node puts a gradient into."""
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and _holds(node.value, held):
        yield from _spread(node.targets if isinstance(node, ast.Assign) else [node.target])
    elif isinstance(node, (ast.For, ast.comprehension)) and _holds(node.iter, held):
        yield from _spread([node.target])
    elif isinstance(node, ast.AugAssign) and isinstance(node.value, _DISPLAYS) and _holds(node.value, held):
        yield node.target  # else it may be a sum
    elif (
        isinstance(node, ast.Call)
        and (getattr(node.func, "attr", getattr(node.func, "id", "")) in _PUT or _is_own(node.func))
        and any(_holds(each, held) for each in node.args)
    ):
        yield node.func if isinstance(node.func, ast.Attribute) else node


def _is_own(called: ast.AST) -> bool:
    """Whether this is a method of the object itself that may keep its arguments: not one of Lightning's for values."""
    return (
        isinstance(called, ast.Attribute)
        and getattr(called.value, "id", "") == "self"
        and not called.attr.startswith(("log", "print", "all_gather"))
    )


def _spread(targets: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for target in targets:
        yield from _spread(target.elts) if isinstance(target, (ast.Tuple, ast.List)) else [target]


def _list_own(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names of containers that the function makes."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            makes = isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
            if makes or isinstance(node.value, _DISPLAYS):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _find_root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return getattr(node, "id", "")


def _holds(node: Any, held: set[str]) -> bool:
    """Whether the value of an expression is or holds a gradient, rather than something computed from it."""
    if isinstance(node, ast.Name):
        return node.id in held
    if isinstance(node, ast.Attribute):
        if node.attr == "grad":
            return getattr(node.value, "attr", _find_root(node.value)) not in ("autograd", "func", "torch")
        return node.attr in _SAME and _holds(node.value, held)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in _SAME and _holds(node.func.value, held)
        reads = getattr(node.func, "id", "") == "getattr" and [getattr(each, "value", 0) for each in node.args[1:2]]
        return reads == ["grad"] or (
            getattr(node.func, "id", "") in _PASS_ON and any(_holds(each, held) for each in node.args)
        )
    parts = [getattr(node, name) for name in _PARTS.get(type(node), ())]
    return any(_holds(each, held) for part in parts for each in (part if isinstance(part, list) else [part]))
