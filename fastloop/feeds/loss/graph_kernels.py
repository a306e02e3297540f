"""A pass over captured graphs that computes cross-entropy over many classes by the kernels of `kernels.py`.

Casts to float32 between the output layer and the loss are left out: the kernels compute in float32 anyway, and Inductor
could not merge the casts with them. Unlike Inductor's, they do not write the gradient over the logits.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.nn import functional as F

from fastloop.feeds.compiled.graph_passes import COMPILES
from fastloop.feeds.loss.cross_entropy import FEWEST_CLASSES, find_kernels
from fastloop.feeds.loss.padding import list_losses, read_settings

LAYERS = (F.linear, torch.matmul, operator.matmul)
CASTS, VIEWS = ("float", "double", "to"), ("view", "reshape", "flatten", "contiguous")
DEVICES = ("cuda",)
"""On a CPU, Inductor's own kernels are better than plain PyTorch."""


@torch.library.custom_op("fastloop::reduce_rows", mutates_args=())
def reduce_rows(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return losses [rows] and log-sum-exp [rows] of logits [rows, classes], in float32 or wider."""
    reduce, _ = find_kernels(logits)
    losses, sums = reduce(_make_dense(logits), target.contiguous(), ignore_index)
    return losses, sums


@torch.library.custom_op("fastloop::spread_rows", mutates_args=())
def spread_rows(logits: Tensor, target: Tensor, sums: Tensor, scale: Tensor, ignore_index: int) -> Tensor:
    """Return the gradient of the logits [rows, classes]; `scale` [rows] is that of the losses."""
    _, write = find_kernels(logits)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    write(_make_dense(logits), target.contiguous(), sums, scale.contiguous(), gradient, ignore_index)
    return gradient


def _make_dense(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


@reduce_rows.register_fake
def _shape_losses(logits: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(logits.shape[0], dtype=dtype), logits.new_empty(logits.shape[0], dtype=dtype)


@spread_rows.register_fake
def _shape_gradient(logits: Tensor, *_others: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, target, output[1])


def _differentiate(ctx: Any, scale: Tensor, _sums: Tensor) -> tuple[Tensor, None, None]:
    return spread_rows(*ctx.saved_tensors, scale, ctx.ignore_index), None, None


reduce_rows.register_autograd(_differentiate, setup_context=_save)


class UseKernels:
    """The pass, for graphs that are compiled.

    Attributes:
        used: losses that use the kernels so far.
    """

    def __init__(self) -> None:
        self.used = 0

    def __call__(self, graph: GraphModule) -> GraphModule:
        for loss in list_losses(graph.graph) if graph.meta[COMPILES] else ():
            self.used += _replace(graph.graph, loss)
        graph.recompile()
        return graph


def _replace(graph: Graph, loss: Node) -> bool:
    """Replace the loss if its logits [rows, classes] come from an output layer; returns whether they do."""
    settings = read_settings(loss)
    logits = settings.get("input")
    older = settings.get("size_average"), settings.get("reduce")
    ignore_index, reduction = settings.get("ignore_index", -100), settings.get("reduction", "mean")
    if not isinstance(logits, Node) or older != (None, None) or isinstance(ignore_index, Node):
        return False
    seen: Tensor = logits.meta["example_value"]
    classes = seen.shape[-1]
    if seen.device.type not in DEVICES or seen.dim() != 2 or not isinstance(classes, int) or classes < FEWEST_CLASSES:
        return False
    dtype = loss.meta["example_value"].dtype

    def compute(logits: Tensor, target: Tensor) -> Tensor:
        losses: Tensor = torch.ops.fastloop.reduce_rows.default(logits, target, ignore_index)[0]
        if reduction == "mean":
            losses = losses.sum() / (target != ignore_index).sum()
        elif reduction == "sum":
            losses = losses.sum()
        return losses.to(dtype)

    with graph.inserting_before(loss):
        found = _find_logits(graph, logits)
        if found is None:
            return False
        added, given = symbolic_trace(compute).graph, (found, settings["target"])
        made = graph.graph_copy(added, dict(zip(added.find_nodes(op="placeholder"), given, strict=True)))
    assert isinstance(made, Node)
    loss.replace_all_uses_with(made)
    node: Any = loss
    while not node.users and node.target not in LAYERS:
        before = logits if node is loss else node.args[0]
        graph.erase_node(node)
        node = before
    return True


def _find_logits(graph: Graph, given: Node) -> Node | None:
    """Return the loss's logits in the type that the output layer made; None if more than casts and views lies between,
    which Inductor merges with its own kernels and could not merge with these, or if code changes them in place."""
    path = [given]
    while path[0].op == "call_method" and path[0].target in (*VIEWS, *CASTS):
        path.insert(0, path[0].args[0])  # type: ignore[arg-type]
    node, *later = path
    values = [each.meta["example_value"] for each in path]
    made, cast = values[0].dtype, values[-1].dtype
    if node.target not in LAYERS or cast not in (made, torch.promote_types(made, torch.float32)):
        return None
    if any(each._version or each.device != values[0].device for each in values):  # Dynamo ran in-place operations
        return None
    for view in (each for each in later if each.target in VIEWS):
        node = graph.create_node(view.op, view.target, (node, *view.args[1:]), dict(view.kwargs))
    return node
