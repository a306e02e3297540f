"""A recipe whose device works for a known time, and whose loader takes another: the ceiling is known beforehand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, default_collate


@dataclass(frozen=True, kw_only=True)
class Settings:
    load_ms: float = 60.0
    """To load a batch, in the main process."""
    device_ms: float = 40.0
    """Of the device to work on it."""


def build(settings: Settings) -> tuple[L.LightningModule, L.LightningDataModule]:
    """The module and its data."""
    return Sleeper(settings), Numbers(settings)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index % 7))


class Numbers(L.LightningDataModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def train_dataloader(self) -> DataLoader[Any]:
        def slowly(rows: Any) -> Any:
            time.sleep(self.settings.load_ms / 1e3)
            return default_collate(rows)

        return DataLoader(Rows(), batch_size=16, collate_fn=slowly if self.settings.load_ms else default_collate)


class Sleeper(L.LightningModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.net, self._cycles = settings, torch.nn.Linear(64, 1), 0

    def on_train_start(self) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(10_000_000)
        begin.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        end.synchronize()
        self._cycles = int(1e8 / begin.elapsed_time(end) * self.settings.device_ms)

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        torch.cuda._sleep(self._cycles)
        return self.net(rows).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)
