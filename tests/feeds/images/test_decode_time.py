"""The time for decoding is that of the files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from fastloop.feeds.images.decode_time import measure_decode_ms

pytest.importorskip("torchvision")
from PIL import Image
from torchvision import datasets


def test_it_is_the_median_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cat").mkdir()
    for number in range(30):
        Image.new("RGB", (8, 8)).save(tmp_path / "cat" / f"{number:02d}.jpg")
    opened: list[str] = []
    plain = Image.open

    def open_slowly(path: str) -> Image.Image:
        opened.append(Path(path).stem)
        time.sleep(0.1 if len(opened) == 1 else 0.01)
        return plain(path)

    monkeypatch.setattr(Image, "open", open_slowly)
    found = measure_decode_ms(datasets.ImageFolder(tmp_path))
    assert found is not None and 10 <= found < 100, "the first one, which pays for imports, does not count"
    assert opened[:3] == ["00", "03", "07"], "from all over the dataset"


def test_it_is_unknown_without_files(tmp_path: Path) -> None:
    assert measure_decode_ms(TensorDataset(torch.zeros(2))) is None
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.jpg").write_bytes(b"")
    assert measure_decode_ms(datasets.ImageFolder(tmp_path)) is None
