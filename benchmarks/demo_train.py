"""A small training on photographs, as a beginner writes it: `make demo` says why it is slow, and what makes it faster.

fastloop exec -- python benchmarks/demo_train.py
fastloop ab --script benchmarks/demo_train.py --vs cache
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import lightning as L
import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

PHOTOGRAPHS, CLASSES, EPOCHS = 96, 4, 6
SIZE = 1600, 1200
FOLDER = Path(tempfile.gettempdir()) / "fastloop-demo-photographs"


def make_photographs() -> None:
    """Once: 96 pictures as a phone makes them, JPEGs of 2 megapixels, whose color is their class."""
    if FOLDER.exists():
        return
    draw = np.random.default_rng(0)
    grain = draw.normal(0, 12, (SIZE[1], SIZE[0], 3)).astype(np.float32)
    draft = Path(tempfile.mkdtemp(dir=FOLDER.parent))
    for number in range(PHOTOGRAPHS):
        coarse = draw.integers(0, 256, (24, 32, 3)) * np.roll([0.9, 0.6, 0.4], number % CLASSES)
        smooth = Image.fromarray(coarse.astype(np.uint8)).resize(SIZE, Image.Resampling.BICUBIC)
        place = draft / f"class{number % CLASSES}" / f"{number:03d}.jpg"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(place, quality=90)
    with contextlib.suppress(OSError):  # another process was first
        draft.rename(FOLDER)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.AvgPool2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(3 * 16 * 16, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, CLASSES),
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    make_photographs()
    augment = transforms.Compose(
        [
            transforms.Resize((64, 64)),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )
    loader = DataLoader(datasets.ImageFolder(FOLDER, augment), batch_size=8, shuffle=True)
    trainer = L.Trainer(max_epochs=EPOCHS, accelerator="auto", enable_checkpointing=False, logger=False)
    trainer.fit(Classifier(), loader)
