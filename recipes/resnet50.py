"""ResNet-50 on photographs, the textbook way: decode, crop, flip, SGD, gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from . import _data, _made


@dataclass(frozen=True, kw_only=True)
class Settings:
    size: str = "default"
    """default, or tiny: a ResNet-18 on 64 px crops of such photographs, an eighth of the batch and learning rate."""
    data: str | None = None
    """A folder or a tar of photographs with a folder per class; null: photographs generated once on this machine."""

    def __post_init__(self) -> None:
        _data.check_size(self.size)


def build(settings: Settings) -> tuple[ResNet, Photographs]:
    """Build the module and the data of this recipe; raises ConfigError where ``settings.data`` does not exist."""
    _data.require_torchvision()
    _data.check_path(settings.data)
    if settings.size == "tiny":
        photographs = Photographs(settings.data, "tiny", crop_px=64, batch_size=8, train=120, val=40)
        return ResNet("resnet18", lr=0.0125), photographs
    photographs = Photographs(settings.data, "default", crop_px=224, batch_size=64, train=640, val=160)
    return ResNet("resnet50", lr=0.1), photographs


class ResNet(L.LightningModule):
    """A torchvision ResNet that keeps ImageNet's 1,000 outputs, however many classes the data has."""

    def __init__(self, architecture: str, lr: float) -> None:
        super().__init__()
        from torchvision import models

        self.lr = lr
        self.network = models.get_model(architecture, weights=None)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, H, W] to logits [B, 1000]."""
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)


class Photographs(L.LightningDataModule):
    """Photographs in a folder per class, randomly cropped for training and cropped in the middle for validation."""

    EPOCH_BATCHES = 1_000

    def __init__(self, data: str | None, size: str, *, crop_px: int, batch_size: int, train: int, val: int) -> None:
        super().__init__()
        self.crop_px, self.batch_size = crop_px, batch_size
        make = partial(_made.photographs, train=train, val=val)
        self.folder = partial(_data.picture_folder, data, f"photographs-{size}-{_made.VERSION}", make)

    def prepare_data(self) -> None:
        self.folder()

    def setup(self, stage: str) -> None:
        from torchvision import transforms as T

        to_tensor = [T.ToTensor(), T.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])]
        for_train = T.Compose([T.RandomResizedCrop(self.crop_px), T.RandomHorizontalFlip(), *to_tensor])
        for_val = T.Compose([T.Resize(self.crop_px * 256 // 224), T.CenterCrop(self.crop_px), *to_tensor])
        train, self.val_set = _data.picture_sets(self.folder(), for_train, for_val, outputs=1_000)
        # The real ImageNet has 20,000 micro-batches an epoch. A few hundred photographs would end one every other step,
        # so they are repeated until an epoch has a thousand micro-batches; each pass crops them differently.
        length = max(len(train), self.EPOCH_BATCHES * self.batch_size)
        self.train_set: Dataset[Any] = Subset(train, [index % len(train) for index in range(length)])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, batch_size=self.batch_size)
