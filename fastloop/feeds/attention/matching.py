"""Matches hand-written attention in a captured graph: its products, scaling, masks and dropout.

The search starts at a softmax, goes back to the product of queries and keys, and forward to the product with the
values. It reads each step in between by its effect, however it is written (``@``, einsum, baddbmm, in place).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from fastloop.feeds.attention.changes import is_changed_between, name_of
from fastloop.feeds.attention.constants import Constants, NotConstant, read_size, swaps

PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum", "baddbmm")
CASTS = ("to", "float", "type_as", "bfloat16", "half", "double", "type", "contiguous")
NEVER = -1e4
"""This number or a lower one, added to a score or replacing it, makes its weight 0; GPT-2's own code uses this one."""


class NoMatch(Exception):
    """This is not an attention that a single call can replace; the message says why."""


@dataclass
class Found:
    """One attention. Nodes for its tensors: query [.., Q, D], key [.., K, D], value [.., K, E], result [.., Q, E]."""

    query: Node
    key: Node
    value: Node
    result: Node
    order: tuple[int, ...] | None = None
    """Permutation to apply to the result's dimensions; None if it needs none."""
    scale: float = 1.0
    scale_by: list[tuple[Node, bool]] = field(default_factory=list)
    """Tensors to multiply the query by, or to divide it by (True)."""
    causal: bool = False
    stale: list[Node] = field(default_factory=list)
    """Masks that `causal` makes redundant."""
    masks: list[tuple[str, Node]] = field(default_factory=list)
    """Masks with their meanings: ``allowed`` and ``barred`` are boolean, True where a score counts or does not;
    ``added`` ones are added to the scores, ``taken`` ones subtracted."""
    evens: bool = False
    """Whether a fully masked row has equal weights, because the same finite number replaces all its scores."""
    dropout: float | Node = 0.0
    """Dropout rate; a node if Dynamo saw several rates and made it an input."""
    between: list[Node] = field(default_factory=list)
    """Nodes to remove, from the result back."""

    @property
    def adds(self) -> bool:
        """Whether a mask holds numbers instead of booleans."""
        return any(means in ("added", "taken") for means, _ in self.masks)


def find_attention(softmax: Node, constants: Constants) -> Found:
    """Match the attention around a softmax. Adds nodes to the graph that only reorder dimensions.

    Raises:
        NoMatch: there is no attention, or a single call cannot compute it.
    """
    _check_dim(softmax)
    result, weights, dropout, after = _follow_weights(softmax)
    steps, before = _trace_back(_read_argument(softmax, 0, "input"))
    product = before[-1]
    found = _read_products(product, result, weights)
    found.dropout, found.between = dropout, [*reversed(after), softmax, *before]
    _check_types(product, found)
    if is_changed_between(found.between, result):
        raise NoMatch("one of its inputs is changed in place before its result is computed")
    _read_steps(steps, found, constants)
    _find_causal(found, product, constants)
    return found


# -- forward from the softmax -------------------------------------------------------------------------------------


def _check_dim(softmax: Node) -> None:
    scores = _read_example(softmax)
    dim = _read_argument(softmax, 1, "dim")
    if not isinstance(dim, int) or dim not in (-1, scores.dim() - 1):
        raise NoMatch("its softmax is not over the last dimension")
    if not 2 <= scores.dim() <= 4:
        raise NoMatch(f"its scores have {scores.dim()} dimensions")


def _follow_weights(softmax: Node) -> tuple[Node, Node, Any, list[Node]]:
    """Return the product with the values, its weights argument, their dropout, and all nodes on the way."""
    weights, dropout, passed = softmax, cast(Any, 0.0), list[Node]()
    while True:
        users = list(weights.users)
        if len(users) != 1:
            raise NoMatch("its weights are also used elsewhere")
        user, name = users[0], name_of(users[0])
        passed.append(user)
        if name in PRODUCTS:
            return user, weights, dropout, passed
        if name == "dropout":
            rate, on = _read_argument(user, 1, "p", 0.5), _read_argument(user, 2, "training", True)
            if not isinstance(on, bool) or dropout:
                raise NoMatch("its weights have two dropouts, or one that the graph switches")
            dropout = rate if on else 0.0
        elif not _casts(user) and not swaps(user):
            raise NoMatch(f"its weights go through {name}")
        weights = user


