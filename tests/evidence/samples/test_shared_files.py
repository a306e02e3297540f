"""A file that samples read and the training writes meanwhile is found by its name; other files are not."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastloop.evidence.samples.between_epochs import list_changes_during_epochs

FOLDER = "/tmp/nowhere"


class Rows(Dataset[Any]):
    def __init__(self, place: Any = None) -> None:
        self.place = place

    def __len__(self) -> int:
        return 4


class Settings(Rows):
    def __getitem__(self, index: int) -> Any:
        return json.loads(Path(FOLDER + "/cfg.json").read_text())["scale"]


class Flagged(Rows):
    def __getitem__(self, index: int) -> Any:
        return os.path.exists(FOLDER + "/begun")


class Table(Rows):
    def __getitem__(self, index: int) -> Any:
        with sqlite3.connect(self.place) as table:
            return table.execute("select 1").fetchone()


class Pictures(Rows):
    def __getitem__(self, index: int) -> Any:
        return np.load(f"{self.place}/{index}.npy")


class Writes(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        write_settings(1.0)


def write_settings(scale: float) -> None:
    with open(FOLDER + "/cfg.json", "w") as file:
        json.dump({"scale": scale}, file)


class Begins(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        open(FOLDER + "/begun", "w").close()


class Updates(L.LightningModule):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, *_: Any) -> None:
        with sqlite3.connect(self.path) as table:
            table.execute("update t set v = 1")


class Shows(L.Callback):
    """Writes pictures of its own, with the suffix of those that are read."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        np.save(f"shown/{trainer.global_step}.npy", np.zeros(3))
        torch.save({}, "last.pt")


class Logs(L.Callback):
    """Into the folder in which the data are, too."""

    def on_train_batch_end(self, *_: Any) -> None:
        with open(FOLDER + "/log.txt", "a") as file:
            file.write("x")


class OnlyReads(L.Callback):
    """The same file as the samples, and writes another."""

    def on_train_batch_end(self, *_: Any) -> None:
        with open(FOLDER + "/cfg.json") as file:
            torch.save(json.load(file), "last.ckpt")


class Named(Rows):
    def __getitem__(self, index: int) -> Any:
        return np.load(self.place)["train.loss"], "v1.0", f"{self.place}/img_{index}.png"


class Prints(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.log("train.loss", 1.0)
        with open(f"{trainer.default_root_dir}/img_{trainer.global_step}.png", "wb") as file:
            file.write(b"v1.0")


class WritesAtTheEnd(L.Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        write_settings(2.0)


@pytest.mark.parametrize(
    ("dataset", "other", "said"),
    [
        (
            Settings(),
            Writes(),
            "cfg.json, which Settings.__getitem__ reads, may be written by Writes.on_train_batch_end",
        ),
        (Flagged(), Begins(), "begun, which Flagged.__getitem__ reads, may be written by Begins.on_train_batch_end"),
        (Table("/d/t.db"), Updates("/d/t.db"), "t.db, which Table.__getitem__ reads, may be written by Updates.on_"),
    ],
)
def test_a_file_that_is_written_while_samples_read_it_is_named(dataset: Any, other: Any, said: str) -> None:
    (found,) = list_changes_during_epochs(dataset, [other])
    assert found.startswith(said)


@pytest.mark.parametrize(
    ("dataset", "other"),
    [
        (Settings(), Shows()),
        (Settings(), Logs()),
        (Settings(), OnlyReads()),
        (Named("d.npz"), Prints()),
        (Table("ACGT" * 30_000), Updates("/d/other.db")),
        (Pictures("data"), Shows()),
        (Pictures("data"), Writes()),
        (Table("/d/t.db"), Updates("/d/other.db")),
        (Settings(), WritesAtTheEnd()),
        (Rows(), Writes()),
    ],
)
def test_other_files_are_not(dataset: Any, other: Any) -> None:
    assert list_changes_during_epochs(dataset, [other]) == ()


class Bank:
    """Reads a file that it has mapped into memory."""

    def __init__(self, place: Any) -> None:
        self.rows = np.memmap(place, "f4", "r", shape=(4, 2))

    def __getitem__(self, index: int) -> Any:
        return np.array(self.rows[index])


class Fills(L.Callback):
    def __init__(self, place: Any, mode: Any) -> None:
        self.made = {"rows": np.memmap(place, "f4", mode, shape=(4, 2))}

    def on_train_batch_end(self, *_: Any) -> None:
        self.made["rows"][0] += 1


def test_a_mapped_file_that_the_training_may_write_is_named(tmp_path: Path) -> None:
    for name in ("bank.dat", "other.dat"):
        np.zeros((4, 2), "f4").tofile(tmp_path / name)
    bank = Bank(tmp_path / "bank.dat")
    assert list_changes_during_epochs(bank, [Fills(tmp_path / "bank.dat", "r+")]) == (
        "dataset.rows maps bank.dat, which Fills.on_train_batch_end may write through its made",
    )
    for other in (Fills(tmp_path / "bank.dat", "r"), Fills(tmp_path / "other.dat", "r+")):
        assert list_changes_during_epochs(bank, [other]) == ()
