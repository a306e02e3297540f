"""Pictures travel as bytes, and come out as the floats that the user's transforms make, bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from fastloop.errors import NotApplicable
from fastloop.feeds.batch_tree import BatchWindow
from fastloop.feeds.concatenation import concatenate
from fastloop.feeds.images.byte_batches import AsBytes, ByteSample
from fastloop.feeds.lazy_loader import StandInDataset
from tests.pictures import MEAN, STD, draw_folder

torchvision = pytest.importorskip("torchvision")
from torchvision import datasets  # noqa: E402
from torchvision.transforms import transforms as v1  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

TAILS: dict[str, Callable[[], list[Any]]] = {
    "v1": lambda: [v1.ToTensor(), v1.Normalize(MEAN, STD)],
    "v1 plain": lambda: [v1.ToTensor()],
    "v1 gray": lambda: [v1.ToTensor(), v1.Normalize((0.5,), (0.25,))],
    "v1 in two": lambda: [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), v1.Normalize(MEAN, STD, inplace=True)],
    "v2": lambda: [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(MEAN), list(STD))],
    "v2 crops bytes": lambda: [
        v2.ToImage(),
        v2.ToDtype(torch.uint8, scale=True),
        v2.RandomCrop(16),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(list(MEAN), list(STD)),
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return draw_folder(tmp_path)


def load(dataset: Any, **settings: Any) -> list[Any]:
    torch.manual_seed(5)
    return list(DataLoader(dataset, batch_size=5, shuffle=True, **settings))


@pytest.mark.parametrize("tail", list(TAILS))
def test_the_same_bits(folder: Path, tail: str) -> None:
    kind: Any = v2 if tail.startswith("v2") else v1
    own = datasets.ImageFolder(
        folder, kind.Compose([kind.RandomCrop(20, padding=4), kind.RandomHorizontalFlip(), *TAILS[tail]()])
    )
    ours = (want := AsBytes()).wrap(own)
    plain, fast = load(own), load(ours)
    states = torch.get_rng_state()
    load(own)
    assert torch.equal(states, torch.get_rng_state()), "neither draws more nor less"
    assert {type(batch) for batch in fast} == {ByteSample} and fast[0].image.dtype == torch.uint8
    for expected, batch in zip(plain, fast, strict=True):
        images, labels = want.finish(batch)
        assert torch.equal(images, expected[0]) and images.dtype == expected[0].dtype
        assert images.is_contiguous() and torch.equal(labels, expected[1])
    assert want.evidence() == {"byte_batches": 3}
    assert isinstance(own.transform.transforms[-1], type(TAILS[tail]()[-1])), "the user's own is as it was"


def test_another_normalization_shows(folder: Path) -> None:
    """The control."""
    own = datasets.ImageFolder(folder, v1.Compose([v1.CenterCrop(20), v1.ToTensor(), v1.Normalize(MEAN, STD)]))
    ours = (want := AsBytes()).wrap(own)
    want.live[0].table = torch.nextafter(want.live[0].table, torch.tensor(9.0))
    assert not torch.equal(want.finish(load(ours)[0])[0], load(own)[0][0])


def test_subsets_and_parts(folder: Path) -> None:
    whole = datasets.ImageFolder(folder, v1.Compose([v1.CenterCrop(20), v1.ToTensor()]))
    own = ConcatDataset([Subset(whole, [3, 1, 8]), Subset(whole, [3, 5])])
    ours = (want := AsBytes()).wrap(own)
    for plain, fast in zip(load(own), load(ours), strict=True):
        images, labels = want.finish(fast)
        assert torch.equal(images, plain[0]) and torch.equal(labels, plain[1])
    assert own.datasets[0].dataset is whole and whole[0][0].dtype == torch.float32


class Asked(StandInDataset):
    """Stands in for a dataset, and remembers what it was asked for."""

    _OWN = ("inner", "asked")

    def __init__(self, inner: Any, asked: list[int]) -> None:
        self.inner, self.asked = inner, asked

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.inner[index]


def test_what_stands_in_for_the_dataset_still_does(folder: Path) -> None:
    own = Asked(datasets.ImageFolder(folder, v1.Compose([v1.CenterCrop(20), v1.ToTensor()])), [])
    ours = (want := AsBytes()).wrap(own)
    assert torch.equal(want.finish(load(ours)[0])[0], load(own.inner)[0][0])
    assert sorted(own.asked) == list(range(12)) and type(ours.inner) is Asked and own[0][0].dtype == torch.float32


class Listed(Dataset[Any]):
    """Says where its samples come from."""

    def __init__(self, folder: Path, transform: Any) -> None:
        self.inner, self.transform = datasets.ImageFolder(folder), transform

    def __len__(self) -> int:
        return len(self.inner)

    def image_path_and_label(self, index: int) -> tuple[str, int]:
        return self.inner.samples[index]

    def __getitem__(self, index: int) -> Any:
        image, label = self.inner[index]
        return self.transform(image), label


def test_a_dataset_that_keeps_its_transform_to_itself_is_not_normalized_twice(folder: Path) -> None:
    class Stubborn(Listed):
        def __getitem__(self, index: int) -> Any:
            return v1.ToTensor()(self.inner[index][0].resize((8, 8))), index

    for kind, bytes_came in ((Listed, 3), (Stubborn, 0)):
        own = kind(folder, v1.Compose([v1.Resize((8, 8)), v1.ToTensor()]))
        ours = (want := AsBytes()).wrap(own)
        for plain, fast in zip(load(own), load(ours), strict=True):
            assert torch.equal(want.finish(fast)[0], plain[0])
        assert want.evidence() == {"byte_batches": bytes_came}


def test_a_dataset_that_goes_on_after_its_transform_is_refused(folder: Path) -> None:
    class More(Listed):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image * 2 - 1, label

    class Draws(Listed):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return (image + 0 * torch.rand(1) if image.is_floating_point() else image), label

    for kind, why in ((More, "returns a different image for sample 0"), (Draws, "draws other random numbers than")):
        before = torch.get_rng_state()
        own = kind(folder, v1.Compose([v1.Resize((8, 8)), v1.ToTensor()]))
        with pytest.raises(NotApplicable, match=f"{kind.__name__}'s __getitem__ {why}"):
            AsBytes().wrap(Subset(own, [1]))
        assert torch.equal(before, torch.get_rng_state())


def test_workers_and_pickles_keep_the_mark(folder: Path) -> None:
    own = datasets.ImageFolder(folder, v1.Compose([v1.CenterCrop(20), v1.ToTensor()]))
    ours = pickle.loads(pickle.dumps((want := AsBytes()).wrap(own)))
    assert isinstance(ours, datasets.ImageFolder) and ours.classes == own.classes and len(ours) == len(own)
    for plain, fast in zip(load(own), load(ours, num_workers=2), strict=True):
        assert type(fast) is ByteSample and torch.equal(want.finish(fast)[0], plain[0])


def test_marked_batches_are_found_wherever_they_are(folder: Path) -> None:
    own = datasets.ImageFolder(folder, v1.Compose([v1.CenterCrop(20), v1.ToTensor()]))
    ours = (want := AsBytes()).wrap(own)
    plain, fast = load(own), load(ours)
    other = [torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "name"]
    nested = want.finish({"a": [fast[0], other], "b": (fast[1], None)})
    assert torch.equal(nested["a"][0][0], plain[0][0]) and torch.equal(nested["b"][0][0], plain[1][0])
    assert nested["a"][1] is other and nested["b"][1] is None, "what is not marked is left alone"
    window = BatchWindow(fast[:2])
    assert want.finish(window) is window, "its batches come one by one"
    joined = want.finish(concatenate(fast[:2]))
    assert torch.equal(joined[0], torch.cat([plain[0][0], plain[1][0]])) and len(joined[1]) == 10
