"""Evaluates values in a captured graph that depend on no batch: masks from buffers and sizes, scales, fill values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Node, map_arg

from fastloop.feeds.attention.changes import changes_in_place, find_storage, list_changes, name_of

RANDOM = ("rand", "dropout", "bernoulli", "normal", "uniform", "multinomial")


class NotConstant(Exception):
    """The value depends on the batch, on parameters or on random numbers."""


class Constants:
    """Evaluates nodes of one graph.

    Args:
        graph: as Dynamo captured it; its inputs refer to the actual tensors.
        kept: ids of the tensors (buffers) that may be treated as constants.

    Attributes:
        held: the tensors whose numbers the rewritten graph relies on, by id.
    """

    def __init__(self, graph: torch.fx.GraphModule, kept: Collection[int]) -> None:
        self._graph, self._kept = graph, kept
        self.held = dict[int, torch.Tensor]()
        self._changed = {storage for _, storage in list_changes(graph.graph)}

    def evaluate(self, node: Any, sizes: Mapping[int, int] | None = None) -> Any:
        """Return the value of a node; anything else is returned unchanged.

        Args:
            sizes: replacements for dynamic sizes, keyed by the size in the captured batch.

        Raises:
            NotConstant: the value is not constant.
        """
        known: dict[Node, Any] = {}
        with torch.no_grad():
            return map_arg(node, lambda each: self._evaluate(each, sizes or {}, known))

    def list_buffers(self, node: Node) -> list[torch.Tensor]:
        """List the kept tensors that a node's value is computed from."""
        found, queue, seen = list[torch.Tensor](), [node], set[Node]()
        while queue:
            if (each := queue.pop()) not in seen:
                seen.add(each)
                queue += each.all_input_nodes
                value = _find_input(each) if each.op == "placeholder" else None
                if isinstance(value, torch.Tensor) and id(value) in self._kept:
                    found.append(value)
        return found

    def hold(self, node: Any) -> None:
        """Record that the rewritten graph relies on the value of this node; does nothing for other values."""
        if isinstance(node, Node):
            self.held |= {id(buffer): buffer for buffer in self.list_buffers(node)}

    def _evaluate(self, node: Node, sizes: Mapping[int, int], known: dict[Node, Any]) -> Any:
        if node not in known:
            known[node] = self._read(node, sizes, known)
        return known[node]

    def _read(self, node: Node, sizes: Mapping[int, int], known: dict[Node, Any]) -> Any:
        seen = node.meta.get("example_value")
        if isinstance(seen, torch.SymInt) and node.op != "call_function":
            if not _is_size(node):
                raise NotConstant  # a number that the user passes, such as the width of a window
            return sizes.get(read_size(seen), read_size(seen))
        if isinstance(seen, (bool, int, float)) and node.op != "call_function":
            return seen
        if node.op == "get_attr":
            return getattr(self._graph, str(node.target))
        if node.op == "placeholder":
            value = _find_input(node)
            if id(value) not in self._kept or find_storage(node) in self._changed:
                raise NotConstant
            return value
        name = name_of(node)
        if name is None or changes_in_place(name) or any(word in name for word in RANDOM):
            raise NotConstant
        if find_storage(node) in self._changed:  # by a separate statement, as in mask[:, :4] = 1
            raise NotConstant

        def look(each: Node) -> Any:
            try:
                return self._evaluate(each, sizes, known)
            except NotConstant:
                example = each.meta.get("example_value")
                if isinstance(example, torch.Tensor) and (name.endswith("_like") or name.startswith("new_")):
                    shape = [read_size(size) for size in example.shape]  # only its shape and dtype are used
                    return torch.empty(shape, dtype=example.dtype, device=example.device)
                raise

        args, kwargs = map_arg(node.args, look), map_arg(dict(node.kwargs), look)
        try:
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise NotConstant from error


def read_size(size: Any) -> int:
    """Return a size as a number, without a guard that would fix it."""
    return size if isinstance(size, int) else int(size.node.hint)


def swaps(node: Node) -> bool:
    """Whether a node transposes the last two dimensions."""
    name = name_of(node)
    if node.op == "call_function" and name == "getattr":
        return node.args[1] == "mT"
    if name not in ("transpose", "swapaxes", "swapdims", "permute"):
        return False
    dims = node.meta["example_value"].dim()
    given = node.args[1:] if len(node.args) > 2 else node.args[1]
    if not isinstance(given, (tuple, list)) or not all(isinstance(each, int) for each in given):
        return False
    places = [each % dims for each in given]
    if name == "permute":
        return places == [*range(dims - 2), dims - 1, dims - 2]
    return sorted(places) == [dims - 2, dims - 1]


def _is_size(node: Node) -> bool:
    """Whether Dynamo records that this number among a graph's inputs is the size of a tensor."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return type(source).__name__ == "TensorPropertySource"


def _find_input(node: Node) -> Any:
    """Return the actual value of a graph input; None if Dynamo does not record it."""
    return getattr(node.meta.get("grapharg"), "example", None)