# -- back to the product ------------------------------------------------------------------------------------------


def _trace_back(node: Any) -> tuple[list[tuple[str, Any]], list[Node]]:
    """Return the operations on the scores in order, as (what, by), and the nodes back to the product.

    Raises:
        NoMatch: no path leads to a product, or a value on the way is used elsewhere.
    """
    if not isinstance(node, Node) or not isinstance(node.meta.get("example_value"), torch.Tensor):
        raise NoMatch("its softmax input is not a product of queries and keys")
    if len(node.users) != 1:
        raise NoMatch("its scores are also used elsewhere")
    name = name_of(node) or ""
    if name in PRODUCTS:
        by = (_read_argument(node, 0, "input"), _read_argument(node, 3, "beta", 1)) if name == "baddbmm" else None
        steps = [] if by is None else [("scale", _read_argument(node, 4, "alpha", 1)), ("baddbmm", by)]
        return steps, [node]
    problem = NoMatch(f"its scores go through {name or node.op}")
    for what, inner, by in _read_step(name, node):
        try:
            steps, nodes = _trace_back(inner)
        except NoMatch as error:
            problem = error if problem.args[0].startswith("its scores go through") else problem
            continue
        return [*steps, (what, by)], [node, *nodes]
    raise problem


def _read_step(name: str, node: Node) -> list[tuple[str, Any, Any]]:
    """List possible readings of a node: its operation on the scores, the argument with the scores, other operands."""
    first, second = _read_argument(node, 0, "input"), _read_argument(node, 1, "other")
    plain = name.strip("_").removeprefix("i")  # also in place: mul_, imul
    if _casts(node):
        return [("cast", first, None)]
    if plain in ("mul", "multiply"):
        return [("scale", first, second), ("scale", second, first)]
    if plain in ("div", "truediv", "divide", "true_divide") and not node.kwargs.get("rounding_mode"):
        return [("divide", first, second)]
    if plain == "add" and _read_argument(node, 2, "alpha", 1) == 1:
        return [("add", first, second), ("add", second, first)]
    if plain == "sub" and _read_argument(node, 2, "alpha", 1) == 1:
        return [("subtract", first, second)]
    if plain == "masked_fill":
        return [("bar", first, (_read_argument(node, 1, "mask"), _read_argument(node, 2, "value")))]
    if name == "where":
        chosen, other = _read_argument(node, 1, "input"), _read_argument(node, 2, "other")
        mask = _read_argument(node, 0, "condition")
        if node.op == "call_method":  # scores.where(mask, other)
            return [("allow", first, (_read_argument(node, 1, "condition"), other))]
        return [("allow", chosen, (mask, other)), ("bar", other, (mask, chosen))]
    return []


def _read_steps(steps: list[tuple[str, Any]], found: Found, constants: Constants) -> None:
    """Translate the operations on the scores, in order, into arguments of one call."""
    fills = list[float]()
    for what, by in steps:
        number = _read_number(by, constants)
        if what == "baddbmm":
            added, beta = by
            if (beta := _read_number(beta, constants)) != 0:
                if beta != 1:
                    raise NoMatch("its baddbmm scales what it adds")
                found.masks.append(("added", added))
        elif what in ("scale", "divide"):
            if found.adds:
                raise NoMatch("its scores are scaled after something was added to them")
            if number is not None and not (isinstance(by, Node) and constants.list_buffers(by)):
                factor = number if what == "scale" else 1 / number
                found.scale, fills = found.scale * factor, [fill * abs(factor) for fill in fills]
            elif found.masks:
                raise NoMatch("its scores are scaled after some were masked")
            elif isinstance(by, Node) and all(size == 1 for size in _read_example(by).shape[-2:]):
                found.scale_by.append((by, what == "divide"))
            else:
                raise NoMatch("its scores are not scaled by a single number")
        elif what in ("add", "subtract"):
            if number is None:
                found.masks.append(("added" if what == "add" else "taken", by))
            else:
                constants.hold(by)
        elif what in ("bar", "allow"):
            mask, value = by
            fill = _read_number(value, constants)
            if fill is None or fill > NEVER or _read_example(mask).dtype != torch.bool:
                raise NoMatch("it does not fill masked scores with a large negative number")
            constants.hold(value)
            fills.append(fill)
            found.masks.append(("barred" if what == "bar" else "allowed", mask))
    found.evens = len(set(fills)) == 1 and fills[0] > -math.inf
    if max(fills, default=-math.inf) > NEVER:
        raise NoMatch("it does not fill masked scores with a large negative number once they are scaled")
    if found.scale <= 0:
        raise NoMatch("its scale is not positive")


