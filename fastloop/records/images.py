"""The transforms of an image dataset, step by step, in terms that engines other than torchvision understand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Resize to `size`; an int is the shorter side, and the other side keeps the aspect ratio."""

    size: Size | int
    interpolation: Interpolation = "bilinear"
    max_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class CenterCrop:
    """Crop the central `size`; a smaller image is padded with zeros."""

    size: Size


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop:
    """A random part of the image, resized to `size`."""

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the image's area, drawn uniformly."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height; its logarithm is drawn uniformly."""
    interpolation: Interpolation = "bilinear"


@dataclass(frozen=True, kw_only=True)
class RandomCrop:
    """Crop a random `size` from the padded image."""

    size: Size
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Left, top, right, bottom; filled with a constant."""
    fill: int = 0


@dataclass(frozen=True, kw_only=True)
class RandomHorizontalFlip:
    p: float = 0.5


@dataclass(frozen=True, kw_only=True)
class ColorJitter:
    """Ranges of factors, drawn uniformly and applied in a random order; None: unchanged."""

    brightness: tuple[float, float] | None = None
    contrast: tuple[float, float] | None = None
    saturation: tuple[float, float] | None = None
    hue: tuple[float, float] | None = None
    """In turns of the color circle, -0.5 to 0.5."""


@dataclass(frozen=True, kw_only=True)
class ToTensor:
    """Convert a PIL image to a uint8 tensor [3, height, width]; leaves a uint8 tensor as it is."""


@dataclass(frozen=True, kw_only=True)
class ToFloat:
    """Convert uint8 in 0 to 255 to float32 in 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Subtract `mean` and divide by `std`, per channel."""

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
    """A dataset of labeled image files: the processing that turns each file into a sample."""

    steps: tuple[ImageStep, ...] = ()
    """In order, starting from the decoded RGB image."""
    unknown: str | None = None
    """Name of the first step that is not an `ImageStep`; `steps` then ends before it."""
    count: int = 0

    @property
    def prefix(self) -> tuple[ImageStep, ...]:
        """The leading steps that draw no random numbers and whose result is still an image."""
        kept: list[ImageStep] = []
        for step in self.steps:
            if not isinstance(step, (Resize, CenterCrop)):
                break
            kept.append(step)
        return tuple(kept)

    def explain_no_bytes(self) -> str | None:
        """Why the images cannot stay uint8 until the device converts them to floats; None if they can."""
        if self.unknown is not None:
            return f"fastloop does not know {self.unknown}, which may need floats"
        floats = next((place for place, step in enumerate(self.steps) if isinstance(step, ToFloat)), None)
        if floats is None:
            return "no transform converts them to floats"
        late = next((step for step in self.steps[floats:] if not isinstance(step, (ToFloat, Normalize))), None)
        return None if late is None else f"{type(late).__name__} comes after the conversion to floats"
