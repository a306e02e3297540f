"""Folders of small photographs, made here: smooth, colored, and of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def make_picture(number: int, width: int = 0, height: int = 0) -> Image.Image:
    """Blurred noise with a strong color cast; of 60 to 123 pixels a side where no size is given."""
    draw = np.random.default_rng(number)
    size = width or int(draw.integers(60, 124)), height or int(draw.integers(60, 124))
    coarse = draw.integers(0, 256, (7, 9, 3)) * [1.0, 0.7, 0.4]
    return Image.fromarray(coarse.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)


def make_folder(path: Path, pictures: int = 20, classes: int = 4) -> Path:
    """A folder per class, as ImageFolder reads it."""
    for number in range(pictures):
        place = path / f"class{number % classes}" / f"{number:03d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        make_picture(number).save(place, quality=90)
    return path


TURNED = Image.Exif()
TURNED[274] = 6


def damage(path: Path, how: str) -> None:
    """Put another file in the place of a picture."""
    picture = make_picture(1)
    content = path.read_bytes()
    if how == "zero bytes":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "text":
        path.write_bytes(b"no picture at all")
    elif how == "gone":
        path.unlink()
    elif how == "turned":
        picture.save(path, exif=TURNED)
    elif how == "16 bit":
        gray = np.asarray(picture.convert("L")).astype(np.uint16)
        Image.fromarray(257 * gray).save(path, format="PNG")
    elif how in ("GIF", "PNG", "WEBP", "BMP"):
        picture.save(path, format=how)
    else:
        picture.convert(how).save(path, format="JPEG" if how in ("CMYK", "L") else "PNG")


def read_folder(path: Path, *transforms: Any) -> Any:
    """The folder with these transforms; without any, the usual ones for training at 32 pixels."""
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    usual: Sequence[Any] = [T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)]
    return ImageFolder(str(path), T.Compose(list(transforms or usual)))


class Numbered:
    """A folder whose labels are the samples' own numbers."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.transform = inner, inner.transform

    def __len__(self) -> int:
        return len(self.inner)

    def image_path_and_label(self, index: int) -> tuple[str, int]:
        return self.inner.samples[index][0], index

    def __getitem__(self, index: int) -> Any:
        return self.inner[index][0], index
