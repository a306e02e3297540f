"""Reads an image dataset: its files and labels, and what its transforms do to each image.

Supports torchvision's ImageFolder (and DatasetFolder with its loader), Subset and ConcatDataset of those, and any
dataset with a method ``image_path_and_label(index) -> (path, label)``, a length, and a ``transform`` that its
``__getitem__`` applies to the RGB image: ``(transform(image), label)`` is the sample.
Source: torchvision/datasets/folder.py, torchvision/transforms/transforms.py, torchvision/transforms/v2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from fastloop.records.images import (
    CenterCrop,
    ColorJitter,
    ImageFacts,
    ImageStep,
    Interpolation,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Size,
    ToFloat,
    ToTensor,
)

METHOD = "image_path_and_label"
"""The method by which a dataset tells where a sample comes from."""


class NotImages(Exception):
    """The dataset does not hold image files, or does something unknown with them; the message says what."""


@dataclass(frozen=True)
class Transform:
    """One of the user's transforms, and its steps."""

    call: Callable[[Any], Any]
    steps: tuple[ImageStep, ...]


@dataclass(frozen=True)
class ImageSource:
    """A dataset of image files."""

    locate: Callable[[int], tuple[str, Any]]
    """Returns the path of an index, and the label as in the sample."""
    count: int
    transforms: tuple[Transform, ...]
    """The transforms in order, starting from the decoded RGB image, up to the first unknown one."""
    unknown: str | None = None
    """Name of the first unknown transform; None if all are known."""

    @property
    def facts(self) -> ImageFacts:
        """The facts that a rung may plan with."""
        steps = tuple(step for each in self.transforms for step in each.steps)
        return ImageFacts(steps=steps, unknown=self.unknown, count=self.count)

    def list_paths(self, most: int) -> list[str]:
        """Return the paths of up to `most` files, spread across the dataset."""
        return [self.locate(index)[0] for index in spread_indices(self.count, most)]


def spread_indices(count: int, most: int) -> list[int]:
    """Return up to `most` indices of `count` samples, from the first to the last one."""
    return np.linspace(0, count - 1, min(most, count)).astype(int).tolist()  # type: ignore[no-any-return]


def read_facts(dataset: Any) -> ImageFacts | str:
    """Return the facts about a dataset of image files, or why it is not one."""
    try:
        return read_source(dataset).facts
    except NotImages as reason:
        return str(reason)


def read_source(dataset: Any) -> ImageSource:
    """Read the files, labels and transforms of a dataset.

    Raises:
        NotImages: it is not recognized as a dataset of image files.
    """
    if type(dataset) is Subset:
        inner, indices = read_source(dataset.dataset), dataset.indices
        return replace(inner, locate=lambda index: inner.locate(int(indices[index])), count=len(dataset))
    if type(dataset) is ConcatDataset:
        return _read_parts([read_source(part) for part in dataset.datasets], dataset.cumulative_sizes)
    if hasattr(dataset, METHOD):
        return _make_source(getattr(dataset, METHOD), len(dataset), getattr(dataset, "transform", None))
    return _read_folder(dataset)


def _read_parts(parts: Sequence[ImageSource], ends: Sequence[int]) -> ImageSource:
    if any((part.transforms, part.unknown) != (parts[0].transforms, parts[0].unknown) for part in parts):
        raise NotImages("the parts of the ConcatDataset have different transforms")

    def locate(index: int) -> tuple[str, Any]:
        index = range(ends[-1])[index]  # of a Subset, it may count from the end
        place = next(place for place, end in enumerate(ends) if index < end)
        return parts[place].locate(index - (ends[place - 1] if place else 0))

    return replace(parts[0], locate=locate, count=ends[-1])


def _read_folder(dataset: Any) -> ImageSource:
    folder = sys.modules.get("torchvision.datasets.folder")
    kind = type(dataset)
    if folder is None or not isinstance(dataset, folder.DatasetFolder):
        raise NotImages(f"{kind.__name__} is not an ImageFolder and has no {METHOD}(index)")
    for name in ("__getitem__", "__len__"):
        if getattr(kind, name) is not getattr(folder.DatasetFolder, name):
            raise NotImages(f"{kind.__name__} has its own {name} and no {METHOD}(index)")
    if dataset.loader not in (folder.default_loader, folder.pil_loader):
        raise NotImages(f"{kind.__name__} opens its files with {_name(dataset.loader)}")
    target_transform = dataset.target_transform

    def locate(index: int) -> tuple[str, Any]:
        path, label = dataset.samples[index]
        return str(path), label if target_transform is None else target_transform(label)

    return _make_source(locate, len(dataset.samples), dataset.transform)


def _make_source(locate: Callable[[int], tuple[str, Any]], count: int, transform: Any) -> ImageSource:
    transforms: list[Transform] = []
    for each in list_calls(transform):
        steps = read_steps(each)
        to_bytes = getattr(each, "dtype", None) is torch.uint8
        if steps is None or (to_bytes and not _are_bytes(transforms)):
            return ImageSource(locate, count, tuple(transforms), _name(each))
        transforms.append(Transform(each, steps))
    return ImageSource(locate, count, tuple(transforms))


