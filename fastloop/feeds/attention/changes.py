"""Finds in-place changes of tensors in a captured graph, including statements such as ``mask[:, :4] = 1``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv", "ifloordiv", "iand", "ior", "ixor", "ipow", "setitem"})

OPERATORS = ("and_", "or_", "not_")
"""Functions of Python's module `operator` whose names end in an underscore only because they are keywords."""


def name_of(node: Node) -> str | None:
    """Return the name of the method or function that a node calls: matmul, truediv, softmax."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", None) if node.op == "call_function" else None


def changes_in_place(name: str) -> bool:
    """Whether a call of this name changes its first argument: ``masked_fill_``, ``+=``."""
    if name in OPERATORS:
        return False
    return name in IN_PLACE or name.strip("_") in IN_PLACE or (name.endswith("_") and not name.startswith("__"))


def list_changes(graph: Graph) -> list[tuple[Node, int]]:
    """List nodes that change a tensor in place, with the tensor's storage, which its views share."""
    changes = list[tuple[Node, int]]()
    for node in graph.nodes:
        changed = node.kwargs.get("out")
        if changes_in_place(name_of(node) or "") or node.kwargs.get("inplace"):
            changed = node.args[0] if node.args else node.kwargs.get("input")
        if (storage := find_storage(changed)) is not None:
            changes.append((node, storage))
    return changes


def find_storage(node: Any) -> int | None:
    """Return an id of the storage of a node's value; None if it is not a tensor."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def is_changed_between(nodes: Sequence[Node], last: Node) -> bool:
    """Whether an input of one of these nodes is changed in place after that node ran and before `last` runs."""
    order = {node: place for place, node in enumerate(last.graph.nodes)}
    changes = [(order[node], storage) for node, storage in list_changes(last.graph) if order[node] < order[last]]
    for node in nodes:
        taken = {find_storage(each) for each in node.all_input_nodes if each not in nodes}
        if any(place > order[node] and storage in taken for place, storage in changes):
            return True
    return False
