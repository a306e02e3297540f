"""Compares DALI's pictures with torchvision's, on real samples made by both with the same random draws."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastloop.errors import NotApplicable, let_through
from fastloop.feeds.dali.graph import DaliResources, Pins, encode, find_scale, list_pins, make_pipeline, name_pin
from fastloop.feeds.dali.pictures import name_cure
from fastloop.feeds.images.own_samples import explain, is_same, untouched_generators
from fastloop.feeds.images.reading import ImageSource, read_source
from fastloop.records.images import (
    CenterCrop,
    ColorJitter,
    ImageStep,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Size,
)

SAMPLES = 16
MEAN_LEVELS: dict[str, float] = {"cpu": 1.0, "mixed": 2.0}
"""Bound for the mean deviation of a value (0 to 255), by decoder. The CPU's is 0.25 or less over all known steps
(ImageNet photographs); a resize without antialiasing has 1.5. The GPU's decoder rounds differently."""
BIAS_LEVELS, GAIN = 1.0, 0.02
"""Bounds for a whole color channel: its mean, and the relative change of its contrast. The CPU's are 0.06 levels and
0.0004; swapped colors, or a wrong mean or deviation, exceed the bounds many times over."""
_MAY_BE_DEEP = (".png", ".tif", ".tiff", ".pgm")
"""Files that may hold 16-bit gray: PIL clips values at 255, DALI scales them. The dataset makes their batches."""
_TRIES = 400
"""Seeds to try until one draws ColorJitter's parts in DALI's order; one in 24 does."""


@dataclass(frozen=True, kw_only=True)
class PixelDeviation:
    """Difference between the same samples made in two ways, in levels of 0 to 255."""

    samples: int
    mean: float
    largest: float
    bias: tuple[float, ...]
    """Mean difference of each color channel."""
    gain: tuple[float, ...]

    def find_fault(self, mean_levels: float) -> str | None:
        """Return why this is more than rounding; None if it is only rounding."""
        names = ("red", "green", "blue")
        for name, bias, gain in zip(names, self.bias, self.gain, strict=True):
            if abs(bias) > BIAS_LEVELS or abs(gain - 1) > GAIN:
                return f"{name} is off by {bias:+.1f} levels and {100 * (gain - 1):+.1f} % of its contrast"
        if self.mean > mean_levels:
            return f"values deviate by {self.mean:.1f} of 255 levels on average, more than {mean_levels:g}"
        return None


def try_pixels(loader: Any, steps: Sequence[ImageStep], machine: DaliResources) -> PixelDeviation:
    """Start DALI, and compare its pictures with the dataset's own samples.

    Raises:
        NotApplicable: they differ, or DALI cannot be started here.
    """
    try:
        importlib.import_module("nvidia.dali.fn")
        make_pipeline(steps, machine, batch_size=1, seed=0)
    except Exception as error:
        let_through(error)
        raise NotApplicable(
            f"DALI does not start here ({describe_error(error)}); {name_cure(torch.version.cuda)}"
        ) from error
    return check_pixels(loader.dataset, read_source(loader.dataset), steps, machine)


