"""Cached datasets: bit for bit the user's samples, whatever is done to the user's dataset meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastloop.feeds.cache.datasets import CachedImages, fingerprint_images, list_marked, put_in, read_marked, take_out
from fastloop.feeds.cache.mapped import open_store
from fastloop.feeds.cache.sample_cache import SampleCache
from fastloop.feeds.images.byte_batches import AsBytes
from fastloop.feeds.images.reading import read_source
from tests.feeds.cache.pictures import Arrays, Memory, Unnamed, count_reads, folder, paint, touch
from tests.feeds.dali.folders import damage

AUGMENT = [T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize([0.4] * 3, [0.2] * 3)]
TRANSFORMS = {
    "random from the start": T.Compose(AUGMENT),
    "a resize before": T.Compose([T.Resize(24), T.CenterCrop(20), T.Compose(AUGMENT)]),
    "nothing random": T.Compose([T.Resize((20, 20)), T.ToTensor()]),
    "version 2": v2.Compose(
        [v2.Resize(24), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    ),
    "an unknown one": T.Compose([T.Resize(24), T.RandomRotation(9), T.ToTensor()]),
    "a function": T.Compose([T.Resize(24), np.asarray]),
}


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def cached(dataset: Any, store: Memory | None = None) -> tuple[CachedImages, SampleCache]:
    cache = SampleCache(store or Memory(), 1.0)
    return CachedImages(dataset, cache, fingerprint_images(read_source(dataset))), cache


def epochs(dataset: Any, count: int = 3) -> list[Any]:
    torch.manual_seed(5)
    return [dataset[index] for _ in range(count) for index in range(len(dataset))]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    return bool(np.array_equal(one, other))


def hits(cache: SampleCache) -> tuple[int, int]:
    counts = cache.evidence()
    return counts["hits"], counts["misses"]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_pictures_are_bit_for_bit_the_users(name: str, suffix: str, tmp_path: Path) -> None:
    plain = folder(tmp_path, transform=TRANSFORMS[name], suffix=suffix)
    ours, cache = cached(plain)
    assert same(epochs(plain), epochs(ours)) and hits(cache) == (12, 6)
    assert (epochs(ours, 1)[0][0] is not epochs(ours, 1)[0][0]) and same(epochs(plain), epochs(ours))
    other = folder(tmp_path, transform=T.Compose([T.Resize(17), T.ToTensor()]), suffix=suffix)
    assert not same(epochs(other), epochs(ours)), "the control"


def test_what_is_kept_is_the_picture_after_the_deterministic_steps(tmp_path: Path) -> None:
    sizes = {}
    for name, transform in TRANSFORMS.items():
        ours, cache = cached(folder(tmp_path, transform=transform))
        epochs(ours, 1)
        cache.share = 1.0
        (record, *_) = cache.store.kept.values()  # type: ignore[attr-defined]
        sizes[name] = len(record)
    assert sizes["random from the start"] > 40 * 30 * 3 > sizes["version 2"] > 24 * 32 * 3 > sizes["nothing random"]


def test_what_a_picture_knows_beside_its_pixels_reaches_an_unknown_transform(tmp_path: Path) -> None:
    plain = folder(tmp_path, transform=T.Compose([ImageOps.exif_transpose, T.ToTensor()]), suffix="jpg")
    exif = Image.Exif()
    exif[0x0112] = 6  # lying on its side
    path = plain.samples[0][0]
    Image.open(path).save(path, exif=exif)
    ours, cache = cached(plain)
    assert same(epochs(plain), epochs(ours)) and hits(cache) == (12, 6)
    assert plain[0][0].shape == (3, 40, 30) and plain[1][0].shape == (3, 30, 40)


def test_it_is_the_users_dataset_for_whoever_looks(tmp_path: Path) -> None:
    plain = folder(tmp_path, transform=TRANSFORMS["version 2"], target_transform=lambda label: label + 10)
    ours, _ = cached(plain)
    assert isinstance(ours, ImageFolder) and len(ours) == 6 and ours.classes == ["class0", "class1"]
    assert ours.samples is plain.samples and ours[0][1] == 10
    ours.epoch = 3
    assert plain.epoch == 3
    with pytest.raises(AttributeError):
        ours.nonsense  # noqa: B018


class Own:
    """A dataset that says path and label."""

    def __init__(self, paths: list[str], transform: Any) -> None:
        self.paths, self.transform = paths, transform

    def image_path_and_label(self, index: int) -> tuple[str, Any]:
        return self.paths[index], f"label {index}"

    def __getitem__(self, index: int) -> Any:
        path, label = self.image_path_and_label(index)
        return self.transform(Image.open(path).convert("RGB")), label

    def __len__(self) -> int:
        return len(self.paths)


def test_parts_and_own_datasets(tmp_path: Path) -> None:
    transform = TRANSFORMS["a resize before"]
    one, two = folder(tmp_path / "one", 4, transform), folder(tmp_path / "two", 3, transform)
    own = Own([path for path, _ in one.samples], transform)
    for plain in (Subset(one, [3, 1, 1, 0]), ConcatDataset([one, two]), Subset(ConcatDataset([one, two]), [6, 0]), own):
        ours, cache = cached(plain)
        assert isinstance(ours, type(plain)) and same(epochs(plain), epochs(ours))
        assert sum(hits(cache)) == 3 * len(plain) and hits(cache)[0] >= 2 * len(plain)
        assert same(plain[-1][1], ours[-1][1])


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (1, "spawn")])
def test_through_a_loader_with_workers(workers: int, start: Any, tmp_path: Path) -> None:
    plain = Subset(folder(tmp_path / "pictures", 12, TRANSFORMS["a resize before"]), range(11, -1, -1))
    store = open_store(tmp_path / "store", "a", capacity=10**7, samples=12, info={}, remove=True)
    cache = SampleCache(store, 1.0)
    ours = CachedImages(plain, cache, fingerprint_images(read_source(plain)))

    def epoch(dataset: Any, start: Any = start) -> list[Any]:
        torch.manual_seed(3)
        return list(DataLoader(dataset, 4, num_workers=workers, multiprocessing_context=start))

    expected = epoch(plain, "fork" if workers else None)
    assert same(expected, epoch(ours)) and hits(cache) == (0, 12)
    assert same(expected, epoch(ours)) and hits(cache) == (12, 12), "counted in all processes"
    cache.close()
    assert not (tmp_path / "store").exists()


def test_pictures_that_travel_as_bytes_come_from_the_store(tmp_path: Path) -> None:
    plain = Subset(folder(tmp_path, transform=TRANSFORMS["a resize before"]), [3, 1, 0])
    store = Memory()
    epochs(cached(plain, store)[0], 1)
    ours, cache = cached(plain, store)
    alone, both = AsBytes().wrap(plain), AsBytes().wrap(ours)
    assert same([tuple(each) for each in epochs(alone)], [tuple(each) for each in epochs(both)])
    assert epochs(both)[0].image.dtype == torch.uint8 and hits(cache) == (18, 0)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Of the same size."""
    plain = folder(tmp_path, transform=T.ToTensor(), suffix="bmp")
    ours, cache = cached(plain)
    epochs(ours, 1)
    path = Path(plain.samples[2][0])
    size = path.stat().st_size
    paint(path, 99)
    touch(path)
    assert path.stat().st_size == size and same(epochs(plain, 1), epochs(ours, 1)) and hits(cache) == (5, 7)