def _read_number(value: Any, constants: Constants) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Node):
        return None
    try:
        value = constants.evaluate(value)
    except NotConstant:
        return None
    if isinstance(value, torch.Tensor):
        filled = value.numel() > 0 and bool((value == value.flatten()[0]).all())
        return float(value.flatten()[0]) if filled else None
    return float(value) if isinstance(value, (int, float)) else None


def _find_causal(found: Found, product: Node, constants: Constants) -> None:
    """Drop the masks if they only let a query see itself and earlier keys: the call's ``is_causal`` does that."""
    scores = _read_example(product)
    size = read_size(scores.shape[-1])
    if read_size(scores.shape[-2]) != size:
        return
    varies = any(isinstance(each, torch.SymInt) for each in scores.shape[-2:])

    def reads(mask: Node, means: str) -> bool:
        sides = [max(each.shape) for each in constants.list_buffers(mask) if each.dim()]
        tried = [size, max([*sides, size + 1])] if varies else [size]
        return all(_is_causal(_evaluate(mask, {size: side}, constants), side, means) for side in tried)

    if found.masks and all(reads(mask, means) for means, mask in found.masks):
        found.causal, found.stale, found.masks = True, [mask for _, mask in found.masks], []
        for mask in found.stale:
            constants.hold(mask)


def _evaluate(mask: Node, sizes: dict[int, int], constants: Constants) -> Any:
    try:
        return constants.evaluate(mask, sizes)
    except NotConstant:
        return None


def _is_causal(mask: Any, size: int, means: str) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.numel() != size * size or mask.shape[-2:] != (size, size):
        return False
    mask = mask.reshape(size, size)
    if means in ("added", "taken"):
        mask = mask if means == "added" else -mask
        if not bool(((mask == 0) | (mask <= NEVER)).all()):
            return False
        mask = mask == 0
    past = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
    return mask.dtype == torch.bool and bool((mask == (~past if means == "barred" else past)).all())


# -- the two products ---------------------------------------------------------------------------------------------


def _read_products(product: Node, result: Node, weights: Node) -> Found:
    graph: Graph = product.graph
    with graph.inserting_before(product):
        query, key = _read_einsum_scores(product) if name_of(product) == "einsum" else _read_scores(product)
    with graph.inserting_before(result):
        value, order = (
            _read_einsum_result(result, weights) if name_of(result) == "einsum" else _read_result(result, weights)
        )
    return Found(query=query, key=key, value=value, result=result, order=order)


def _read_scores(product: Node) -> tuple[Node, Node]:
    at = 1 if name_of(product) == "baddbmm" else 0
    left, right = product.args[at : at + 2]
    _check_batches(left, right)
    assert isinstance(right, Node)
    key = product.graph.call_method("transpose", (right, -2, -1))
    key.meta["example_value"] = _read_example(right).transpose(-2, -1)
    return left, key  # type: ignore[return-value]


def _read_result(result: Node, weights: Node) -> tuple[Node, tuple[int, ...] | None]:
    if name_of(result) == "baddbmm":
        raise NoMatch("its result is added to something in the same call")
    left, right = result.args[:2]
    _check_batches(left, right)
    swapped = _count_swaps(weights) % 2 == 1
    if (left is weights) == swapped or (left is not weights and right is not weights):
        raise NoMatch("its weights are not the left factor of the product")
    value = right if left is weights else left
    assert isinstance(value, Node)
    if not swapped:
        return value, None
    dims = _read_example(value).dim()
    back = result.graph.call_method("transpose", (value, -2, -1))
    back.meta["example_value"] = _read_example(value).transpose(-2, -1)
    return back, (*range(dims - 2), dims - 1, dims - 2)


