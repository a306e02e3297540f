"""A packed list is the list, item by item, and forked workers that read it do not copy it."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fastloop.feeds.cache.datasets import CachedImages
from fastloop.feeds.cache.sample_cache import SampleCache
from fastloop.feeds.images.byte_batches import ByteDataset
from fastloop.feeds.workers import packed_list
from fastloop.feeds.workers.packed_list import PackedList, Packing, count_packable
from tests.feeds.cache.pictures import Memory

pytestmark = pytest.mark.timeout(200)
ODD = [
    ("/a/b.jpg", 0),
    ("", -1),
    ("/ü/日本.png", 2**62),
    ("/bytes\udcff\udc80.jpg", 5),
    ("lone \ud800", 7),
    ("/a/b.jpg", 0),
]


def test_items_are_those_of_the_list() -> None:
    packed = PackedList(ODD)
    assert len(packed) == len(ODD) and list(packed) == ODD and packed == ODD and packed == copy.deepcopy(packed)
    for index in range(-len(ODD), len(ODD)):
        assert packed[index] == ODD[index] and [type(part) for part in packed[index]] == [str, int]
    for part in (slice(1, 4), slice(None, None, -1), slice(9, 99)):
        assert packed[part] == ODD[part]
    with pytest.raises(IndexError):
        packed[len(ODD)]
    assert pickle.loads(pickle.dumps(packed)) == ODD and ODD[2] in packed and packed.index(ODD[2]) == 2
    assert packed != ODD[:-1] and packed != [*ODD[:-1], ("/a/b.jpg", 1)] and PackedList([]) == []


@pytest.mark.parametrize("item", [("a", 1.0), ["a", 1], ("a", 1, 2), (b"a", 1), ("a", True), ("a", 2**64)])
def test_what_would_not_come_back_the_same_is_not_packed(item: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        PackedList([("a", 1), item])


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """An image folder of 12 files, long enough for this test."""
    datasets = pytest.importorskip("torchvision.datasets")
    image = pytest.importorskip("PIL.Image")
    for label in ("x", "y"):
        (tmp_path / label).mkdir()
        for number in range(6):
            image.new("RGB", (4, 4), (number * 40, 0, 0)).save(tmp_path / label / f"{number}.png")
    monkeypatch.setattr(packed_list, "LONG", 12)
    return datasets.ImageFolder(tmp_path)


def read(dataset: Any) -> list[Any]:
    return [(sample[0].tobytes(), sample[1]) for sample in (dataset[index] for index in range(len(dataset)))]


def test_a_folder_is_copied_and_the_users_stays(folder: Any) -> None:
    before = dict(vars(folder))
    packed = Packing(samples=12).wrap(folder)
    assert type(packed.samples) is PackedList and packed.imgs is packed.samples and packed.samples == folder.samples
    assert type(packed) is type(folder) and len(packed) == 12 and read(packed) == read(folder)
    assert dict(vars(folder)) == before and type(folder.samples) is list


def test_folders_inside_subsets_and_concatenations(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for around in (
        Subset(folder, [3, 11, 0]),
        ConcatDataset([folder, TensorDataset(torch.zeros(1))]),
        Subset(Subset(folder, [1]), [0]),
    ):
        packed = Packing(samples=12).wrap(around)
        assert count_packable(around) == 12 and type(packed) is type(around) and packed is not around
        inner = packed
        while inner is not None and not hasattr(inner, "samples"):
            inner = inner.datasets[0] if hasattr(inner, "datasets") else inner.dataset
        assert type(inner.samples) is PackedList and type(folder.samples) is list
    assert read(Packing(samples=12).wrap(Subset(folder, [3, 11, 0]))) == read(Subset(folder, [3, 11, 0]))
    monkeypatch.setattr(packed_list, "LONG", 13)
    assert count_packable(folder) == 0 and Packing(samples=0).wrap(folder) is folder


def test_folders_behind_what_caches_them_or_sends_bytes(folder: Any) -> None:
    inner = CachedImages(Subset(folder, [3, 11, 0]), SampleCache(Memory(), 1.0), b"")
    packed = Packing(samples=12).wrap(ByteDataset(inner))
    assert type(packed) is ByteDataset and type(packed.inner) is CachedImages
    assert type(packed.inner.inner.dataset.samples) is PackedList and type(folder.samples) is list
    assert packed.inner.sample_cache is inner.sample_cache and read(packed.inner) == read(Subset(folder, [3, 11, 0]))


def test_classes_of_the_users_are_left_alone(folder: Any) -> None:
    class Own(type(folder)):  # type: ignore[misc]
        pass

    own = copy.copy(folder)
    own.__class__ = Own
    assert count_packable(own) == 0 and Packing(samples=12).wrap(own) is own
    folder.samples = [*folder.samples[:-1], ("a", 1.5)]
    assert Packing(samples=12).wrap(folder) is folder


def grow_by_reading(items: Any, pipe: Any) -> None:
    """Bytes of its own memory that a process gains by reading all items, none of which it keeps."""
    process = psutil.Process()
    before = process.memory_full_info().uss
    for index in range(len(items)):
        items[index]
    pipe.send(process.memory_full_info().uss - before)


def measure(items: Any) -> int:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=grow_by_reading, args=(items, writer))
    child.start()
    grown: int = reader.recv()
    child.join(20)
    assert child.exitcode == 0
    return grown


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked here")
def test_a_worker_that_reads_all_of_it_copies_a_list_and_not_a_packed_one() -> None:
    """D8, with the list as the control."""
    samples = [(f"/data/train/n{number // 1300:08d}/n_{number:09d}.JPEG", number // 1300) for number in range(300_000)]
    packed = PackedList(samples)
    assert packed == samples
    listed, ours = measure(samples), measure(packed)
    assert listed > 8 * max(ours, 1)