def test_another_prefix_misses(tmp_path: Path) -> None:
    store = Memory()
    for side in (24, 20, 24):
        ours, cache = cached(folder(tmp_path, transform=T.Compose([T.Resize(side), T.ToTensor()])), store)
        assert epochs(ours, 1)[0][0].shape[1] == side
    assert len(store.kept) == 12 and hits(cache) == (6, 0)


def widen(plain: Any) -> None:
    plain.transform.transforms[0].size = 28


def replace(plain: Any) -> None:
    plain.transform = T.Compose([T.Resize(28), T.ToTensor()])


def append(plain: Any) -> None:
    plain.transform.transforms.insert(0, T.Pad(3))


def relabel(plain: Any) -> None:
    plain.target_transform = lambda label: label + 1


@pytest.mark.parametrize("change", [widen, replace, append, relabel])
def test_a_dataset_that_is_changed_in_mid_training_makes_its_own_samples(change: Any, tmp_path: Path) -> None:
    plain = folder(tmp_path, transform=T.Compose([T.Resize(24), T.ToTensor()]))
    ours, cache = cached(plain)
    before = epochs(ours, 1)
    change(plain)
    assert same(epochs(plain), epochs(ours)) and not same(before, epochs(ours, 1))
    assert cache.evidence()["changed"] == 4 * len(before) and sum(hits(cache)) == len(before)


