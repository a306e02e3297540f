"""What the transforms of an image dataset do, step by step, in words that other engines than torchvision understand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True, kw_only=True)
class Resize:
    """To `size`; an int is the shorter side's, and the other follows."""

    size: Size | int
    interpolation: Interpolation = "bilinear"
    max_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class CenterCrop:
    """The middle `size`, padded with zeros where the image is smaller."""

    size: Size


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop:
    """A random part of the image, resized to `size`."""

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    """Of the image's area, drawn uniformly."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height, its logarithm drawn uniformly."""
    interpolation: Interpolation = "bilinear"


@dataclass(frozen=True, kw_only=True)
class RandomCrop:
    """A random `size` out of the padded image."""

    size: Size
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Left, top, right, bottom; constant."""
    fill: int = 0


@dataclass(frozen=True, kw_only=True)
class RandomHorizontalFlip:
    p: float = 0.5


@dataclass(frozen=True, kw_only=True)
class ColorJitter:
    """Ranges of factors, drawn uniformly and applied in a random order; None: not touched."""

    brightness: tuple[float, float] | None = None
    contrast: tuple[float, float] | None = None
    saturation: tuple[float, float] | None = None
    hue: tuple[float, float] | None = None
    """In turns of the color circle, -0.5 to 0.5."""


@dataclass(frozen=True, kw_only=True)
class ToTensor:
    """A PIL image to a uint8 tensor [3, height, width]."""


@dataclass(frozen=True, kw_only=True)
class ToFloat:
    """uint8 of 0 to 255 to float32 of 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Less `mean`, over `std`, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


ImageStep = (
    Resize
    | CenterCrop
    | RandomResizedCrop
    | RandomCrop
    | RandomHorizontalFlip
    | ColorJitter
    | ToTensor
    | ToFloat
    | Normalize
)
RANDOM = (RandomResizedCrop, RandomCrop, RandomHorizontalFlip, ColorJitter)
"""Steps that draw random numbers."""


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """A dataset of image files with labels: what happens to each file before it is a sample."""

    steps: tuple[ImageStep, ...] = ()
    """From the decoded RGB image on, in their order."""
    unknown: str | None = None
    """The first step that is none of these, by its name; `steps` then ends before it."""
    count: int = 0

    @property
    def prefix(self) -> tuple[ImageStep, ...]:
        """The leading steps that draw nothing and keep an image an image."""
        kept: list[ImageStep] = []
        for step in self.steps:
            if not isinstance(step, (Resize, CenterCrop)):
                break
            kept.append(step)
        return tuple(kept)

    def explain_no_bytes(self) -> str | None:
        """Why the images cannot be left as bytes until the device makes floats of them; None where they can."""
        if self.unknown is not None:
            return f"{self.unknown} is not known, and may need floats"
        floats = next((place for place, step in enumerate(self.steps) if isinstance(step, ToFloat)), None)
        if floats is None:
            return "no transform makes floats of them"
        late = next((step for step in self.steps[floats:] if not isinstance(step, (ToFloat, Normalize))), None)
        return None if late is None else f"{type(late).__name__} comes after they are floats"
