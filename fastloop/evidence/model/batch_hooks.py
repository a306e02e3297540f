"""Finds, in its code, whether a hook of each batch may change the training, and not only looks at it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from fastloop.evidence.samples import sample_code, writes

_CHANGES = frozenset({"backward", "load_state_dict", "step", "update", "update_parameters", "zero_grad"})
"""Methods that change weights, gradients or averages of weights; torch's in-place ones end with an underscore."""


def may_change_training(owner: Any, hook: str) -> bool:
    """Whether a module's or a callback's hook, or what it calls, writes to weights, gradients or other objects. A hook
    without source may."""
    found = getattr(owner, hook, None)
    if (function := sample_code.find_function(getattr(found, "__func__", found))) is None:
        return found is not None
    called = sample_code.list_with_called(function, type(owner))
    is_module = callable(getattr(owner, "training_step", None))
    parsed = [sample_code.parse(each) for each in called]
    return any(each is None or any(_list_changes(*each, is_module)) for each in parsed)


def _list_changes(tree: ast.AST, me: str | None, is_module: bool) -> Iterator[bool]:
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    handles = bool(named & {"grad", "parameters", "named_parameters"})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = writes.name_called(node)
            yield name in _CHANGES or writes.is_in_place(name)
        elif isinstance(node, ast.AugAssign):
            yield (handles and isinstance(node.target, ast.Name)) or _is_foreign(node.target, me, is_module)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                own = isinstance(target, ast.Attribute) and writes.is_own(target.value, me)
                rebuilt = ast.unparse(target) in {ast.unparse(part) for part in ast.walk(node.value)}
                yield _is_foreign(target, me, is_module) and (rebuilt or not own)


def _is_foreign(target: ast.AST, me: str | None, is_module: bool) -> bool:
    """Whether a target is an attribute of the module, or of something else than the callback itself."""
    chain = list(writes.list_chain(target))
    return len(chain) > 1 and (is_module or chain[-1] != me)