def test_a_broken_or_missing_file_says_what_it_says(tmp_path: Path) -> None:
    plain = folder(tmp_path, transform=T.ToTensor())
    Path(plain.samples[0][0]).write_bytes(b"no picture")
    Path(plain.samples[1][0]).unlink()
    ours, _ = cached(plain)
    for index in (0, 1):
        with pytest.raises(Exception) as theirs:
            plain[index]
        with pytest.raises(type(theirs.value)) as mine:
            ours[index]
        assert str(mine.value)[:20] == str(theirs.value)[:20]
    assert same(plain[2], ours[2]) and same(plain[2], ours[2])


@pytest.mark.filterwarnings("ignore:Palette images")
@pytest.mark.parametrize("how", ["CMYK", "L", "RGBA", "P", "16 bit", "turned", "zero bytes", "truncated"])
def test_odd_and_damaged_files_are_what_they_are_without_it(how: str, tmp_path: Path) -> None:
    """D17: the same picture from the store, or the same exception each time, and nothing of it kept."""
    plain = folder(tmp_path, transform=T.ToTensor(), suffix="jpg")
    damage(Path(plain.samples[1][0]), how)
    ours, cache = cached(plain)
    outcomes = []
    for dataset in (plain, ours, ours):
        try:
            outcomes.append(dataset[1])
        except Exception as error:
            outcomes.append((type(error), str(error)[:20]))
    assert same(outcomes[0], outcomes[1]) and same(outcomes[0], outcomes[2])
    assert hits(cache) == ((0, 0) if how in ("zero bytes", "truncated") else (1, 1)), "the fault fired"


# -- marked methods ---------------------------------------------------------------------------------------------------


@pytest.fixture
def kept() -> Iterator[Any]:
    done: list[Any] = []

    def put(dataset: Any, store: Memory | None = None) -> SampleCache:
        cache = SampleCache(store or Memory(), 1.0)
        done.extend(put_in(dataset, cache))
        return cache

    yield put
    take_out(done)


@pytest.mark.parametrize("kind", [Arrays, Unnamed])
def test_marked_methods_are_kept_and_then_are_as_before(kind: Any, tmp_path: Path, kept: Any) -> None:
    data = kind(tmp_path)
    before, attributes = epochs(data), dict(vars(data))
    cache = SampleCache(Memory(), 1.0)
    done = put_in(Subset(ConcatDataset([data, data]), range(12)), cache)
    reads = count_reads()
    assert same(before, epochs(data)) and hits(cache) == (12, 6) and count_reads() == reads + 6
    assert put_in(data, cache) == [], "once"
    take_out(done)
    assert vars(data) == attributes and same(before, epochs(data)) and count_reads() == reads + 6 + 18


def test_marked_methods_are_called_in_any_way(tmp_path: Path, kept: Any) -> None:
    data = Arrays(tmp_path)
    cache = kept(data)
    assert [each["number"] for each in (data.load(2), data.load(index=2), data.load(index=2))] == [2, 2, 2]
    assert hits(cache) == (2, 1)
    for wrong in ({}, {"index": 1, "more": 2}, {"number": 1}):
        with pytest.raises(TypeError, match="argument"):
            data.load(**wrong)


