"""ResNet-18 on 32 px images (CIFAR-10), the textbook way: pad, crop, flip, SGD with a one-cycle schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from . import _data, _made


@dataclass(frozen=True, kw_only=True)
class Settings:
    size: str = "default"
    """default, or tiny: a quarter of the width, the batch and the learning rate, and a fifth of the pictures."""
    data: str | None = None
    """A folder or a tar of pictures with a folder per class; download: CIFAR-10; null: generated pictures."""

    def __post_init__(self) -> None:
        _data.check_size(self.size)


def build(settings: Settings) -> tuple[ResNet18, Thumbnails]:
    """Build the module and the data of this recipe; raises ConfigError where ``settings.data`` does not exist."""
    _data.require_torchvision()
    if settings.data != "download":
        _data.check_path(settings.data)
    if settings.size == "tiny":
        return ResNet18(width=16, lr=0.025), Thumbnails(settings.data, "tiny", batch_size=32, train=2_000, val=400)
    return ResNet18(width=64, lr=0.1), Thumbnails(settings.data, "default", batch_size=128, train=10_000, val=2_000)


class Block(nn.Module):
    """Two 3 x 3 convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        around = [] if before == after else [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)]
        self.around = nn.Sequential(*around)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.path(x) + self.around(x))


class ResNet18(L.LightningModule):
    """ResNet-18 with a stem for 32 px: a 3 x 3 convolution of stride 1, and no max-pooling after it."""

    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for before, after, stride in ((1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)):
            layers += [Block(before * width, after * width, stride), Block(after * width, after * width, 1)]
        self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, 32, 32] to logits [B, 10]."""
        return self.network(images)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Thumbnails(L.LightningDataModule):
    """Pictures of 32 px in ten classes, padded, cropped and flipped at random for training."""

    def __init__(self, data: str | None, size: str, *, batch_size: int, train: int, val: int) -> None:
        super().__init__()
        self.data, self.batch_size = data, batch_size
        make = partial(_made.thumbnails, train=train, val=val)
        self.folder = partial(_data.picture_folder, data, f"thumbnails-{size}-{_made.VERSION}", make)
        if data == "download":
            self.folder = _data.cifar10_download

    def prepare_data(self) -> None:
        self.folder()

    def setup(self, stage: str) -> None:
        from torchvision import transforms as T
        from torchvision.datasets import CIFAR10

        to_tensor = [T.ToTensor(), T.Normalize(mean=[0.4914, 0.4822, 0.4465], std=[0.2470, 0.2435, 0.2616])]
        for_train = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), *to_tensor])
        for_val = T.Compose(to_tensor)
        folder = self.folder()
        if self.data == "download":
            self.train_set, self.val_set = CIFAR10(folder, True, for_train), CIFAR10(folder, False, for_val)
        else:
            self.train_set, self.val_set = _data.picture_sets(folder, for_train, for_val, outputs=10)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, batch_size=self.batch_size)
