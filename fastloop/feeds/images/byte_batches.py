"""Sends pictures to the device as bytes: the dataset returns uint8, and the device converts it to floats.

The last transforms (ToTensor or ToDtype, then Normalize) map each byte by its value and channel only. So the user's own
transforms run once on all 256 values, and the device looks the results up: the floats have the same bits on every
device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from fastloop.feeds.images.nested import find_user_dataset, replace_leaves
from fastloop.feeds.images.own_samples import check_named
from fastloop.feeds.images.reading import Transform, read_source
from fastloop.feeds.lazy_loader import StandInDataset
from fastloop.records.images import Normalize, ToFloat, ToTensor


class ByteSample(NamedTuple):
    """A sample, or a batch of them, with uint8 pictures. torch and Lightning keep this type when they collate, pin and
    move it."""

    image: Any
    """uint8 [C, H, W] or [N, C, H, W]"""
    label: Any


@dataclass(frozen=True)
class AsBytes:
    """The want ``dataset.uint8``."""

    device_takes: tuple[str, ...] = ()
    """Names of the steps that the device does instead of the dataset."""
    live: list[ToFloats] = field(default_factory=list, compare=False, repr=False, metadata={"json": None})
    """The object that does these steps."""

    def wrap(self, dataset: Any) -> ByteDataset:
        """Return a copy of the dataset that returns bytes; the user's objects stay unchanged.

        Raises:
            NotApplicable: floats made from bytes differ from the dataset's own.
        """
        plain = find_user_dataset(dataset)
        transforms = read_source(plain).transforms
        color = [each for each in transforms if is_color(each)]
        first = next(place for place, each in enumerate(transforms) if ToFloat() in each.steps)
        to_bytes, trial = make_bytes(transforms[:first]), ToFloats(color)

        def make(leaf: Any) -> Callable[[int], Any]:
            twin = ByteDataset(replace_transform(leaf, to_bytes))
            return lambda index: trial.finish(default_collate([twin[index]]))

        check_named(plain, make, lambda sample: default_collate([sample]))
        self.live[:] = [ToFloats(color)]
        return ByteDataset(replace_transform(dataset, to_bytes))

    def finish(self, batch: Any) -> Any:
        """Convert the marked batches in data on the device to what the user's own loader would have returned."""
        return self.live[0].finish(batch)

    def evidence(self) -> Mapping[str, int]:
        """Return the number of batches that arrived as bytes."""
        return {"byte_batches": self.live[0].batches}


def make_bytes(transforms: Sequence[Transform]) -> Any:
    """Join these transforms, which come before the conversion to floats, into one that returns uint8 [C, H, W]."""
    from torchvision.transforms import Compose, PILToTensor

    calls = [each.call for each in transforms]
    are_tensors = any(isinstance(step, ToTensor) for each in transforms for step in each.steps)
    return Compose(calls if are_tensors else [*calls, PILToTensor()])


def is_color(transform: Transform) -> bool:
    """Whether the transform only helps to convert an image to floats, and moves no pixels."""
    return any(isinstance(step, (ToTensor, ToFloat, Normalize)) for step in transform.steps)


def replace_transform(dataset: Any, transform: Callable[[Any], Any]) -> Any:
    """Copy a dataset that `read_source` can read, or a stand-in for one, with another transform."""

    def replace(leaf: Any) -> Any:
        twin = copy.copy(leaf)
        twin.transform = transform
        return twin

    return replace_leaves(dataset, replace)


class ByteDataset(StandInDataset):
    """Marks the samples of `inner`, ``(uint8 [C, H, W], label)``, so that the device side recognizes their batches."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getitem__(self, index: Any) -> ByteSample:
        return ByteSample(*self.inner[index])


class ToFloats:
    """Converts bytes to floats with the same bits as the user's transforms on the CPU.

    Args:
        transforms: the transforms that turn a PIL image into a float tensor without moving its pixels.
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.table = _ask_for_all_bytes([each.call for each in transforms])
        self.starts = torch.arange(0, self.table.numel(), 256).view(-1, 1, 1)
        self.batches = 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Convert uint8 [N, 3, H, W] to floats of the same shape."""
        return self.find_table(images.device).view(-1)[images + self.starts]

    def find_table(self, device: torch.device) -> torch.Tensor:
        """Return the lookup table [3, 256] for bytes, on this device."""
        if self.table.device != device:
            self.table, self.starts = self.table.to(device), self.starts.to(device)
        return self.table

    def finish(self, batch: Any) -> Any:
        """Replace every `ByteSample` in the batch, at any depth, by the list that the default collate function makes
        from float samples. Batches of several loaders come in lists, tuples and dictionaries."""
        if isinstance(batch, ByteSample):
            if batch.image.dtype != torch.uint8:  # the dataset ignored the replaced transform
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
    """Apply the transforms to every byte, [3, 256]."""
    from PIL import Image

    row = np.arange(256, dtype=np.uint8)
    image: Any = Image.fromarray(np.stack([row] * 3, axis=-1)[None])
    for call in calls:
        image = call(image)
    return image.as_subclass(torch.Tensor).squeeze(1).contiguous()  # type: ignore[no-any-return]
