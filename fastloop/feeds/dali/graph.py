"""Builds a DALI pipeline from the steps of torchvision's transforms: paths in, batches of pictures out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastloop.feeds.dali.pictures import AHEAD
from fastloop.records.images import (
    RANDOM,
    CenterCrop,
    ColorJitter,
    ImageStep,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToFloat,
)

Pins = Sequence[Mapping[str, Any]]
"""Draws of one picture's random steps, in order, by the names in `_DRAWN`."""
_DRAWN: dict[type, dict[str, tuple[str, int]]] = {
    RandomResizedCrop: {"start": ("INT32", 1), "shape": ("INT32", 1)},
    RandomCrop: {"start": ("INT32", 1)},
    RandomHorizontalFlip: {"flip": ("INT32", 0)},
    ColorJitter: dict.fromkeys(("brightness", "contrast", "saturation", "hue"), ("FLOAT", 0)),
}
"""Quantities that a random step draws, each with its type and number of dimensions."""
_GEOMETRY = (Resize, CenterCrop, RandomResizedCrop, RandomCrop)
_INTERPOLATIONS = {
    "nearest": "INTERP_NN",
    "bilinear": "INTERP_LINEAR",
    "bicubic": "INTERP_CUBIC",
    "lanczos": "INTERP_LANCZOS3",
}
HARDWARE_SHARE = 0.65
"""Share of JPEGs for the GPU's hardware decoder: 24,278 images/s on an H200; 12,663 with none, 21,808 with all."""
HOST_SHARE, MANY_THREADS = 0.5, 8
"""With at least this many threads, they decode this share of each batch, and the GPU's hardware decoder the rest."""


def load_dali() -> tuple[Any, Any, Any]:
    """Return ``nvidia.dali``, its operators and its types; untyped, so that type checks do not need it installed."""
    return tuple(importlib.import_module(name) for name in ("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.types"))  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class DaliResources:
    """Resources that a pipeline uses."""

    threads: int
    device_id: int | None = None
    """GPU that the pictures end up on; None if they stay in host memory."""
    decode: str = "cpu"
    """``cpu``, or ``mixed``: the GPU decodes, and the threads too if there are many."""
    resize: str = "cpu"
    """``cpu`` or ``device``: where CPU-decoded pictures are resized."""
    ahead: int = AHEAD
    host_share: float | None = None
    """Share of a batch that the threads decode by themselves, if the GPU decodes too; None: by their number."""

    def count_on_host(self, batch_size: int) -> int:
        """How many pictures of a batch the threads decode by themselves while the GPU decodes the others."""
        share = self.host_share
        if share is None:
            share = HOST_SHARE if self.decode == "mixed" and self.threads >= MANY_THREADS else 0.0
        return round(share * batch_size)

    @property
    def layout(self) -> str:
        """Layout of the output pictures. Changing it takes microseconds on a GPU, but longer on a CPU."""
        return "CHW" if self.device_id is None else "HWC"


def make_pipeline(
    steps: Sequence[ImageStep],
    machine: DaliResources,
    *,
    batch_size: int,
    seed: int,
    source: Callable[[], list[Any]] | None = None,
    pinned: bool = False,
) -> Any:
    """Build a pipeline with one output: pictures in the dtype that the steps end with, [N, 3, H, W] or, on a GPU,
    [N, H, W, 3].

    Args:
        source: returns the encoded paths of the next batch, raises StopIteration at the end; None if the caller feeds
            them.
        pinned: the caller also feeds the draws of the random steps, under the names from `name_pin`.

    Raises:
        RuntimeError: DALI cannot be started on this machine.
    """
    dali, _, _ = load_dali()
    pipeline = dali.Pipeline(
        batch_size=batch_size,
        num_threads=machine.threads,
        device_id=machine.device_id,
        seed=seed,
        prefetch_queue_depth=machine.ahead,
    )
    with pipeline:
        pipeline.set_outputs(_Graph(steps, machine, source, pinned, machine.count_on_host(batch_size)).output)
    pipeline.build()
    return pipeline


def encode(path: str) -> Any:
    """Encode a path for DALI's file reader."""
    return np.frombuffer(path.encode(), dtype=np.uint8)


