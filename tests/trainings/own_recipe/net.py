"""A recipe of one's own, which does on request what trainings do to a command line: print, raise, exit, hang."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True, kw_only=True)
class Settings:
    samples: int = 64
    batch: int = 4
    workers: int = 0
    prefetch: int = 2
    at: int = -1
    """The step that does something, counted from 0; before it, ``mark`` is written."""
    does: str = "nothing"
    rank: int = 0
    """The rank that does it; -1: all."""
    mark: str | None = None
    api_key: str | None = None
    elsewhere: str | None = None
    """Where its checkpoints go, besides those below the run directory."""


def build(settings: Settings) -> tuple[Net, Numbers]:
    """The module and its data."""
    if settings.does == "not even begin":
        raise RuntimeError("this recipe cannot be built")
    if settings.does == "be slow to begin":
        act(settings, hangs)
    return Net(settings), Numbers(settings)


class Fours(Dataset[Any]):
    """A float32 [4] and the number of the sample, 16 + 8 bytes once they are batched."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), index / self.samples), index


class Numbers(L.LightningDataModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def train_dataloader(self) -> DataLoader[Any]:
        asked = self.settings
        ahead = {"num_workers": asked.workers, "prefetch_factor": asked.prefetch} if asked.workers else {}
        return DataLoader(Fours(asked.samples), batch_size=asked.batch, **ahead)


class Net(L.LightningModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.save_hyperparameters({"api_key": settings.api_key} if settings.api_key else {})
        self.settings = settings
        self.net = torch.nn.Linear(4, 1)
        self.first = 0

    def configure_callbacks(self) -> list[Any]:
        elsewhere = self.settings.elsewhere
        wheres = [] if elsewhere is None else [(elsewhere, 1), (None, 5)]
        return [
            ModelCheckpoint(dirpath=where, every_n_train_steps=every, save_last=True, enable_version_counter=False)
            for where, every in wheres
        ]

    def on_train_start(self) -> None:
        self.first = self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        asked = self.settings
        if self.trainer.global_step - self.first == asked.at and asked.rank in (self.global_rank, -1):
            act(asked, DEEDS[asked.does])
        return (self.net(batch[0]) - 1).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def act(asked: Settings, deed: Callable[[Settings], None]) -> None:
    if asked.mark is not None:
        Path(asked.mark).write_text(str(os.getpid()))
    deed(asked)


def prints(asked: Settings) -> None:
    print("said by the training")
    os.write(1, b"written by the training\n")
    os.system("echo said by its child")


def raises(asked: Settings) -> None:
    raise ValueError(f"no luck with the key {asked.api_key}")


def tells(asked: Settings) -> None:
    print(f"logged in with {asked.api_key}")
    print(f"logged in with {asked.api_key}", file=sys.stderr)


def leaves(asked: Settings) -> None:
    sys.exit("the training has had enough")


def hangs(asked: Settings) -> None:
    time.sleep(60)


DEEDS: dict[str, Callable[[Settings], None]] = {
    "nothing": lambda asked: None,
    "print": prints,
    "tell": tells,
    "raise": raises,
    "exit": leaves,
    "hang": hangs,
    "stop": lambda asked: os.kill(os.getpid(), signal.SIGSTOP),
    "interrupt": lambda asked: (_ for _ in ()).throw(KeyboardInterrupt),
}