def test_without_the_rung_the_mark_is_nothing(tmp_path: Path) -> None:
    data = Arrays(tmp_path)
    assert Arrays.load.__name__ == "load" and data.load(2)["number"] == 2
    assert list(list_marked(data)) == [(data, "load")] and "load" not in vars(data)


def test_what_a_transform_changes_in_place_is_not_what_is_kept(tmp_path: Path, kept: Any) -> None:
    """K3: the second and the third epoch are the first."""
    data = Arrays(tmp_path)
    kept(data)
    data.noise = 1.0
    first, second, third = (epochs(data, 1) for _ in range(3))
    assert same(first, second) and same(first, third) and first[0][0][0] == 1


def test_a_changed_file_or_attribute_is_noticed(tmp_path: Path, kept: Any) -> None:
    data = Arrays(tmp_path)
    cache = kept(data)
    epochs(data, 1)
    np.save(data.paths[1], np.full(5, 77, dtype=np.int32))
    touch(Path(data.paths[1]))
    assert data[1][0].tolist() == [77] * 5 and hits(cache) == (0, 7)
    data.scale = 3
    assert data[1][0].tolist() == [231] * 5 and data[2][0].tolist() == [6] * 5
    data.scale = 1
    assert data[1][0].tolist() == [77] * 5 and hits(cache) == (1, 9)


def test_another_attribute_at_the_start_misses(tmp_path: Path, kept: Any) -> None:
    store = Memory()
    for scale in (1, 2, 1):
        data = Arrays(tmp_path, scale=scale)
        cache = kept(data, store)
        assert [x[0] for x, _ in epochs(data, 1)] == [scale * number for number in range(6)]
    assert len(store.kept) == 12 and hits(cache) == (6, 0)


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_marked_methods_through_workers(start: str, tmp_path: Path) -> None:
    data = Arrays(tmp_path / "arrays", 8)
    plain = epochs(data, 1)
    store = open_store(tmp_path / "store", "a", capacity=10**6, samples=8, info={}, remove=True)
    cache = SampleCache(store, 1.0)
    done = put_in(data, cache)
    loader = DataLoader(data, None, num_workers=2 if start == "fork" else 1, multiprocessing_context=start)
    for _ in range(2):
        assert same([tuple(map(np.asarray, each)) for each in plain], [tuple(map(np.asarray, x)) for x in loader])
    assert hits(cache) == (8, 8)
    take_out(done)
    cache.close()


def test_odd_indices_and_failing_loads(tmp_path: Path, kept: Any) -> None:
    data = Arrays(tmp_path)
    cache = kept(data)
    assert data[np.int64(2)][1] == 2 and data[2][1] == 2 and hits(cache) == (1, 1)
    assert data[-1][0][0] == 5 and hits(cache) == (1, 2)
    with pytest.raises(IndexError):
        data[6]
    Path(data.paths[0]).unlink()
    with pytest.raises(FileNotFoundError):
        data[0]


class Clever(Arrays):
    @staticmethod
    def decode(x: Any) -> Any:
        return x

    def load(self, index: int) -> Any:
        return super().load(index)


def test_what_marked_methods_say(tmp_path: Path) -> None:
    one, two = read_marked(Arrays(tmp_path)), read_marked(Subset(Arrays(tmp_path), [1]))
    assert one == two and one[1:] == (True, None)
    assert read_marked(Arrays(tmp_path, scale=2))[0] != one[0]
    assert read_marked(Unnamed(tmp_path))[1:] == (False, None)
    odd = Arrays(tmp_path)
    odd.scale = object()  # type: ignore[assignment]
    assert read_marked(odd)[2] == "self.scale (builtins.object) cannot be fingerprinted"
    assert read_marked(Clever(tmp_path))[2] == "", "not marked itself"
    assert read_marked(object())[2] == ""