def name_pin(place: int, what: str) -> str:
    """Return the name of the input for a quantity that the random step at `place` draws."""
    return f"step{place}_{what}"


def list_pins(steps: Sequence[ImageStep]) -> list[tuple[int, str]]:
    """List all drawn quantities: place among the random steps, and name."""
    drawing = [step for step in steps if isinstance(step, RANDOM)]
    return [(place, what) for place, step in enumerate(drawing) for what in _list_drawn(step)]


def _list_drawn(step: ImageStep) -> dict[str, tuple[str, int]]:
    """List what a step draws, without the parts of a ColorJitter that are off."""
    return {name: kind for name, kind in _DRAWN[type(step)].items() if getattr(step, name, kind) is not None}


class _Graph:
    """Builds the operators inside a pipeline's ``with``."""

    def __init__(
        self,
        steps: Sequence[ImageStep],
        machine: DaliResources,
        source: Callable[[], list[Any]] | None,
        pinned: bool,
        on_host: int,
    ) -> None:
        _, self.fn, self.types = load_dali()
        self._math: Any = importlib.import_module("nvidia.dali.math")
        self.machine, self.pinned, self.places, self.on_host = machine, pinned, iter(range(len(steps))), on_host
        given = {} if source is None else {"source": source}
        paths = self.fn.external_source(name="paths", ndim=1, dtype=self.types.UINT8, **given)
        todo = list(steps)
        self.mirror: Any = 0
        self.image = self._decode(self.fn.io.file.read(paths), todo)
        if machine.decode == "cpu" and machine.resize == "device":
            self._move()
        if self.place is not None:
            self._fit(*self.place)
        while todo:
            self._add(todo.pop(0), todo)
        self.output = self._finish(steps)

    def _move(self) -> None:
        if self.machine.device_id is not None and self.image.device == "cpu":
            self.image = self.image.gpu()

    # -- decoding -------------------------------------------------------------------------------------------------

    def _decode(self, data: Any, todo: list[ImageStep]) -> Any:
        """Decode; if the first step is a RandomResizedCrop, decode only that part of the picture."""
        self.place: tuple[Any, str] | None = None
        first, pins = todo[0] if todo else None, {}
        if isinstance(first, RandomResizedCrop):
            todo.pop(0)
            self.place = first.size, first.interpolation
            pins = self._take_pins(first) if self.pinned else {}
        inputs, device = {"data": data, **pins}, self.machine.decode
        if not self.on_host:
            return self._decode_on(device, first, HARDWARE_SHARE, **inputs)
        # DALI turns an `if` into these calls, but only in functions whose source it can read.
        parts, mine = self.fn._conditional, self.fn.batch_permutation() < self.on_host
        split = {name: parts.split(each, predicate=mine, _if_stmt=True) for name, each in inputs.items()}
        ours = self._decode_on("cpu", first, **{name: part for name, (part, _) in split.items()})
        theirs = self._decode_on(device, first, 1.0, **{name: part for name, (_, part) in split.items()})
        return parts.merge(ours.gpu() if theirs.device == "gpu" else ours, theirs, predicate=mine)

    def _decode_on(self, device: str, first: ImageStep | None, hardware: float = 0.0, *, data: Any, **pins: Any) -> Any:
        types, decoders = self.types, self.fn.decoders
        # PIL does not rotate pictures by their EXIF orientation either.
        settings: dict[str, Any] = {"output_type": types.RGB, "adjust_orientation": False, "device": device}
        if device == "mixed":
            settings["hw_decoder_load"] = hardware
        if not isinstance(first, RandomResizedCrop):
            return decoders.image(data, **settings)
        if pins:
            return decoders.image_slice(data, **pins, axis_names="HW", **settings)
        ranges = {"random_area": list(first.scale), "random_aspect_ratio": list(first.ratio)}
        return decoders.image_random_crop(data, num_attempts=10, **ranges, **settings)

    # -- the steps ------------------------------------------------------------------------------------------------

    def _add(self, step: ImageStep, later: list[ImageStep]) -> None:
        if isinstance(step, Resize):
            self._resize(step)
        elif isinstance(step, CenterCrop):
            height, width = self._size()
            self._slice(
                [self._find_middle(height, step.size[0]), self._find_middle(width, step.size[1])], step.size, pads=True
            )
        elif isinstance(step, RandomResizedCrop):
            self._crop_and_resize(step)
        elif isinstance(step, RandomCrop):
            self._crop(step)
        elif isinstance(step, RandomHorizontalFlip):
            flip = self._take_pins(step)["flip"] if self.pinned else self.fn.random.coin_flip(probability=step.p)
            if isinstance(self.mirror, int) and not any(isinstance(other, _GEOMETRY) for other in later):
                self.mirror = flip  # the last operator does it
            else:
                self.image = self.fn.flip(self.image, horizontal=flip)
        elif isinstance(step, ColorJitter):
            self._add_jitter(step)

    def _take_pins(self, step: ImageStep) -> dict[str, Any]:
        place = next(self.places)
        return {
            what: self.fn.external_source(name=name_pin(place, what), ndim=ndim, dtype=getattr(self.types, kind))
            for what, (kind, ndim) in _list_drawn(step).items()
        }

    def _fit(self, size: Any, interpolation: str) -> None:
        kind = getattr(self.types, _INTERPOLATIONS[interpolation])
        self.image = self.fn.resize(self.image, size=size, interp_type=kind, antialias=interpolation != "nearest")

    def _size(self) -> tuple[Any, Any]:
        shape = self.image.shape(dtype=self.types.INT32)
        return shape[0], shape[1]

    def _resize(self, step: Resize) -> None:
        if not isinstance(step.size, int):
            self._fit(step.size, step.interpolation)
            return
        # Round like torchvision: DALI's rule sometimes gives one pixel more.
        height, width = self._size()
        short = self._math.min(height, width)
        size = self.fn.stack(step.size * height // short, step.size * width // short)
        self._fit(self.fn.cast(size, dtype=self.types.FLOAT), step.interpolation)

    def _find_middle(self, whole: Any, part: int) -> Any:
        """Return the start of a centered part: Python's ``round((whole - part) / 2)``, or half of the padding, as in
        torchvision, if the whole is smaller."""
        more, less = self._math.max(whole - part, 0), self._math.max(part - whole, 0)
        half = more // 2
        rounded = half + (more - 2 * half) * (half - 2 * (half // 2))
        return rounded - less // 2

    def _slice(self, start: Any, size: tuple[int, int], *, pads: bool = False) -> None:
        at = self.fn.stack(*start) if isinstance(start, list) else start
        policy = "pad" if pads else "error"
        self.image = self.fn.slice(self.image, start=at, shape=list(size), axes=[0, 1], out_of_bounds_policy=policy)

    def _crop_and_resize(self, step: RandomResizedCrop) -> None:
        kind = getattr(self.types, _INTERPOLATIONS[step.interpolation])
        if self.pinned:
            pins = self._take_pins(step)
            self.image = self.fn.slice(self.image, start=pins["start"], shape=pins["shape"], axes=[0, 1])
            self._fit(step.size, step.interpolation)
            return
        self.image = self.fn.random_resized_crop(
            self.image,
            size=step.size,
            random_area=list(step.scale),
            random_aspect_ratio=list(step.ratio),
            interp_type=kind,
            antialias=step.interpolation != "nearest",
        )

    def _crop(self, step: RandomCrop) -> None:
        left, top, right, bottom = step.padding
        height, width = self._size()
        if any(step.padding):
            shape = self.fn.stack(height + (top + bottom), width + (left + right))
            settings = {"out_of_bounds_policy": "pad", "fill_values": float(step.fill), "axes": [0, 1]}
            self.image = self.fn.slice(self.image, start=[-top, -left], shape=shape, **settings)
            height, width = height + (top + bottom), width + (left + right)
        if self.pinned:
            self._slice(self._take_pins(step)["start"], step.size)
            return
        starts = [self._draw_start(height - step.size[0]), self._draw_start(width - step.size[1])]
        self._slice(starts, step.size)

    def _draw_start(self, last: Any) -> Any:
        """Draw an integer uniformly from 0 to `last`."""
        drawn = self._math.floor(self.fn.random.uniform(range=[0.0, 1.0]) * (last + 1))
        return self.fn.cast(drawn, dtype=self.types.INT32)

    def _add_jitter(self, step: ColorJitter) -> None:
        """Apply each factor like torchvision, but always in this order; torchvision draws a random order."""
        pins = self._take_pins(step) if self.pinned else {}
        for what in _list_drawn(step):
            factor = pins[what] if self.pinned else self.fn.random.uniform(range=list(getattr(step, what)))
            image = self.image
            factor = factor.gpu() if image.device == "gpu" else factor
            if what == "hue":
                changed = self._turn_hue(image, factor)
            elif what == "brightness":
                changed = image * factor
            else:
                gray = self.fn.color_space_conversion(image, image_type=self.types.RGB, output_type=self.types.GRAY)
                other = self.fn.reductions.mean(gray) if what == "contrast" else gray
                changed = image * factor + other * (1.0 - factor)
            whole = self._math.floor(changed)  # PIL and torchvision drop the fractional part
            self.image = self.fn.reinterpret(self.fn.cast(whole, dtype=self.types.UINT8), layout="HWC")

    def _turn_hue(self, image: Any, turns: Any) -> Any:
        """Convert to PIL's HSV, which has bytes, and back; DALI's own hue operator rotates in YIQ.

        Source: Pillow, src/libImaging/Convert.c, rgb2hsv_row and hsv2rgb_row.
        """
        math = self._math
        red, green, blue = (self.fn.cast(image[:, :, at : at + 1], dtype=self.types.FLOAT) for at in range(3))
        value = math.max(red, math.max(green, blue))
        chroma = value - math.min(red, math.min(green, blue))
        safe = chroma + (chroma == 0)
        is_red = value == red
        is_green = (value == green) * (1 - is_red)
        sixths = (
            is_red * (green - blue)
            + is_green * (blue - red + 2.0 * safe)
            + (1 - is_red) * (1 - is_green) * (red - green + 4.0 * safe)
        ) / safe
        around = sixths / 6.0 + 1.0
        hue = math.floor((around - math.floor(around)) * 255.0) * (chroma > 0)
        saturation = math.floor(chroma * 255.0 / (value + (value == 0))) / 255.0
        steps = turns * 255.0
        turned = hue + math.floor(math.abs(steps)) * ((steps >= 0) * 2.0 - 1.0)
        place = (turned - 256.0 * math.floor(turned / 256.0)) * 6.0 / 255.0
        channels = []
        for first in (5.0, 3.0, 1.0):
            at = place + first
            at = at - 6.0 * math.floor(at / 6.0)
            share = math.max(math.min(math.min(at, 4.0 - at), 1.0), 0.0)
            channels.append(math.floor(value * (1.0 - saturation * share) + 0.5))
        return self.fn.cat(*channels, axis=2)

    # -- the end --------------------------------------------------------------------------------------------------

    def _finish(self, steps: Sequence[ImageStep]) -> Any:
        """Flip, scale and normalize in one operator that reads bytes."""
        self._move()
        if not any(isinstance(step, ToFloat) for step in steps):
            image = self.image if isinstance(self.mirror, int) else self.fn.flip(self.image, horizontal=self.mirror)
            return image if self.machine.layout == "HWC" else self.fn.transpose(image, perm=[2, 0, 1])
        mean, std = find_scale(steps)
        return self.fn.crop_mirror_normalize(
            self.image,
            mirror=self.mirror,
            mean=list(mean),
            std=list(std),
            dtype=self.types.FLOAT,
            output_layout=self.machine.layout,
        )


def find_scale(steps: Sequence[ImageStep]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation per channel, in levels of 0 to 255; the output is ``(level - mean) / deviation``."""
    if not any(isinstance(step, ToFloat) for step in steps):
        return (0.0,) * 3, (1.0,) * 3
    mean, std = [0.0] * 3, [255.0] * 3
    for step in steps:
        if isinstance(step, Normalize):
            more_mean, more_std = (_to_three(values) for values in (step.mean, step.std))
            mean = [old + own * new for old, own, new in zip(mean, std, more_mean, strict=True)]
            std = [own * new for own, new in zip(std, more_std, strict=True)]
    return tuple(mean), tuple(std)


def _to_three(values: Sequence[float]) -> list[float]:
    return list(values) * 3 if len(values) == 1 else list(values)
