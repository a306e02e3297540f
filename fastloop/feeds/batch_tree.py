"""Walk the nested containers a batch is made of: mappings, lists, tuples, named tuples, dataclasses, tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


class Window(list[Any]):
    """Batches of one accumulation window that are not one batch: what cannot be concatenated, or not yet."""


class StagedWindow(Window):
    """One whose batches have been brought to the device, ahead of time."""


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, depth first."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (list, tuple)):  # before the mappings, which take longer to tell
        for value in batch:
            yield from tensors(value)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors(getattr(batch, field.name))


def rebuild(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same container with `change` applied to each direct member.

    Raises:
        TypeError: a mapping or dataclass of a kind that cannot be built from its members.
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
    """Whether `rebuild` knows how to take it apart."""
    return isinstance(batch, (Mapping, list, tuple)) or (
        dataclasses.is_dataclass(batch) and not isinstance(batch, type)
    )


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor changed; anything that is no container is handed through."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if not is_container(batch):
        return batch
    return rebuild(batch, lambda member: map_tensors(member, change))


def samples(batch: Any) -> int | None:
    """Samples in a batch: the first dimension of its first tensor that has one; None where there is none. Those of all
    its batches in a `Window`."""
    first = batch[0] if type(batch) in (list, tuple) and batch else batch  # nearly all batches, at every step
    if isinstance(first, torch.Tensor) and first.dim():
        return int(first.shape[0])
    if isinstance(batch, Window):
        counts = [samples(each) for each in batch]
        return None if None in counts else sum(filter(None, counts))
    for tensor in tensors(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    return None


class InputsChannelsLast:
    """Brings image batches [N, C, H, W] into channels-last order, and counts them."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, batch: Any) -> Any:
        """The batch with its 4-D floating tensors in channels-last order; the same object where it has none."""
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
