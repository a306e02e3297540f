"""What a dataset's objects and code say about workers, without taking a sample."""

from __future__ import annotations

import functools
import io
import random
import sqlite3
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fastloop.evidence.model.dataset import draws_random, unpicklable, walk, worker_hazards


class Items(Dataset):
    """Holds what a test gives it."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Counting(Items):
    def __getitem__(self, index: int) -> int:
        self.count += 1
        return index


class CountingInFull(Items):
    def __getitem__(self, index: int) -> int:
        self.seen = self.seen + 1
        return index


class Caching(Items):
    """Writes to itself without counting: every worker fills its own cache, and the samples stay what they are."""

    def __getitem__(self, index: int) -> int:
        self.last = index * 2
        return self.last


class SetsEpoch(Items):
    def set_epoch(self, epoch: int) -> None: ...


def fake(module: str, name: str) -> Any:
    return type(name, (), {"__module__": module})()


def test_a_plain_dataset_is_fit_for_workers() -> None:
    plain = Items(
        paths=["a"] * 10,
        table={"a": 1},
        array=np.zeros(3),
        memory=io.BytesIO(b"x"),
        tensor=torch.zeros(3),
        root=Path("/"),
        transform=str.upper,
    )
    assert worker_hazards(plain) == () and worker_hazards(TensorDataset(torch.zeros(3))) == ()
    assert worker_hazards(Caching()) == () and worker_hazards(Subset(plain, [0])) == ()


@pytest.mark.parametrize(
    ("member", "handle"),
    [
        (fake("h5py._hl.files", "File"), "h5py"),
        (fake("lmdb.cpython", "Environment"), "lmdb"),
        (fake("builtins", "Environment"), "lmdb"),
        (fake("tables.file", "File"), "tables"),
    ],
)
def test_open_handles_are_named(member: Any, handle: str) -> None:
    found = worker_hazards(Subset(Items(store={"train": [member]}), [0]))
    assert found == (f"dataset.dataset.store['train'][0] is an open {handle} handle; open it in __getitem__ instead",)


def test_a_real_sqlite_connection_and_a_real_file(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.db")
    assert worker_hazards(Items(db=connection)) == (
        "dataset.db is an open sqlite3 handle; open it in __getitem__ instead",
    )
    connection.close()
    with open(tmp_path / "a.bin", "wb+") as file:
        assert worker_hazards(Items(f=file)) == ("dataset.f is an open file handle; open it in __getitem__ instead",)


def test_handles_hidden_in_callables_are_found() -> None:
    handle = fake("h5py", "File")

    class Reader:
        def __init__(self) -> None:
            self.h5 = handle

        def read(self, index: int) -> int:
            return index

    def closure(index: int) -> Any:
        return handle, index

    assert worker_hazards(Items(read=Reader().read))[0].startswith("dataset.read.__self__.h5 is an open h5py")
    assert worker_hazards(Items(read=functools.partial(len, handle)))[0].startswith("dataset.read.args[0] is an open")
    assert worker_hazards(Items(read=closure))[0].startswith("dataset.read.<closure handle> is an open h5py")


def test_cuda_tensors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda(torch.Tensor):
        is_cuda = True

    tensor = torch.zeros(2).as_subclass(Cuda)
    assert worker_hazards(TensorDataset(torch.zeros(2), tensor)) == (
        "dataset.tensors[1] is a CUDA tensor, which a forked worker cannot use",
    )


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (SetsEpoch(), "dataset.set_epoch()"),
        (Items(epoch=0), "dataset.epoch"),
        (Items(_epoch=0), "dataset._epoch"),
        (Counting(count=0), "dataset.count"),
        (CountingInFull(seen=0), "dataset.seen"),
        (ConcatDataset([Items(), SetsEpoch()]), "dataset.datasets[1].set_epoch()"),
    ],
)
def test_state_that_changes_between_epochs_is_named(dataset: Any, place: str) -> None:
    expected = f"{place} changes between epochs or samples, and workers hold copies of it"
    assert worker_hazards(dataset) == (expected,)


def test_looking_touches_nothing() -> None:
    class Lazy(Mapping):
        """Like h5py or a remote table: asking loads."""

        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("was asked for a member")

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("was iterated")

        def __len__(self) -> int:
            return 10**9

    class Untouched(Items):
        def __getitem__(self, index: int) -> int:
            raise AssertionError("a sample was taken")

    dataset = Untouched(table=Lazy(), module=types, many=list(range(10**6)))
    assert worker_hazards(dataset) == () and draws_random(dataset) == ()


def test_walking_is_bounded_and_ends_in_circles() -> None:
    ring = Items()
    ring.ring = ring
    deep: Any = "end"
    for _ in range(50):
        deep = [deep]
    wide = Items(ring=ring, deep=deep, many=[[number] for number in range(10_000)])
    paths = [path for path, _ in walk(wide)]
    assert len(paths) < 300 and "dataset.ring" in paths and "dataset.ring.ring" not in paths


class Noisy(Items):
    def __getitem__(self, index: int) -> float:
        return index + random.random()


class Flip:
    def __call__(self, image: Any) -> Any:
        return image if np.random.rand() < 0.5 else -image


class Steady:
    def __call__(self, image: Any) -> Any:
        return image


def jitter(image: Any) -> Any:
    return image + torch.randn(1)


def test_random_draws_are_found_in_code() -> None:
    from torchvision import transforms

    assert draws_random(Noisy()) == ("Noisy.__getitem__",)
    assert draws_random(Items(transform=Flip())) == ("Flip.__call__",)
    assert draws_random(Items(transform=jitter)) == ("jitter",)
    assert draws_random(Items(transform=lambda image: random.choice(image))) == ("<lambda>",)
    assert draws_random(Items(), jitter) == ("jitter",)
    composed = transforms.Compose([transforms.Resize(8), transforms.RandomCrop(8), transforms.ToTensor()])
    assert draws_random(Items(transform=composed)) == ("RandomCrop",)
    assert draws_random(Subset(Noisy(), [0])) == ("Noisy.__getitem__",)
    still = transforms.Compose([transforms.Resize(8), transforms.CenterCrop(8)])
    assert draws_random(Items(transform=still), torch.utils.data.default_collate) == ()
    assert draws_random(Items(transform=Steady()), TensorDataset(torch.zeros(1))) == ()


class Child(Noisy):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + 1


class Deep(Items):
    def __getitem__(self, index: int) -> Any:
        return twice_removed(index)


def twice_removed(index: Any) -> Any:
    return jitter(index)


class ShuffledOnce(Items):
    def __init__(self) -> None:
        super().__init__()
        self.order = torch.randperm(4)


def test_random_draws_are_found_behind_super_and_helper_functions() -> None:
    assert draws_random(Child()) == ("Child.__getitem__",)
    assert draws_random(Deep()) == ("Deep.__getitem__",)
    assert draws_random(ShuffledOnce()) == ()  # drawn before any sample, in the main process either way


def test_unpicklable_names_the_innermost_place() -> None:
    assert unpicklable(Items(a=1)) is None
    found = unpicklable(Items(transform=[str.upper, lambda image: image]))
    assert found is not None and found.startswith("dataset.transform[1] (") and "<lambda>)" in found
    assert unpicklable(Items(deep={"lock": threading.Lock()})) == "dataset.deep['lock'] (lock)"
    assert unpicklable(functools.partial(max, threading.Lock()), "collate_fn") == "collate_fn.args[0] (lock)"
    assert "<lambda>" in str(unpicklable(lambda batch: batch, "collate_fn"))
