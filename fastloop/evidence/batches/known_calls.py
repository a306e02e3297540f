"""What is known of calls without reading their code: whether the result shares memory with the arguments.

A value's depth is the number of new containers around something that others hold too: 0 for one of the dataset's
tensors, 1 for a new list of such tensors; None if nobody else holds any part of it.
"""

from __future__ import annotations

from collections.abc import Iterable

Depth = int | None
FACTS = ("shape", "dtype", "device", "ndim", "size", "is_cuda", "requires_grad", "nbytes", "itemsize")
SAME = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "permute"),
    *("transpose", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "expand", "expand_as", "broadcast_to", "narrow"),
    *("expand_dims", "atleast_1d", "atleast_2d", "atleast_3d", "diagonal", "unfold", "real", "imag", "view_as_real"),
    *("view_as_complex", "detach", "to", "float", "double", "half", "bfloat16", "long", "int", "short", "byte", "bool"),
    *("cpu", "cuda", "contiguous", "type", "type_as", "numpy", "astype", "from_numpy", "as_tensor", "asarray"),
    *("asanyarray", "ascontiguousarray", "from_dlpack", "frombuffer", "memoryview", "pin_memory", "as_subclass"),
    *("T", "mT", "H", "mH", "data", "refine_names", "rename", "align_to", "getfield", "cast", "positive"),
    *("apply_to_collection", "move_data_to_device", "tree_map", "convert_input", "transfer_batch_to_device"),
    *("on_before_batch_transfer", "on_after_batch_transfer", "batch_to_device", "_apply_batch_transfer_handler"),
}
"""Functions, methods and attributes that may return the same memory."""
_NEW_CONTAINER = {
    *("list", "tuple", "dict", "set", "frozenset", "sorted", "reversed", "iter", "deque", "OrderedDict", "filter"),
    *("islice", "chain", "from_iterable", "copy", "values", "cycle", "map", "starmap", "split", "chunk", "unbind"),
    *("tensor_split", "tolist", "hsplit", "vsplit", "dsplit", "array_split", "broadcast_tensors", "broadcast_arrays"),
    *("tree_leaves", "tree_flatten", "meshgrid"),
}
"""Functions and methods that return a new container of the same members."""
_NEW_PAIRS = ("zip", "enumerate", "items", "zip_longest", "product", "batched", "groupby", "pairwise")
_MEMBER = ("next", "get", "pop", "popitem", "setdefault", "__getitem__", "getattr", "popleft", "itemgetter", "choice")


def join(depths: Iterable[Depth]) -> Depth:
    return min((depth for depth in depths if depth is not None), default=None)


def wrap(depth: Depth) -> Depth:
    return None if depth is None else depth + 1


def take(depth: Depth) -> Depth:
    """The depth of a member."""
    return None if depth is None else max(depth - 1, 0)


def refill(depth: Depth) -> Depth:
    """The depth of a new container of the same members."""
    return None if depth is None else max(depth, 1)


def find_result(name: str, depth: int, *, is_super: bool) -> Depth:
    """The depth of the result of an installed or unknown function, given arguments of this depth."""
    if name in SAME or is_super:
        return depth
    if name in _NEW_CONTAINER:
        return refill(depth)
    if name in _NEW_PAIRS:
        return wrap(refill(depth))
    if name in _MEMBER:
        return take(depth)
    return wrap(depth) if name[:1].isupper() else None
