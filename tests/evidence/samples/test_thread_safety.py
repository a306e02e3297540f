"""What a dataset's code says about threads that share it, without taking a sample."""

from __future__ import annotations

import functools
import io
import random
import socket
import struct
import tempfile
import threading
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from fastloop.evidence.samples.random_draws import draws_random
from fastloop.evidence.samples.thread_safety import find_thread_hazards, list_shared_draws

COUNT = {"samples": 0}
WRITTEN = "is written while a sample is made, and threads would write it concurrently"
DRAWN = "draws random numbers, and it would be random which thread draws which"


class Items(Dataset):
    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return index


class Local(Items):
    """Writes to what is its own alone."""

    def __getitem__(self, index: int) -> Any:
        sample = self.data[index]
        rows, table = [], {}
        rows.append(sample)
        table["sample"] = sample
        with tempfile.TemporaryFile() as file:
            file.write(b"1")
            file.seek(0)
        total = torch.zeros(3).add_(sample)
        total += 1
        return total


class Caches(Items):
    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = index
        return self.kept[index]


class CachesByAnotherName(Items):
    def __getitem__(self, index: int) -> Any:
        kept = self.kept
        kept[index] = index
        return index


class OpensLate(Items):
    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = tempfile.mkstemp()[1]
        return index


class OpensByProperty(Items):
    @functools.cached_property
    def file(self) -> Any:
        return tempfile.TemporaryFile()

    def __getitem__(self, index: int) -> Any:
        return self.file.tell()


class CountsInProperty(Items):
    @property
    def next_number(self) -> int:
        self.number += 1
        return self.number

    def __getitem__(self, index: int) -> Any:
        return self.next_number


class Reader:
    def fetch(self, index: int) -> int:
        self.place = index
        return self.place


class AsksReader(Items):
    def __getitem__(self, index: int) -> Any:
        return self.reader.fetch(index)


class Fills(Items):
    def __getitem__(self, index: int) -> Any:
        return self.buffer.copy_(torch.zeros(3)).clone()


class FillsOut(Items):
    def __getitem__(self, index: int) -> Any:
        return np.add(index, 1, out=self.buffer).copy()


class Copies(Items):
    def __getitem__(self, index: int) -> Any:
        np.copyto(self.buffer[:1], index)
        return self.buffer.copy()


class Packs(Items):
    def __getitem__(self, index: int) -> Any:
        struct.pack_into("B", self.buffer, 0, index)
        return bytes(self.buffer)


class ReadsInto(Items):
    def __getitem__(self, index: int) -> Any:
        with io.BytesIO(bytes([index])) as file:
            file.readinto(self.buffer)
        return bytes(self.buffer)


class Rotates(Items):
    def __getitem__(self, index: int) -> Any:
        self.rows.rotate(1)
        return self.rows[0]


class ByName(Items):
    def __getitem__(self, index: int) -> Any:
        setattr(self, "last", index)  # noqa: B010
        return index


class CountsOutside(Items):
    def __getitem__(self, index: int) -> Any:
        COUNT["samples"] += 1
        return index


class Noisy(Items):
    def __getitem__(self, index: int) -> Any:
        return torch.randn(3)


def collate_counting(samples: Any) -> Any:
    COUNT["samples"] += len(samples)
    return samples


def typed(source: str) -> Any:
    """A class that has no source to read, as at a prompt."""
    names: dict[str, Any] = {"Items": Items}
    exec(source, names)
    return names["Typed"]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Caches(kept={}), f"dataset.kept {WRITTEN}"),
        (CachesByAnotherName(kept={}), f"dataset.kept {WRITTEN}"),
        (OpensLate(file=None), f"dataset.file {WRITTEN}"),
        (OpensByProperty(), f"dataset.file {WRITTEN}"),
        (CountsInProperty(number=0), f"dataset.number {WRITTEN}"),
        (AsksReader(reader=Reader()), f"dataset.reader.place {WRITTEN}"),
        (Fills(buffer=torch.zeros(3)), f"dataset.buffer {WRITTEN}"),
        (FillsOut(buffer=np.zeros(1)), f"dataset.buffer {WRITTEN}"),
        (Copies(buffer=np.zeros(1)), f"dataset.buffer {WRITTEN}"),
        (Packs(buffer=bytearray(1)), f"dataset.buffer {WRITTEN}"),
        (ReadsInto(buffer=bytearray(1)), f"dataset.buffer {WRITTEN}"),
        (Rotates(rows=deque([1, 2])), f"dataset.rows {WRITTEN}"),
        (ByName(), f"dataset.last {WRITTEN}"),
        (CountsOutside(), f"dataset (the outer COUNT) {WRITTEN}"),
        (Noisy(), f"dataset (Noisy.__getitem__) {DRAWN}"),
        (Subset(Caches(kept={}), [0]), f"dataset.dataset.kept {WRITTEN}"),
        (Items(text=io.BytesIO(b"a")), "dataset.text (BytesIO) keeps a position or settings that each use changes"),
        (
            Items(open=zlib.decompressobj()),
            "dataset.open (Decompress) keeps a position or settings that each use changes",
        ),
        (
            Items(norm=torch.nn.BatchNorm1d(1)),
            "dataset.norm (BatchNorm1d) is in training mode, so each use changes its running statistics; "
            "call .eval() on it",
        ),
        (
            Items(source=random.Random(1)),
            "dataset.source (Random) is a random generator, and it would be random which thread draws which number",
        ),
        (
            Items(rows=iter([1])),
            "dataset.rows (list_iterator) is an iterator, and it would be random which thread gets which item",
        ),
        (
            typed("class Typed(Items):\n  def __getitem__(self, index):\n    self.x = index\n    return index")(),
            f"dataset (something in __getitem__, whose source cannot be read) {WRITTEN}",
        ),
    ],
)
def test_what_threads_cannot_share(dataset: Any, expected: str) -> None:
    assert find_thread_hazards(dataset, default_collate) == (expected,)


