"""What training may renew between epochs, and samples made before an epoch begins would miss, is found."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import shutil
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision.datasets import FakeData

from fastloop.evidence.samples.before_epoch import explain_not_ahead, find_memory

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


class Replaces(Writes):
    def _mine(self) -> None:
        os.replace("new.npy", "0.npy")


class Copies(Writes):
    def _mine(self) -> None:
        shutil.copy("new.npy", "0.npy")


class Maps(Writes):
    def _mine(self) -> None:
        np.memmap("0.npy", mode="r+")[:] = 1


SHARED: dict[str, Any] = {
    "array of NumPy": lambda: np.frombuffer(multiprocessing.RawArray("d", 3))[:2],
    "another one": lambda: np.ctypeslib.as_array(multiprocessing.RawArray("d", 3)),
    "block": lambda: np.ndarray((3,), buffer=mmap.mmap(-1, 24)),
    "value": lambda: multiprocessing.Value("i", 0),
    "array": lambda: multiprocessing.RawArray("d", 3),
    "tensor": lambda: torch.zeros(3).share_memory_(),
    "manager": Given,
}


@pytest.mark.parametrize("kind", SHARED)
def test_what_processes_share(kind: str) -> None:
    why = explain_not_ahead(Subset(Plain(level=SHARED[kind]()), [0]), [Looks()])
    assert why == "dataset.dataset.level is in shared memory and may change before the next epoch"


def test_globals_that_processes_share() -> None:
    why = explain_not_ahead(ByGlobal(), [])
    assert why == "LEVEL is in shared memory and may change before the next epoch"


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
    why = explain_not_ahead(data, [callback, L.LightningModule()])
    writes = f"{reader} reads files, and Writes.on_train_epoch_end may write some between epochs"
    assert why == (writes if reader is not None and isinstance(callback, Writes) else None)


@pytest.mark.parametrize("callback", [Replaces(), Copies(), Maps()])
def test_other_ways_to_write(callback: L.Callback) -> None:
    assert explain_not_ahead(ReadsFiles(), [callback]) is not None


@pytest.mark.parametrize("callback", [Looks(), Maps()])
def test_an_array_in_a_file(callback: L.Callback, tmp_path: Path) -> None:
    held = np.memmap(tmp_path / "a", mode="w+", shape=(3,))
    why = explain_not_ahead(Plain(rows=held), [callback])
    writes = "dataset.rows reads files, and Maps._mine may write some between epochs"
    assert why == (writes if isinstance(callback, Maps) else None)


def test_what_a_function_for_workers_puts_in() -> None:
    level = multiprocessing.Value("i", 0)

    def init(worker_id: int) -> None:
        torch.utils.data.get_worker_info().dataset.level = level  # type: ignore[union-attr]

    assert explain_not_ahead(Plain(), [], worker_init=init) is not None


class AsksForItsWorker(Plain):
    def __getitem__(self, index: int) -> Any:
        return index, torch.utils.data.get_worker_info()


def test_samples_that_ask_for_their_worker() -> None:
    why = explain_not_ahead(AsksForItsWorker(), [])
    assert why == "AsksForItsWorker.__getitem__ reads its worker's id, and a prefetched batch may go to another worker"


def test_a_collate_function_reads_too() -> None:
    assert explain_not_ahead(Plain(), [Writes()], collate=_read_file) is not None


def test_views_share_memory_and_copies_do_not() -> None:
    tensor, array = torch.zeros(6, 4), np.zeros((6, 4))
    start = tensor.data_ptr()
    assert find_memory(tensor) == find_memory(tensor.numpy()) == range(start, start + 96)
    assert find_memory(tensor.T) == find_memory(tensor) and find_memory(tensor[2:4]) == range(start + 32, start + 64)
    assert find_memory(tensor[:, 1]) == range(start + 4, start + 88)
    assert find_memory(array[::-1]) == find_memory(array) == find_memory(torch.from_numpy(array))
    assert find_memory(array.copy()) != find_memory(array)
    for other in (
        torch.zeros(0),
        np.zeros((3, 0)),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        [1],
        None,
    ):
        assert find_memory(other) is None
