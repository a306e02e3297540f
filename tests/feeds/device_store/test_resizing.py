"""Parts of pictures are resized as Pillow resizes them, to the bit."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastloop.feeds.device_store import resizing
from fastloop.feeds.device_store.resizing import resize_parts

Image = pytest.importorskip("PIL.Image")


def compare(pictures: list[Any], parts: list[tuple[int, int, int, int]], size: tuple[int, int]) -> int:
    """Images that are not Pillow's, of one for each part, whose picture has the same place."""
    arrays = [np.asarray(picture).transpose(2, 0, 1) for picture in pictures]
    pixels = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    starts = np.cumsum([0, *(array.size for array in arrays)])[:-1]
    heights, widths = np.array([array.shape[1:] for array in arrays]).T
    made = resize_parts(pixels, starts, heights, widths, np.array(parts), size)
    different = 0
    for picture, (top, left, height, width), image in zip(pictures, parts, made, strict=True):
        part = picture.crop((left, top, left + width, top + height))
        expected = np.asarray(part.resize((size[1], size[0]), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        different += not np.array_equal(expected, image.numpy())
    return different


def draw_parts(generator: np.random.Generator, pictures: list[Any]) -> list[tuple[int, int, int, int]]:
    parts = []
    for picture in pictures:
        height, width = (int(generator.integers(1, side + 1)) for side in (picture.height, picture.width))
        top, left = (int(generator.integers(0, n + 1)) for n in (picture.height - height, picture.width - width))
        parts.append((top, left, height, width))
    return parts


@pytest.mark.parametrize("size", [(24, 24), (40, 17), (9, 60)])
def test_parts_of_noise(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are made at a time; parts of one pixel, whole pictures, and one that needs no resizing."""
    monkeypatch.setattr(resizing, "AT_ONCE", 3 * 60 * 90 * 20)
    generator = np.random.default_rng(1)
    shapes = [(int(h), int(w)) for h, w in generator.integers(20, 90, (70, 2))]
    pictures = [Image.fromarray(generator.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in shapes]
    parts = draw_parts(generator, pictures)
    parts[:3] = [(0, 0, *shapes[0]), (3, 4, 1, 1), (0, 0, shapes[2][0], 1)]
    pictures[3], parts[3] = Image.fromarray(np.full((size[0] + 5, size[1] + 5, 3), 255, np.uint8)), (2, 3, *size)
    assert compare(pictures, parts, size) == 0


def test_the_order_of_the_passes_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    generator = np.random.default_rng(2)
    pictures = [Image.fromarray(generator.integers(0, 256, (90, 30, 3), dtype=np.uint8)) for _ in range(3)]
    parts = [(0, 0, 90, 30)] * 3
    assert compare(pictures, parts, (24, 24)) == 0
    order = not resizing.probe_order()
    monkeypatch.setattr(resizing, "probe_order", lambda: order)
    assert compare(pictures, parts, (24, 24)) == 3


@pytest.mark.slow
def test_parts_of_photographs(shared_data: Path) -> None:
    generator = np.random.default_rng(3)
    with tarfile.open(shared_data / "imagenet-sample.tar") as tar:
        files = [tar.extractfile(member) for member in tar.getmembers() if member.isfile()]
        pictures = [Image.open(file).convert("RGB") for file in files]
    assert len(pictures) == 160
    assert compare(pictures, draw_parts(generator, pictures), (224, 224)) == 0
