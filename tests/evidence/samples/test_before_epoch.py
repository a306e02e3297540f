"""What training may renew between epochs, and samples made before an epoch begins would miss, is found."""

from __future__ import annotations

import multiprocessing
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision.datasets import FakeData

from fastloop.evidence.samples.before_epoch import find_what_epochs_renew

LEVEL = multiprocessing.RawValue("i", 0)


class Plain(Dataset):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index


class ByGlobal(Plain):
    def __getitem__(self, index: int) -> Any:
        return index + LEVEL.value


class ReadsFiles(Plain):
    def __getitem__(self, index: int) -> Any:
        return _read_file(index)


def _read_file(index: int) -> Any:
    return np.load(f"{index}.npy")


class Writes(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._mine()

    def _mine(self) -> None:
        Path("0.npy").write_bytes(b"")


class Looks(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen = trainer.current_epoch


class Given(SyncManager):
    pass


SHARED: dict[str, Any] = {
    "value": lambda: multiprocessing.Value("i", 0),
    "array": lambda: multiprocessing.RawArray("d", 3),
    "tensor": lambda: torch.zeros(3).share_memory_(),
    "manager": Given,
}


@pytest.mark.parametrize("kind", SHARED)
def test_what_processes_share(kind: str) -> None:
    why = find_what_epochs_renew(Subset(Plain(level=SHARED[kind]()), [0]), [Looks()])
    assert why == "dataset.dataset.level is shared between processes, and may change before the next epoch"


def test_globals_that_processes_share() -> None:
    why = find_what_epochs_renew(ByGlobal(), [])
    assert why == "LEVEL is shared between processes, and may change before the next epoch"


@pytest.mark.parametrize("callback", [Looks(), Writes()])
@pytest.mark.parametrize(
    ("data", "reader"),
    [
        (Plain(), None),
        (TensorDataset(torch.zeros(8)), None),
        (ReadsFiles(), "_read_file"),
        (Subset(ReadsFiles(), [0]), "_read_file"),
        (FakeData(8), "FakeData"),
    ],
)
def test_files_that_training_may_write(data: Any, reader: str | None, callback: L.Callback) -> None:
    why = find_what_epochs_renew(data, [callback, L.LightningModule()])
    writes = f"{reader} reads files, and Writes.on_train_epoch_end may write some between epochs"
    assert why == (writes if reader is not None and isinstance(callback, Writes) else None)


def test_a_collate_function_reads_too() -> None:
    assert find_what_epochs_renew(Plain(), [Writes()], collate=_read_file) is not None
