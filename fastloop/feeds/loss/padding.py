"""A pass over captured graphs that pads a large vocabulary to a multiple of 64 between the output layer and its loss.

Rows of 50,257 numbers are not aligned in memory, which slows the output layer's products. The weight is padded inside
the graph, with a bias of -inf for the added classes, so that no parameter changes and these classes get no probability.
Only done if nothing but the loss uses the logits, since other code must see the user's shape.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from fastloop.feeds.loss.cross_entropy import FEWEST_CLASSES, ROW_MULTIPLE

BARRED = -math.inf
ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
CASTS = ("float", "double", "to", "contiguous", "bfloat16", "half")


class PadVocabulary:
    """The pass.

    Attributes:
        padded: losses padded so far.
    """

    def __init__(self) -> None:
        self.padded = 0

    def __call__(self, graph: GraphModule) -> GraphModule:
        for loss in list_losses(graph.graph):
            if (path := _find_path(loss)) is not None:
                _pad(graph.graph, loss, path)
                self.padded += 1
        graph.recompile()
        return graph


def list_losses(graph: Graph) -> list[Node]:
    """List the calls of PyTorch's cross_entropy, but for those inside the transforms of torch.func."""
    found = [node for node in graph.nodes if node.target is F.cross_entropy]
    return [node for node in found if isinstance(node.meta["example_value"], FakeTensor)]


def read_settings(loss: Node) -> dict[str, Any]:
    """Return the arguments of a loss by name; none if it has class weights, smoothing or probabilities as targets."""
    settings: dict[str, Any] = dict(zip(ARGUMENTS, loss.args, strict=False)) | dict(loss.kwargs)
    target = settings.get("target")
    plain = settings.get("weight") is None and not settings.get("label_smoothing")
    known = plain and isinstance(target, Node) and not target.meta["example_value"].is_floating_point()
    return settings if known else {}


def _find_path(loss: Node) -> list[Node] | None:
    """Return the nodes from the output layer to the loss's input; None if the classes cannot be padded on the way."""
    settings = read_settings(loss)
    node, path = settings.get("input"), list[Node]()
    while isinstance(node, Node) and len(node.users) == 1:
        path.insert(0, node)
        if node.target is F.linear:
            classes = node.meta["example_value"].shape[-1]
            rows = path[-1].meta["example_value"].dim() == 2
            large = isinstance(classes, int) and classes >= FEWEST_CLASSES and classes % ROW_MULTIPLE
            return path if large and rows and all(_widen(each, classes, 0) is not None for each in path[1:]) else None
        node = node.args[0] if node.args else None
    return None


def _pad(graph: Graph, loss: Node, path: list[Node]) -> None:
    layer = path[0]
    classes = layer.meta["example_value"].shape[-1]
    more = -classes % ROW_MULTIPLE
    x, weight = layer.args[:2]
    bias: Any = layer.args[2] if len(layer.args) > 2 else layer.kwargs.get("bias")
    with graph.inserting_before(layer):  # under the same autocast state
        if bias is None:
            bias = graph.call_method("new_zeros", (weight, (classes,)))
        wide_bias = graph.call_function(F.pad, (bias, (0, more)), {"value": BARRED})
        wide_weight = graph.call_function(F.pad, (weight, (0, 0, 0, more)))
        made = graph.call_function(F.linear, (x, wide_weight, wide_bias))
    with graph.inserting_before(loss):
        for node in path[1:]:
            args = _widen(node, classes, more)
            assert args is not None
            made = graph.create_node(node.op, node.target, (made, *args), dict(node.kwargs))
        _move_wrong_targets(graph, loss, classes, more)
    loss.replace_input_with(path[-1], made)
    for node in reversed(path):
        graph.erase_node(node)


def _move_wrong_targets(graph: Graph, loss: Node, classes: int, more: int) -> None:
    """Move targets that are no classes beyond the added ones, so that they stay errors."""
    settings, call = read_settings(loss), graph.call_function
    target, ignored = settings["target"], settings.get("ignore_index", -100)
    wrong = call(torch.logical_and, (call(torch.ge, (target, classes)), call(torch.ne, (target, ignored))))
    moved = call(torch.where, (wrong, call(torch.add, (target, more)), target))
    loss.replace_input_with(target, moved)


def _widen(node: Node, classes: int, more: int) -> tuple[Any, ...] | None:
    """Return the arguments after the first one, with `more` classes added; None if the node splits the classes."""
    dims = node.args[0].meta["example_value"].dim()  # type: ignore[union-attr]
    rest = node.args[1:]
    if node.target in CASTS:
        return rest
    if node.target in ("view", "reshape"):
        sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
        if sizes and isinstance(sizes[-1], int) and sizes[-1] == classes:
            return (*sizes[:-1], classes + more)
    if node.target == "flatten" and len(rest) == 2 and isinstance(rest[1], int) and rest[1] % dims != dims - 1:
        return rest
    if node.target is operator.getitem:
        places = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        if places[-1] == slice(None) or (len(places) < dims and Ellipsis not in places):
            return rest
    return None
