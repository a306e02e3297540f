"""The Triton kernels make the bits that tensor operations make: run by Triton's interpreter, without a GPU."""

from __future__ import annotations

import importlib.util
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastloop.feeds.device_store.resizing import resize_parts

Image = pytest.importorskip("PIL.Image")
SHAPES = [(40, 31), (25, 60), (33, 47), (90, 21), (20, 24), (51, 52)]
PARTS = [(0, 0, 40, 31), (3, 4, 1, 1), (5, 6, 1, 41), (2, 1, 88, 17), (0, 0, 20, 24), (7, 9, 30, 40)]
MIRRORED = np.array([True, False, True, True, False, True])


@pytest.fixture(scope="module")
def kernels() -> Any:
    """The module as it is where Triton interprets, whatever Triton is for other tests of this process."""
    spec = importlib.util.find_spec("triton") and importlib.util.find_spec("fastloop.feeds.device_store.kernels")
    if spec is None or spec.loader is None:
        pytest.skip("needs triton")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # is read where a kernel is declared
        spec.loader.exec_module(module)
    return module


def make(
    kernels: Any, size: tuple[int, int], memory_format: Any = torch.contiguous_format
) -> tuple[torch.Tensor, torch.Tensor]:
    """By tensor operations, and by the kernels."""
    generator = np.random.default_rng(0)
    arrays = [generator.integers(0, 256, (3, *shape), dtype=np.uint8) for shape in SHAPES]
    pixels = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    starts = np.cumsum([0, *(array.size for array in arrays)])[:-1]
    told = (pixels, starts, *np.array(SHAPES).T, np.array(PARTS))
    table = torch.from_numpy(generator.normal(size=(3, 256)).astype(np.float32))
    images = resize_parts(*told, size)
    images = torch.where(torch.from_numpy(MIRRORED).view(-1, 1, 1, 1), images.flip(3), images)
    expected = torch.stack([table[channel][images[:, channel].long()] for channel in range(3)], dim=1)
    return expected, kernels.resize_parts(*told, MIRRORED, size, table, memory_format)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(20, 24), (18, 133), (61, 7)])
def test_the_same_bits(kernels: Any, size: tuple[int, int], memory_format: Any) -> None:
    """Smaller and larger, to sides that are no whole pieces of the kernels', from parts of one pixel and of a row."""
    expected, ours = make(kernels, size, memory_format)
    assert torch.equal(expected, ours) and ours.dtype == expected.dtype
    assert ours.is_contiguous(memory_format=memory_format)


def test_photographs(kernels: Any, shared_data: Path) -> None:
    """Against Pillow itself."""
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
    for photo, (top, left, height, width), image in zip(photos, parts.tolist(), made, strict=True):
        part = photo.crop((left, top, left + width, top + height)).resize((72, 64), Image.Resampling.BILINEAR)
        assert np.array_equal(np.asarray(part).transpose(2, 0, 1), image.numpy())


def test_another_order_of_the_passes_shows(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(kernels, "is_vertical_first", lambda heights, widths, size: np.zeros(len(heights), bool))
    expected, ours = make(kernels, (20, 24))
    assert [torch.equal(a, b) for a, b in zip(expected, ours, strict=True)] == [False, True, True, False, True, True]
