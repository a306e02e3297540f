"""A pass over captured graphs that replaces hand-written attention by a call of scaled_dot_product_attention."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fastloop.feeds.attention.changes import name_of
from fastloop.feeds.attention.constants import Constants
from fastloop.feeds.attention.matching import NEVER, Found, NoMatch, find_attention
from fastloop.feeds.compiled.graph_passes import COMPILES, MAY_TAKE, TAKEN

ATTEND = torch.nn.functional.scaled_dot_product_attention
LARGEST_SCORE = 8.0
"""If a number is added to all scores of a row, and is so large that rounding swallows scores of this size, all weights
of the row become equal."""
UNSQUEEZES: dict[int, list[int]] = {4: [], 3: [1], 2: [0, 0]}
"""Where to insert dimensions of size 1, by number of dimensions; of three, the first joins samples and heads."""


class ReplaceAttention:
    """The pass.

    Args:
        model: its buffers count as constants if the caller of the pass watches them for changes.

    Attributes:
        replaced: attentions replaced so far; causal: how many of them use ``is_causal`` instead of a mask.
        missed: for each attention not replaced, the reason.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.replaced = self.causal = 0
        self.missed: list[str] = []
        self._model = model

    def __call__(self, graph: GraphModule) -> GraphModule:
        kept = {id(buffer) for buffer in self._model.buffers()} & graph.meta[MAY_TAKE].keys()
        for node in [each for each in graph.graph.nodes if name_of(each) == "softmax"]:
            constants, before = Constants(graph, kept), set(graph.graph.nodes)
            try:
                if graph.meta.get(COMPILES) and node.meta["example_value"].dtype == torch.float64:
                    # Inductor assumes that what the CPU kernel saves for its backward is float32 (seen in torch 2.11).
                    raise NoMatch("it computes in float64, for which a compiled graph has no fused kernel")
                found = find_attention(node, constants)
            except NoMatch as reason:
                self.missed.append(str(reason))
                _erase(graph.graph, [each for each in graph.graph.nodes if each not in before])
                continue
            _replace(graph.graph, found)
            graph.meta[TAKEN] |= constants.held
            self.replaced += 1
            self.causal += found.causal
        graph.recompile()
        return graph


def _replace(graph: Graph, found: Found) -> None:
    result = found.result
    dims = result.meta["example_value"].dim()
    with graph.inserting_before(result):
        query, mask = _make_mask(graph, found, _scale(graph, found))
        settings: dict[str, Any] = {"dropout_p": found.dropout, "is_causal": found.causal, "scale": found.scale}
        if mask is not None and found.evens and not found.adds:
            query, mask = _neutralize_barred_rows(graph, query, mask)
        if mask is not None:
            own_dims = max(int(each.meta["example_value"].dim()) for _, each in found.masks)
            settings["attn_mask"] = _spread(graph, mask, own_dims, dims)
        three = [_spread(graph, each, dims, dims) for each in (query, found.key, found.value)]
        made = graph.call_function(ATTEND, tuple(three), settings)
        made.meta["example_value"] = _reorder_back(found)
        for place in UNSQUEEZES[dims]:
            made = graph.call_method("squeeze", (made, place))
        if found.order is not None:
            made = graph.call_method("permute", (made, *found.order))
        if any(name_of(user) in ("view", "as_strided") for user in result.users):
            made = graph.call_method("contiguous", (made,))  # like the result of a product
    made.meta["example_value"] = result.meta["example_value"]
    result.replace_all_uses_with(made)
    _erase(graph, found.between[::-1])
    while found.stale:
        mask = found.stale.pop()
        if not mask.users and mask.op != "placeholder":
            found.stale += mask.all_input_nodes
            graph.erase_node(mask)


def _reorder_back(found: Found) -> torch.Tensor:
    """Derive the call's example value from the old result's: computing it would fix sizes that may vary."""
    value: torch.Tensor = found.result.meta["example_value"]
    dims = value.dim()
    if found.order is not None:
        value = value.permute([found.order.index(place) for place in range(dims)])
    for place in UNSQUEEZES[dims]:
        value = value.unsqueeze(place)
    return value


def _scale(graph: Graph, found: Found) -> Node:
    query = found.query
    for node, divides in found.scale_by:
        scaled = graph.call_function(torch.div if divides else torch.mul, (query, node))
        query = graph.call_method("to", (scaled, found.query.meta["example_value"].dtype))
    return query


def _make_mask(graph: Graph, found: Found, query: Node) -> tuple[Node, Node | None]:
    """Join all masks into one: boolean if none is added to the scores, else in the result's dtype. Return the query,
    changed where added masks bar whole rows, and the joined mask."""
    inverse = {"barred": torch.logical_not, "taken": torch.neg}

    def join(plain: str, turned: str, by: Any) -> Node | None:
        terms = [mask for means, mask in found.masks if means == plain]
        terms += [graph.call_function(inverse[turned], (mask,)) for means, mask in found.masks if means == turned]
        return functools.reduce(lambda a, b: graph.call_function(by, (a, b)), terms) if terms else None

    allowed, added = join("allowed", "barred", torch.logical_and), join("added", "taken", torch.add)
    if added is None:
        return query, allowed
    given = (mask.meta["example_value"].dtype for _, mask in found.masks)  # booleans do not widen the dtype
    dtype = functools.reduce(torch.promote_types, given, found.between[-1].meta["example_value"].dtype)
    query, added = _shift_barred_rows(graph, query, added, dtype)
    added = graph.call_method("to", (added, found.result.meta["example_value"].dtype))
    if allowed is None:
        return query, added
    return query, graph.call_function(torch.where, (allowed, added, -math.inf))


def _shift_barred_rows(graph: Graph, query: Node, mask: Node, dtype: torch.dtype) -> tuple[Node, Node]:
    """In each row that an added mask bars entirely, subtract the row's highest number from the mask, which changes no
    weight. The call's backward needs this: next to such large numbers, it loses the sum of the weights. Scores that
    such a number swallows are set to 0, and get no gradients.

    Args:
        dtype: the dtype in which the mask was added.
    """
    top = graph.call_method("amax", (graph.call_method("detach", (mask,)), -1, True))
    some = graph.call_function(torch.gt, (top, -LARGEST_SCORE / torch.finfo(dtype).eps))
    barred = graph.call_function(torch.le, (top, NEVER))
    known = graph.call_function(torch.gt, (top, -math.inf))
    shift = graph.call_function(torch.where, (graph.call_function(torch.logical_and, (barred, known)), top, 0.0))
    query = graph.call_function(torch.mul, (query, some))
    return query, graph.call_function(torch.sub, (mask, shift))


def _neutralize_barred_rows(graph: Graph, query: Node, mask: Node) -> tuple[Node, Node]:
    """Give fully masked rows equal weights: set their scores to 0 and let all count. The call alone would return 0."""
    some = graph.call_method("any", (mask, -1, True))
    query = graph.call_function(torch.mul, (query, some))
    return query, graph.call_function(torch.logical_or, (mask, graph.call_function(torch.logical_not, (some,))))


def _spread(graph: Graph, node: Node, own: int, dims: int) -> Node:
    """Reshape to [samples, heads, .., ..], the only form that every kernel takes.

    Args:
        own: number of dimensions of the node; dims: that of the scores.
    """
    for place in [*[0] * (dims - own), *UNSQUEEZES[dims]]:
        node = graph.call_method("unsqueeze", (node, place))
    return node


def _erase(graph: Graph, nodes: list[Node]) -> None:
    """Remove unused nodes, last first."""
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