@pytest.mark.parametrize(
    "dataset",
    [
        Local(data=[1, 2, 3, 4]),
        TensorDataset(torch.zeros(3)),
        Subset(Local(data=[1]), [0]),
        ConcatDataset([Local(data=[1])]),
        Items(values=np.zeros(3), lock=threading.Lock(), transform=lambda x: x * 2),
        Items(norm=torch.nn.BatchNorm1d(1).eval(), rows=deque([1, 2])),
        Rotates(rows=[Image.new("L", (1, 1))]),
        typed("class Typed(Items):\n  def __getitem__(self, index):\n    return index + 1")(),
    ],
)
def test_what_they_can(dataset: Any) -> None:
    assert find_thread_hazards(dataset, default_collate) == ()


def test_a_mapped_file_can_be_shared_and_one_that_is_read_on_cannot(tmp_path: Path) -> None:
    class Reads(Items):
        def __getitem__(self, index: int) -> Any:
            self.mapped.seek(index)
            return self.mapped.read(1)

    table = np.memmap(tmp_path / "table", np.uint8, "w+", shape=(3,))
    assert find_thread_hazards(Items(table=table)) == ()
    assert find_thread_hazards(Reads(mapped=table._mmap)) == (f"dataset.mapped {WRITTEN}",)


def test_a_collate_function_handles_and_connections() -> None:
    assert find_thread_hazards(Items(), collate_counting) == (f"collate_fn (the outer COUNT) {WRITTEN}",)
    ends = socket.socketpair()
    with tempfile.TemporaryFile() as file:
        found = find_thread_hazards(Items(file=file, ends=ends))
    for end in ends:
        end.close()
    assert "dataset.file is an open file handle, which threads would share; open it in __getitem__ instead" in found
    assert any("is a connection or its client, and replies to several threads" in each for each in found)


def test_an_installed_dataset_that_seeds_the_shared_generator() -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    assert find_thread_hazards(datasets.FakeData()) == (f"dataset (FakeData) {DRAWN}",)
    assert find_thread_hazards(datasets.MNIST.__new__(datasets.MNIST)) == ()


def test_torchvisions_draws_can_be_given_a_generator_and_others_cannot() -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    known = transforms.Compose([transforms.RandomResizedCrop(8), transforms.RandomHorizontalFlip()])

    class RandomCrop:
        def __call__(self, x: Any) -> Any:
            return x

    assert list_shared_draws(Items(transform=known)) == () and draws_random(Items(transform=known)) != ()
    mixed = transforms.Compose([transforms.RandomChoice([known]), RandomCrop()])
    assert list_shared_draws(Items(transform=mixed)) == ("RandomChoice", "RandomCrop")
    assert list_shared_draws(Noisy()) == ("Noisy.__getitem__",)


def test_a_buffer_that_threads_share_does_go_wrong() -> None:
    """The control: what is refused is a fault."""
    meet = threading.Barrier(2, timeout=100)

    class Shared(Fills):
        def __getitem__(self, index: int) -> Any:
            self.buffer.fill_(index)
            meet.wait()
            return self.buffer.clone()

    dataset = Shared(buffer=torch.zeros(1))
    got: dict[int, float] = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: float(dataset[i])})) for i in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert got[0] == got[1] and find_thread_hazards(dataset) != ()
    assert [int(batch) for batch in DataLoader(Items(), batch_size=1)] == [0, 1, 2, 3]
