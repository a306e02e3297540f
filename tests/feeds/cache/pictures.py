"""Image folders for the tests of the cache, and what stands in for a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from fastloop import cached_prefix


def paint(path: Path, seed: int, size: tuple[int, int] = (40, 30)) -> None:
    """A picture of noise; the same seed gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


def folder(root: Path, count: int = 6, transform: Any = None, suffix: str = "png", **settings: Any) -> ImageFolder:
    """`count` pictures in two classes."""
    for number in range(count):
        if not (path := root / f"class{number % 2}" / f"{number}.{suffix}").exists():
            paint(path, number)
    return ImageFolder(str(root), transform, **settings)


def touch(path: Path) -> None:
    """Make sure that the time of the last change is another one."""
    stamp = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(stamp, stamp))


class Arrays(Dataset[Any]):
    """Arrays in files, the part that is the same each time marked."""

    def __init__(self, root: Path, count: int = 6, scale: int = 1) -> None:
        root.mkdir(exist_ok=True)
        self.paths = [str(root / f"{number}.npy") for number in range(count)]
        self.scale, self.noise, self.loaded = scale, 0.0, [0]
        for number, path in enumerate(self.paths):
            if not Path(path).exists():
                np.save(path, np.full(5, number, dtype=np.int32))

    @cached_prefix(file=lambda self, index: self.paths[index])
    def load(self, index: int) -> Any:
        return {"x": read_array(self.paths[index]) * self.scale, "number": index}

    def __getitem__(self, index: int) -> Any:
        sample = self.load(index)
        sample["x"] += self.noise > 0  # in place, as augmentations are
        return sample["x"], sample["number"]

    def __len__(self) -> int:
        return len(self.paths)


class Unnamed(Arrays):
    """The same, without a word about files."""

    @cached_prefix
    def load(self, index: int) -> Any:
        return {"x": read_array(self.paths[index]) * self.scale, "number": index}


def read_array(path: str) -> Any:
    note()
    return np.load(path)


def note() -> None:
    vars(read_array).setdefault("times", []).append(1)


def count_reads() -> int:
    return len(vars(read_array).get("times", []))


class Memory:
    """A store in this process's memory."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> memoryview | None:
        return memoryview(self.kept[key]) if key in self.kept else None

    def put(self, key: bytes, record: bytes) -> bool:
        self.kept[key] = record
        return True

    def count(self) -> dict[str, int]:
        return {"kept_samples": len(self.kept)}

    def close(self) -> None:
        self.kept.clear()