def _check_batches(left: Any, right: Any) -> None:
    a, b = _read_example(left), _read_example(right)
    if a.dim() != b.dim() or a.dim() < 2 or tuple(a.shape[:-2]) != tuple(b.shape[:-2]):
        raise NoMatch("one of its products broadcasts heads or samples")


def _read_einsum_scores(product: Node) -> tuple[Node, Node]:
    (first, second), out, operands = _parse_einsum(product)
    *batch, query, key = list(out)
    of_query, of_key = (first, second) if query in first else (second, first)
    nodes = operands if query in first else operands[::-1]
    inner = [letter for letter in of_query if letter in of_key and letter not in batch]
    if len(inner) != 1 or query in of_key or key in of_query or len({*out, *inner}) != len(out) + 1:
        raise NoMatch("its einsum is not a product of queries and keys")
    return (
        _permute(nodes[0], of_query, [*batch, query, *inner]),
        _permute(nodes[1], of_key, [*batch, key, *inner]),
    )


def _read_einsum_result(result: Node, weights: Node) -> tuple[Node, tuple[int, ...] | None]:
    (first, second), out, operands = _parse_einsum(result)
    if _count_swaps(weights) % 2 or weights not in operands:
        raise NoMatch("its weights are transposed before an einsum")
    of_weights, of_value = (first, second) if operands[0] is weights else (second, first)
    node = operands[1] if operands[0] is weights else operands[0]
    *batch, query, key = list(of_weights)
    width = [letter for letter in of_value if letter not in of_weights]
    plain = [*batch, query, *width]
    if len(width) != 1 or query in of_value or key in out or sorted(plain) != sorted(out):
        raise NoMatch("its einsum is not a product of weights and values")
    order = tuple(plain.index(letter) for letter in out)
    return _permute(node, of_value, [*batch, key, *width]), order if out != "".join(plain) else None


def _parse_einsum(node: Node) -> tuple[tuple[str, str], str, list[Node]]:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    parts = str(equation).replace(" ", "").replace("->", ",").split(",")
    plain = isinstance(equation, str) and "." not in equation and "->" in equation
    if not plain or len(operands) != 2 or len(parts) != 3:
        raise NoMatch("its einsum is not a product of two tensors")
    if any(len(set(part)) != len(part) for part in parts):
        raise NoMatch("its einsum takes a diagonal")
    return (parts[0], parts[1]), parts[2], operands  # type: ignore[return-value]


def _permute(node: Node, letters: str, wanted: list[str]) -> Node:
    if sorted(letters) != sorted(wanted):
        raise NoMatch("one of its products broadcasts heads or samples")
    if list(letters) == wanted:
        return node
    order = [letters.index(letter) for letter in wanted]
    made = node.graph.call_method("permute", (node, *order))
    made.meta["example_value"] = _read_example(node).permute(order)
    return made


def _check_types(product: Node, found: Found) -> None:
    """Refuse different dtypes: a single call computes in one. Autocast, if on, ensures that, as for the products."""
    scores, out = _read_example(product).dtype, _read_example(found.result).dtype
    given = {_read_example(each).dtype for each in (found.query, found.key, found.value)}
    if given != {out} and scores != out:
        raise NoMatch(f"its products have different dtypes: {scores} and {out}")


def _count_swaps(node: Node) -> int:
    """Count the transpositions of the weights between the softmax and this node."""
    count = 0
    while name_of(node) != "softmax":
        count += swaps(node)
        node = node.all_input_nodes[0]
    return count


def _casts(node: Node) -> bool:
    return name_of(node) in CASTS and _read_example(node).is_floating_point()


def _read_argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _read_example(node: Any) -> torch.Tensor:
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(example, torch.Tensor):
        raise NoMatch("one of its arguments is not a tensor")
    return example
