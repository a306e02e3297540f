"""A recipe that is slow where it is told to be: for tests of what trials say of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Settings:
    load_ms: float = 0.0
    """To load a batch."""
    step_ms: float = 0.0
    """To compute on it."""
    own_compile: bool = False
    by_hand: bool = False
    """Manual optimization."""
    samples: int = 4000


def build(settings: Settings) -> tuple[Net, Numbers]:
    """The module and its data."""
    return Net(settings), Numbers(settings)


class Slow(Dataset[Any]):
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __len__(self) -> int:
        return self.settings.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.settings.load_ms / BATCH / 1e3)
        return torch.full((8,), index / len(self))


class Numbers(L.LightningDataModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Slow(self.settings), batch_size=BATCH)


class Net(L.LightningModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.automatic_optimization = settings, not settings.by_hand
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        self.loss = torch.compile(self._loss) if settings.own_compile else self._loss

    def _loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).pow(2).mean()

    def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(self.settings.step_ms / 1e3)
        loss = self.loss(x)
        if self.settings.by_hand:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)