def check_pixels(
    dataset: Any, source: ImageSource, steps: Sequence[ImageStep], machine: DaliResources
) -> PixelDeviation:
    """Compare up to 16 real samples with the random draws pinned. Restores the random generators.

    Raises:
        NotApplicable: they differ by more than rounding, or DALI cannot read one of them.
    """
    wanted, pins, paths, deep = [], [], [], 0
    with untouched_generators():
        for index in range(0, source.count, -(-source.count // SAMPLES)):
            path, label = source.locate(index)
            if is_deep(path):
                deep += 1
                continue
            try:
                sample, labels, drawn = _make_both(dataset, index, path, steps)
            except Exception as error:  # the dataset cannot read it; the training will report it when it gets there
                let_through(error)
                continue
            if not is_same(labels, [default_collate([label])]):
                raise NotApplicable(explain(dataset, "label", index))
            wanted.append(sample)
            pins.append(drawn)
            paths.append(path)
    if not wanted:
        why = "is an image of 8 bits: DALI would read others differently" if deep else "can be read"
        raise NotApplicable(f"none of the samples that were tried {why}")
    try:
        made = run_pinned(paths, pins, steps, machine)
    except Exception as error:
        let_through(error)
        raise NotApplicable(f"DALI cannot read all of {paths[0]} and others: {_shorten(error)}") from error
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in find_scale(steps))
    found = compare(torch.stack(wanted).float() * std + mean, made.float() * std + mean)
    if (fault := found.find_fault(MEAN_LEVELS[machine.decode])) is not None:
        raise NotApplicable(
            f"DALI's images differ from those of the transforms: {fault} ({len(wanted)} samples compared)"
        )
    return found


def is_deep(path: str) -> bool:
    """Whether PIL reads more than 8 bits of gray from a file."""
    from PIL import Image

    if not path.lower().endswith(_MAY_BE_DEEP):
        return False
    try:
        with Image.open(path) as picture:
            return picture.mode.startswith(("I", "F"))
    except (OSError, ValueError):  # DALI or the dataset will report it
        return False


def compare(wanted: torch.Tensor, made: torch.Tensor) -> PixelDeviation:
    """Compare two stacks of pictures [N, 3, H, W] in levels.

    Raises:
        NotApplicable: their shapes differ.
    """
    if wanted.shape != made.shape:
        raise NotApplicable(f"DALI's images have the shape {list(made.shape)}, but the samples {list(wanted.shape)}")
    apart = made - wanted
    first, second = (values.transpose(0, 1).flatten(1).double() for values in (wanted, made))
    center = first - first.mean(dim=1, keepdim=True)
    spread = (center * center).sum(dim=1).clamp(min=1e-9)
    gain = (center * second).sum(dim=1) / spread
    return PixelDeviation(
        samples=len(wanted),
        mean=float(apart.abs().mean()),
        largest=float(apart.abs().max()),
        bias=tuple((second - first).mean(dim=1).tolist()),
        gain=tuple(torch.where(spread > 1, gain, torch.ones_like(gain)).tolist()),
    )


def run_pinned(
    paths: Sequence[str], pins: Sequence[Pins], steps: Sequence[ImageStep], machine: DaliResources
) -> torch.Tensor:
    """Return DALI's pictures [N, 3, H, W] on the CPU, with the random draws of each from `pins`."""
    machine = replace(machine, ahead=1)
    pipeline = make_pipeline(steps, machine, batch_size=len(paths), seed=0, pinned=True)
    pipeline.feed_input("paths", [encode(path) for path in paths])
    for place, what in list_pins(steps):
        pipeline.feed_input(name_pin(place, what), [drawn[place][what] for drawn in pins])
    pipeline.schedule_run()
    (found,) = pipeline.outputs()
    pictures = torch.utils.dlpack.from_dlpack(found.as_tensor()).cpu()
    return pictures.clone() if machine.layout == "CHW" else pictures.permute(0, 3, 1, 2).contiguous()


def describe_error(error: Exception) -> str:
    """Describe an error that DALI raised in one line, with its type."""
    return f"{type(error).__name__}: {_shorten(error)}"


def _shorten(error: Exception) -> str:
    """Shorten a DALI error to its message, without the pipeline's description."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    after = next((place + 1 for place, line in enumerate(lines) if line.startswith("encountered")), 0)
    return " ".join(lines[after : after + 1])[:200]


# -- torchvision's random draws ---------------------------------------------------------------------------------------


def _make_both(dataset: Any, index: int, path: str, steps: Sequence[ImageStep]) -> tuple[torch.Tensor, list[Any], Pins]:
    """Return a sample's picture [3, H, W] and what follows it, from the dataset, and the draws of its random steps."""
    from PIL import Image

    with Image.open(path) as image:
        width, height = image.size
    generator = torch.default_generator  # the CPU's; `torch.manual_seed` would also set CUDA's, permanently
    for seed in range(_TRIES):
        generator.manual_seed(seed)
        drawn = draw(steps, (height, width))
        if drawn is not None:
            generator.manual_seed(seed)
            picture, *labels = dataset[index]
            return torch.as_tensor(picture), [default_collate([each]) for each in labels], drawn
    raise NotApplicable("ColorJitter's parts never came in DALI's order")


def draw(steps: Sequence[ImageStep], size: Size) -> Pins | None:
    """Draw like torchvision's transforms, from torch's generator, for a picture of this size, step by step. Return None
    if the drawn order of ColorJitter's parts is not DALI's.

    Source: torchvision/transforms/transforms.py; the v2 transforms draw the same numbers.
    """
    from torchvision import transforms

    drawn: list[dict[str, Any]] = []
    for step in steps:
        image = torch.empty((3, *size), device="meta")
        if isinstance(step, Resize):
            short = min(size)
            at = step.size
            size = at if isinstance(at, tuple) else (int(at * size[0] / short), int(at * size[1] / short))
        elif isinstance(step, CenterCrop):
            size = step.size
        elif isinstance(step, RandomResizedCrop):
            top, left, high, wide = transforms.RandomResizedCrop.get_params(image, list(step.scale), list(step.ratio))
            drawn.append({"start": _draw_ints(top, left), "shape": _draw_ints(high, wide)})
            size = step.size
        elif isinstance(step, RandomCrop):
            left, top, right, bottom = step.padding
            padded = torch.empty((3, size[0] + top + bottom, size[1] + left + right), device="meta")
            top, left, _, _ = transforms.RandomCrop.get_params(padded, step.size)
            drawn.append({"start": _draw_ints(top, left)})
            size = step.size
        elif isinstance(step, RandomHorizontalFlip):
            drawn.append({"flip": np.int32(torch.rand(1).item() < step.p)})
        elif isinstance(step, ColorJitter):
            order, *factors = transforms.ColorJitter.get_params(
                step.brightness, step.contrast, step.saturation, step.hue
            )
            used = [place for place in order.tolist() if factors[place] is not None]
            if used != sorted(used):
                return None
            names = ("brightness", "contrast", "saturation", "hue")
            drawn.append({name: np.float32(factor or 0.0) for name, factor in zip(names, factors, strict=True)})
    return drawn


def _draw_ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)
