"""Pictures that travel as bytes: the dataset hands out uint8, and the device turns it into floats.

What the last transforms (ToTensor or ToDtype, then Normalize) make of a byte depends on the byte and its channel only.
So the user's own transforms run once on all 256 values, and the device looks the results up: the floats have the same
bits on every device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from fastloop.feeds.images.reading import Transform, read_source
from fastloop.feeds.lazy_loader import StandInDataset
from fastloop.records.images import Normalize, ToFloat, ToTensor


class ByteSample(NamedTuple):
    """A sample, or a batch of them, whose picture is bytes: torch and Lightning collate, pin and move it as such."""

    image: Any
    """uint8 [C, H, W] or [N, C, H, W]"""
    label: Any


@dataclass(frozen=True)
class AsBytes:
    """The want ``dataset.uint8``."""

    device_takes: tuple[str, ...] = ()
    """Names of the steps that the dataset no longer takes."""
    live: list[ToFloats] = field(default_factory=list, compare=False, repr=False, metadata={"json": None})
    """What takes them."""

    def wrap(self, dataset: Any) -> ByteDataset:
        """A copy of the dataset that hands out bytes; the user's objects stay as they are."""
        transforms = read_source(find_user_dataset(dataset)).transforms
        self.live[:] = [ToFloats([each for each in transforms if is_color(each)])]
        first = next(place for place, each in enumerate(transforms) if ToFloat() in each.steps)
        return ByteDataset(replace_transform(dataset, make_bytes(transforms[:first])))

    def finish(self, batch: Any) -> Any:
        """What has come to the device, with marked batches as the user's own loader would have made them."""
        return self.live[0].finish(batch)

    def evidence(self) -> Mapping[str, int]:
        """Batches that came as bytes."""
        return {"byte_batches": self.live[0].batches}


def make_bytes(transforms: Sequence[Transform]) -> Any:
    """One transform for all of these, which come before images are floats, that makes uint8 [C, H, W] of them."""
    from torchvision.transforms import Compose, PILToTensor

    calls = [each.call for each in transforms]
    are_tensors = any(isinstance(step, ToTensor) for each in transforms for step in each.steps)
    return Compose(calls if are_tensors else [*calls, PILToTensor()])


def is_color(transform: Transform) -> bool:
    """Takes a part in making floats of an image, and none in where its pixels are."""
    return any(isinstance(step, (ToTensor, ToFloat, Normalize)) for step in transform.steps)


def replace_transform(dataset: Any, transform: Callable[[Any], Any]) -> Any:
    """A copy of a dataset that `read_source` reads, or of what stands in for one, with another transform."""
    if type(dataset) is not (kind := dataset.__class__):
        make, (inner, *others) = dataset.__reduce__()
        return make(replace_transform(inner, transform), *others)
    twin = copy.copy(dataset)
    if kind is Subset:
        twin.dataset = replace_transform(dataset.dataset, transform)
    elif kind is ConcatDataset:
        twin.datasets = [replace_transform(part, transform) for part in dataset.datasets]
    else:
        twin.transform = transform
    return twin


def find_user_dataset(dataset: Any) -> Any:
    """What a dataset stands in for."""
    while issubclass(type(dataset), StandInDataset):
        dataset = dataset.inner
    return dataset


class ByteDataset(StandInDataset):
    """Marks the samples of `inner`, ``(uint8 [C, H, W], label)``, so that their batches are known on the device."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getitem__(self, index: Any) -> ByteSample:
        return ByteSample(*self.inner[index])


class ToFloats:
    """Makes floats of bytes, as transforms of the user's do it on the CPU, bit for bit.

    Args:
        transforms: what makes a float tensor of a PIL image without moving its pixels.
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.table = _ask_for_all_bytes([each.call for each in transforms])
        self.starts = torch.arange(0, self.table.numel(), 256).view(-1, 1, 1)
        self.batches = 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 [N, 3, H, W] to floats of the same shape."""
        return self.find_table(images.device).view(-1)[images + self.starts]

    def find_table(self, device: torch.device) -> torch.Tensor:
        """What becomes of each byte, [3, 256], on this device."""
        if self.table.device != device:
            self.table, self.starts = self.table.to(device), self.starts.to(device)
        return self.table

    def finish(self, batch: Any) -> Any:
        """The batch with every `ByteSample` in it, however deep, as the list that the default collate function makes
        of floats. Several loaders' batches come in lists, tuples and dictionaries."""
        if isinstance(batch, ByteSample):
            if batch.image.dtype != torch.uint8:  # a dataset that keeps its transform to itself
                return list(batch)
            self.batches += 1
            return [self(batch.image), batch.label]
        if type(batch) in (list, tuple):
            found = [self.finish(each) for each in batch]
            return batch if all(new is old for new, old in zip(found, batch, strict=True)) else type(batch)(found)
        if type(batch) is dict:
            return {key: self.finish(each) for key, each in batch.items()}
        return batch


def _ask_for_all_bytes(calls: Sequence[Callable[[Any], Any]]) -> torch.Tensor:
    """What transforms make of every byte, [3, 256]."""
    from PIL import Image

    row = np.arange(256, dtype=np.uint8)
    image: Any = Image.fromarray(np.stack([row] * 3, axis=-1)[None])
    for call in calls:
        image = call(image)
    return image.as_subclass(torch.Tensor).squeeze(1).contiguous()  # type: ignore[no-any-return]
