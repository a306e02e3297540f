"""Walk the nested containers a batch is made of: mappings, lists, tuples, named tuples, dataclasses, tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from enum import Enum
from typing import Any

import torch


class BatchWindow(list[Any]):
    """Separate batches of one accumulation window that cannot be concatenated, or are not yet."""


class StagedWindow(BatchWindow):
    """A window whose batches were copied to the device ahead of time."""


class CannotRegroup(TypeError):
    """These batches cannot be cut, or joined, into batches of other sizes; the message names the obstacle."""


def iterate_tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a batch, depth first."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif is_container(batch):
        for member in list_members(batch):
            yield from iterate_tensors(member)


def walk_tensors(
    batch: Any, inside: frozenset[int] = frozenset(), *, in_any_object: bool = False
) -> Iterator[torch.Tensor]:
    """Yield every tensor of a batch, depth first, also from the attributes of objects that Lightning can move: those
    with ``to`` or ``pin_memory``, such as a graph library's batch. `rebuild` cannot rebuild such objects.

    Args:
        inside: ids of the objects that enclose this one; some objects refer to themselves.
        in_any_object: look into objects of other classes, too, unless another object encloses them: they may refer to
            anything.
    """
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    if is_container(batch):
        members = list_members(batch)
    elif (_can_move(batch) or (in_any_object and not inside and _has_parts(batch))) and id(batch) not in inside:
        members, inside = [*vars(batch).values()], inside | {id(batch)}
    else:
        return
    for member in members:
        yield from walk_tensors(member, inside, in_any_object=in_any_object)


_PARTS: Mapping[torch.layout, Sequence[str]] = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def walk_storage(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the numbers of those that `walk_tensors` finds: a sparse tensor consists of several,
    and has neither bytes nor streams itself."""
    for tensor in walk_tensors(batch):
        parts = _PARTS.get(tensor.layout)
        yield from [tensor] if parts is None else (getattr(tensor, part)() for part in parts)


_LEAVES = (torch.Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, Enum)


def may_hide_tensors(batch: Any, inside: frozenset[int] = frozenset()) -> bool:
    """Whether the batch may hold tensors that `walk_tensors` does not find: in objects that only the user's transfer
    hook can move, or that manage their own memory, such as some graph libraries' batches.

    Args:
        inside: ids of the objects that enclose this one.
    """
    if isinstance(batch, _LEAVES) or type(batch).__module__ == "numpy" or id(batch) in inside:
        return False
    if isinstance(batch, set):
        members = [*batch]
    elif is_container(batch):
        members = list_members(batch)
    elif _can_move(batch):
        members = [*vars(batch).values()]
    else:
        return True
    return any(may_hide_tensors(member, inside | {id(batch)}) for member in members)


def _can_move(batch: Any) -> bool:
    kind = type(batch)
    return (hasattr(kind, "to") or hasattr(kind, "pin_memory")) and _has_parts(batch)


def _has_parts(batch: Any) -> bool:
    return hasattr(batch, "__dict__") and not isinstance(batch, (type, torch.nn.Module))


