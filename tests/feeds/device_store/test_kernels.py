"""The Triton kernels make the bits that Pillow makes: run by Triton's interpreter, without a GPU."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

Image = pytest.importorskip("PIL.Image")
SHAPES = [(40, 31), (25, 60), (33, 47), (90, 21), (20, 24), (51, 52), (30, 30)]
PARTS = [(0, 0, 40, 31), (3, 4, 1, 1), (5, 6, 1, 41), (2, 1, 88, 17), (0, 0, 20, 24), (7, 9, 30, 40), (2, 3, 20, 24)]
MIRRORED = np.array([True, False, True, True, False, True, False])


def resize(picture: np.ndarray[Any, Any], part: Any, mirrored: bool, size: tuple[int, int]) -> torch.Tensor:
    """Bytes [3, *size] as Pillow makes them of a part of a picture [3, height, width]."""
    top, left, height, width = map(int, part)
    whole = Image.fromarray(picture.transpose(1, 2, 0))
    image = whole.crop((left, top, left + width, top + height)).resize(size[::-1], Image.Resampling.BILINEAR)
    made = torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())
    return made.flip(2) if mirrored else made


def look_up(table: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    return torch.stack([table[channel][image[channel].long()] for channel in range(3)])


def draw_noise() -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (3, *shape), dtype=np.uint8) for shape in SHAPES]


def make(kernels: Any, size: tuple[int, int], memory_format: Any = torch.contiguous_format) -> torch.Tensor:
    arrays = draw_noise()
    pixels = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    starts = np.cumsum([0, *(array.size for array in arrays)])[:-1]
    told = (pixels, starts, *np.array(SHAPES).T, np.array(PARTS), MIRRORED)
    made: torch.Tensor = kernels.resize_parts(*told, size, TABLE, memory_format)
    return made


TABLE = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))


def list_expected(size: tuple[int, int]) -> list[torch.Tensor]:
    images = (resize(*each, size) for each in zip(draw_noise(), PARTS, MIRRORED, strict=True))
    return [look_up(TABLE, image) for image in images]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(20, 24), (18, 133), (61, 7)])
def test_the_same_bits(kernels: Any, size: tuple[int, int], memory_format: Any) -> None:
    """Smaller and larger, to sides that are no whole pieces of the kernels', from parts of one pixel and of a row."""
    expected, ours = torch.stack(list_expected(size)), make(kernels, size, memory_format)
    assert torch.equal(expected, ours) and ours.dtype == expected.dtype
    assert ours.is_contiguous(memory_format=memory_format)


def test_photographs(kernels: Any, shared_data: Path) -> None:
    with tarfile.open(shared_data / "imagenet-sample.tar") as tar:
        files = [member for member in tar.getmembers() if member.isfile()][::40]
        photos = [Image.open(tar.extractfile(member)).convert("RGB") for member in files]  # type: ignore[arg-type]
    arrays = [np.asarray(photo).transpose(2, 0, 1) for photo in photos]
    pixels = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    starts = np.cumsum([0, *(array.size for array in arrays)])[:-1]
    heights, widths = np.array([array.shape[1:] for array in arrays]).T
    parts = np.stack([heights // 5, widths // 7, heights // 2, widths // 3], axis=1)
    same, unturned = torch.arange(256.0).expand(3, 256).contiguous(), np.zeros(len(photos), bool)
    made = kernels.resize_parts(pixels, starts, heights, widths, parts, unturned, (64, 72), same)
    for picture, part, image in zip(arrays, parts, made, strict=True):
        assert torch.equal(resize(picture, part, False, (64, 72)).float(), image)


def test_another_order_of_the_passes_shows(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, whichever order this Pillow takes."""
    order = not kernels.probe_order()
    monkeypatch.setattr(kernels, "probe_order", lambda: order)
    ours = make(kernels, (20, 24))
    same = [torch.equal(a, b) for a, b in zip(list_expected((20, 24)), ours, strict=True)]
    assert same == [False, True, True, False, True, True, True]
