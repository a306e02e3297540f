"""Folders of pictures, what is trained on them, and what recorded it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def draw_folder(root: Path, count: int = 12, size: tuple[int, int] | None = None) -> Path:
    """`count` noisy PNGs in two classes; of several sizes, or all of (width, height)."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count):
        folder = root / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        width, height = size or (40 + 3 * number, 36 + 5 * (number % 4))
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return root


def draw_bad_folder(root: Path, bad: str) -> Any:
    """An ImageFolder of six JPEGs, the fourth of which is `bad`: CMYK, 16 bit, truncated or empty."""
    from PIL import Image
    from torchvision import datasets, transforms

    folder = root / "a"
    folder.mkdir(parents=True)
    for number in range(6):
        Image.new("RGB", (24, 16), (number * 40, 10, 20)).save(folder / f"{number}.jpg")
    place = folder / "3.jpg"
    if bad == "CMYK":
        Image.new("CMYK", (24, 16), (9, 99, 30, 4)).save(place)
    elif bad == "16 bit":
        place.unlink()
        Image.new("I;16", (24, 16), 40000).save(folder / "3.png")
    elif bad == "truncated":
        Image.effect_noise((64, 64), 90).convert("RGB").save(place)
        place.write_bytes(place.read_bytes()[:-400])
    else:
        place.write_bytes(b"")
    steps = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    return datasets.ImageFolder(root, steps)


class Classifier(L.LightningModule):
    """Two classes, one convolution; keeps the batches that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 2)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.kinds: set[type] = set()
        self.random_states: list[torch.Tensor] = []
        """Of the CPU's generator, in each training_step."""

    def loss(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.head(self.convolution(images).amax((2, 3))), labels)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.kinds.add(type(batch))
        self.seen.append((batch[0].clone(), batch[1].clone()))
        self.random_states.append(torch.get_rng_state())
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def same_batches(a: Any, b: Any) -> bool:
    """Whether two modules were trained on the same bits, the same number of times."""
    return len(a.seen) == len(b.seen) and all(
        torch.equal(x, other_x) and torch.equal(y, other_y) and x.dtype == other_x.dtype
        for (x, y), (other_x, other_y) in zip(a.seen, b.seen, strict=True)
    )


class Named:
    """An image folder's samples, in a dataset that says where they come from and makes them itself."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.transform = inner, inner.transform

    def __len__(self) -> int:
        return len(self.inner)

    def image_path_and_label(self, index: int) -> Any:
        return self.inner.samples[index]

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]