def _are_bytes(transforms: Sequence[Transform]) -> bool:
    """Whether these transforms end with a uint8 tensor."""
    steps = [step for each in transforms for step in each.steps]
    return ToTensor() in steps and ToFloat() not in steps


def _name(call: Any) -> str:
    return str(getattr(call, "__qualname__", type(call).__qualname__))


# -- torchvision's transforms -----------------------------------------------------------------------------------------


def list_calls(transform: Any) -> Iterator[Any]:
    """Yield the transforms of nested Compose and Sequential objects, in order."""
    if transform is None:
        return
    if (_find_kind(transform) == "Compose" and isinstance(transform.transforms, Iterable)) or (
        type(transform) is torch.nn.Sequential
    ):
        for inner in transform if isinstance(transform, torch.nn.Sequential) else transform.transforms:
            yield from list_calls(inner)
    else:
        yield transform


def _find_kind(transform: Any) -> str | None:
    """Return the name of torchvision's own class; None for any other class, also for subclasses."""
    kind = type(transform)
    return kind.__name__ if kind.__module__.startswith("torchvision.transforms.") else None


def read_steps(transform: Any) -> tuple[ImageStep, ...] | None:
    """Return the steps of a torchvision transform; None if it is another transform, or no record describes it."""
    read = _READERS.get(_find_kind(transform) or "")
    try:
        return None if read is None else read(transform)
    except (AttributeError, KeyError, TypeError, ValueError):  # settings without a record, or another torchvision
        return None


def _read_resize(it: Any) -> tuple[ImageStep, ...]:
    size = it.size if isinstance(it.size, int) else tuple(it.size)
    size = size[0] if isinstance(size, tuple) and len(size) == 1 else size
    return (Resize(size=size, interpolation=_read_interpolation(it), max_size=it.max_size),)


def _read_interpolation(it: Any) -> Interpolation:
    value: Interpolation = getattr(it.interpolation, "value", it.interpolation)  # torchvision 0.29 keeps the name
    return {"linear": "bilinear"}.get(value, value)  # type: ignore[return-value]


def _read_size(size: Any) -> Size:
    height, width = size
    return int(height), int(width)


def _read_resized_crop(it: Any) -> tuple[ImageStep, ...]:
    scale, ratio = tuple(it.scale), tuple(it.ratio)
    size, interpolation = _read_size(it.size), _read_interpolation(it)
    return (RandomResizedCrop(size=size, scale=scale, ratio=ratio, interpolation=interpolation),)


def _read_random_crop(it: Any) -> tuple[ImageStep, ...]:
    if it.pad_if_needed or it.padding_mode != "constant" or not isinstance(it.fill, int):
        raise ValueError("no record")
    padding = it.padding or 0
    sides = [padding] if isinstance(padding, int) else list(padding)
    left, top, right, bottom = {1: sides * 4, 2: sides * 2, 4: sides}[len(sides)]
    if ".v2." in type(it).__module__:  # stores them as left, right, top, bottom
        top, right = right, top
    return (RandomCrop(size=_read_size(it.size), padding=(left, top, right, bottom), fill=it.fill),)


def _read_jitter(it: Any) -> tuple[ImageStep, ...]:
    names = ("brightness", "contrast", "saturation", "hue")
    ranges = {name: None if getattr(it, name) is None else tuple(getattr(it, name)) for name in names}
    return (ColorJitter(**ranges),)


def _read_dtype(it: Any) -> tuple[ImageStep, ...]:
    if it.dtype is torch.uint8:  # leaves a uint8 tensor as it is
        return (ToTensor(),)
    if it.dtype is not torch.float32 or not getattr(it, "scale", True):
        raise ValueError("no record")
    return (ToFloat(),)


def _read_normalize(it: Any) -> tuple[ImageStep, ...]:
    return (Normalize(mean=tuple(map(float, it.mean)), std=tuple(map(float, it.std))),)


_READERS: dict[str, Callable[[Any], tuple[ImageStep, ...]]] = {
    "Resize": _read_resize,
    "CenterCrop": lambda it: (CenterCrop(size=_read_size(it.size)),),
    "RandomResizedCrop": _read_resized_crop,
    "RandomCrop": _read_random_crop,
    "RandomHorizontalFlip": lambda it: (RandomHorizontalFlip(p=float(it.p)),),
    "ColorJitter": _read_jitter,
    "ToTensor": lambda _: (ToTensor(), ToFloat()),
    "PILToTensor": lambda _: (ToTensor(),),
    "ToImage": lambda _: (ToTensor(),),
    "ToDtype": _read_dtype,
    "ConvertImageDtype": _read_dtype,
    "Normalize": _read_normalize,
}