def rebuild(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same container with `change` applied to each direct member.

    Raises:
        TypeError: the mapping or dataclass cannot be built from its members.
    """
    if isinstance(batch, Mapping):
        members = {key: change(value) for key, value in batch.items()}
        return members if type(batch) is dict else type(batch)(members)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(change(value) for value in batch)
    return dataclasses.replace(
        batch, **{field.name: change(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    )


def is_container(batch: Any) -> bool:
    """Whether `rebuild` can take this object apart."""
    return isinstance(batch, (list, tuple, Mapping)) or (  # mappings take longer to recognize
        dataclasses.is_dataclass(batch) and not isinstance(batch, type)
    )


def list_members(container: Any) -> list[Any]:
    """List the direct members, in the order in which `rebuild` walks them."""
    if isinstance(container, (list, tuple)):
        return [*container]
    if isinstance(container, Mapping):
        return [*container.values()]
    return [getattr(container, field.name) for field in dataclasses.fields(container)]


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same structure with every tensor changed; anything else that is not a container stays unchanged."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if not is_container(batch):
        return batch
    return rebuild(batch, lambda member: map_tensors(member, change))


def count_rows(batch: Any) -> int | None:
    """Count the samples in a batch: the first dimension of its first tensor that has one; None if there is none. For a
    `BatchWindow`, the sum over its batches."""
    first = batch[0] if type(batch) in (list, tuple) and batch else batch  # nearly all batches, at every step
    if isinstance(first, torch.Tensor) and first.dim():
        return first.size(0)
    if isinstance(batch, BatchWindow):
        counts = [count_rows(each) for each in batch]
        return None if None in counts else sum(filter(None, counts))
    for tensor in iterate_tensors(batch):
        if tensor.dim():
            return tensor.size(0)
    return None


def count_samples(batch: Any, claims: Sequence[int | None] = ()) -> int | None:
    """Count the samples in a batch of any kind; None if unknown.

    Sources, in this order: the object's ``batch_size`` or ``num_graphs``; the first claim that the batch confirms; the
    first dimension of its first tensor, which may be an object's attribute; its length.

    Args:
        claims: counts from elsewhere, most reliable first. A claim counts if it is the first dimension of a tensor in
            the batch, or the length of a list. ``self.log(..., batch_size=...)`` may count tokens instead, and a loader
            whose dataset makes the batches counts batches.
    """
    if isinstance(batch, BatchWindow):
        counts = [count_samples(each) for each in batch]
        return None if None in counts else sum(filter(None, counts))
    if (own := _read_own_count(batch)) is not None:
        return own
    for claim in claims:
        if claim is not None and claim > 0 and _bears_out(batch, claim):
            return claim
    if (first := count_rows(batch)) is not None:
        return first
    for tensor in walk_tensors(batch, in_any_object=True):
        if tensor.dim():
            return tensor.size(0)
    is_object = isinstance(batch, Sized) and not isinstance(batch, (torch.Tensor, str, bytes, list, tuple, Mapping))
    return len(batch) if is_object else None


def _read_own_count(batch: Any) -> int | None:
    """Return the object's own count of its samples, if reading it needs no synchronization."""
    if type(batch) in (list, tuple, dict) or isinstance(batch, torch.Tensor):
        return None
    with contextlib.suppress(Exception):  # a user's property may raise anything
        if _reads_device(batch):
            return None
        for name in ("batch_size", "num_graphs"):
            size = getattr(batch, name, None)
            if isinstance(size, tuple) and size:  # a TensorDict's is a shape
                size = size[0]
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                return size
    return None


def _reads_device(batch: Any) -> bool:
    """Whether reading the count makes PyTorch Geometric search a tensor on the device for its largest number."""
    try:
        of_nodes = batch.batch
    except AttributeError:
        return False
    return isinstance(of_nodes, torch.Tensor) and of_nodes.is_cuda and getattr(batch, "ptr", None) is None


def _bears_out(batch: Any, claim: int) -> bool:
    """Whether something in the batch has `claim` members."""
    if isinstance(batch, torch.Tensor):
        return batch.dim() > 0 and batch.size(0) == claim
    if isinstance(batch, (list, tuple)):
        return len(batch) == claim or any(_bears_out(each, claim) for each in batch)
    if isinstance(batch, Mapping):
        return any(_bears_out(each, claim) for each in batch.values())
    lists = [each for each in vars(batch).values() if isinstance(each, (list, tuple))] if _has_parts(batch) else []
    return any(len(each) == claim for each in lists) or any(
        _bears_out(each, claim) for each in walk_tensors(batch, in_any_object=True)
    )


class InputsChannelsLast:
    """Converts image batches [N, C, H, W] to channels-last order, and counts them."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, batch: Any) -> Any:
        """Convert the batch's 4-D floating-point tensors to channels-last; return the same object if it has none."""
        found = False

        def change(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            if tensor.dim() != 4 or not tensor.is_floating_point():
                return tensor
            found = True
            return tensor.contiguous(memory_format=torch.channels_last)

        changed = map_tensors(batch, change)
        self.batches += found
        return changed if found else batch
