"""Decides which image datasets DALI can load, and names the obstacle otherwise. Only looks at records."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Literal

from fastloop.records.images import (
    CenterCrop,
    ImageFacts,
    ImageStep,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Size,
    ToFloat,
    ToTensor,
)

AHEAD = 3
"""Batches made ahead: two in progress, and one ready in reserve for when larger files take longer."""
Where = Literal["cpu", "mixed"]
"""Where decoding runs: on the CPU, or on the GPU with the CPU's help."""
QUEUES, MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32
"""The variable that sets how many hardware queues a process has on each GPU, 8 by default, and its highest value. The
GPU's decoder uses 14 streams: in 8 queues, some of them are behind all kernels that the training has launched. On an
H200 with 16 CPUs, a step of ResNet-50 took 38.7 ms with 32 queues, 43.9 with 8 and 37.5 with a resident batch."""
WITH_DECODERS = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities of GPUs with JPEG decoders of their own: A100, H100 and H200 (measured), B200."""
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
_AFTER_NORMALIZE = (RandomHorizontalFlip, Normalize)
"""Steps that have the same effect before and after Normalize, or are merged with it."""


def is_installed() -> bool:
    """Whether DALI can be imported; it may still be built for another CUDA version."""
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def decodes_beside(capability: tuple[int, int], variables: Mapping[str, str]) -> bool:
    """Whether a GPU can decode JPEGs beside the training, by its compute capability and this process's variables."""
    return capability in WITH_DECODERS and variables.get(QUEUES) == str(MOST_QUEUES)


def name_cure(cuda_version: str | None) -> str:
    """Return the command that installs the DALI build for torch's CUDA version."""
    return f'pip install "lightning-fastloop[dali-cuda{(cuda_version or "13").split(".")[0]}]"'


def find_obstacle(images: ImageFacts | str) -> str | None:
    """Return why DALI cannot make these samples, naming the obstacle; None if it can."""
    if isinstance(images, str):
        return f"DALI loads datasets of image files only: {images}"
    if images.unknown is not None:
        return f"DALI has no counterpart for the transform {images.unknown}"
    if not images.count:
        return "the dataset is empty"
    if not any(isinstance(step, ToTensor) for step in images.steps):
        return "the transforms do not end with a tensor (ToTensor, or ToImage and ToDtype)"
    normalized = False
    for step in images.steps:
        if normalized and not isinstance(step, _AFTER_NORMALIZE):
            return f"{type(step).__name__} comes after Normalize; DALI works on bytes until then"
        if (why := _explain_step(step)) is not None:
            return why
        normalized = normalized or isinstance(step, Normalize)
    if normalized and not any(isinstance(step, ToFloat) for step in images.steps):
        return "Normalize is applied to bytes"
    if find_size(images.steps) is None:
        return "no transform brings the images to one size (a crop would, or Resize with height and width)"
    return None


def _explain_step(step: ImageStep) -> str | None:
    name, kind = type(step).__name__, getattr(step, "interpolation", "bilinear")
    if kind not in _INTERPOLATIONS:
        return f"{name} with interpolation={kind}: DALI has no such filter"
    if isinstance(step, Resize) and step.max_size is not None:
        return f"{name} with max_size={step.max_size}"
    return None


def find_size(steps: tuple[ImageStep, ...]) -> Size | None:
    """Return the final height and width of all pictures; None if they differ."""
    size: Size | None = None
    for step in steps:
        if not isinstance(step, (Resize, CenterCrop, RandomResizedCrop, RandomCrop)):
            continue
        if not isinstance(step.size, int):
            size = step.size
        elif size is not None:
            size = (int(step.size * size[0] / min(size)), int(step.size * size[1] / min(size)))
    return size
