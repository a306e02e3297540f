"""Image datasets are read into files, labels and steps, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fastloop.feeds.images.reading import NotImages, read_facts, read_source
from fastloop.records.images import (
    CenterCrop,
    ColorJitter,
    ImageFacts,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToFloat,
    ToTensor,
)

torchvision = pytest.importorskip("torchvision")
from torchvision import datasets  # noqa: E402
from torchvision.transforms import transforms as v1  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = Normalize(mean=MEAN, std=STD)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of three pictures."""
    from PIL import Image

    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for number in range(3):
            Image.new("RGB", (20, 16), (number * 20, 0, 90)).save(tmp_path / label / f"{number}.jpg")
    return tmp_path


def read(transform: Any, folder: Path) -> ImageFacts:
    facts = read_facts(datasets.ImageFolder(folder, transform))
    assert isinstance(facts, ImageFacts)
    return facts


def test_both_generations_of_transforms_read_alike(folder: Path) -> None:
    for tv, tail in (
        (v1, [v1.ToTensor(), v1.Normalize(MEAN, STD)]),
        (v2, [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(MEAN), list(STD))]),
    ):
        steps = read(
            tv.Compose(
                [
                    tv.Resize(256),
                    tv.CenterCrop(224),
                    tv.RandomResizedCrop(32, scale=(0.3, 1.0)),
                    tv.RandomCrop(32, padding=4),
                    tv.RandomHorizontalFlip(0.4),
                    tv.ColorJitter(0.4, 0, 0.1, 0.1),
                    *tail,
                ]
            ),
            folder,
        ).steps
        assert steps == (
            Resize(size=256),
            CenterCrop(size=(224, 224)),
            RandomResizedCrop(size=(32, 32), scale=(0.3, 1.0)),
            RandomCrop(size=(32, 32), padding=(4, 4, 4, 4)),
            RandomHorizontalFlip(p=0.4),
            ColorJitter(brightness=(0.6, 1.4), saturation=(0.9, 1.1), hue=(-0.1, 0.1)),
            ToTensor(),
            ToFloat(),
            NORMALIZE,
        )


def test_an_interpolation_may_be_kept_by_its_name(folder: Path) -> None:
    """As torchvision 0.29 keeps it."""
    resize = v2.Resize(256)
    resize.interpolation = "bicubic"
    assert read(resize, folder).steps == (Resize(size=256, interpolation="bicubic"),)


def test_both_generations_pad_the_same_sides(folder: Path) -> None:
    for padding, sides in ((3, (3, 3, 3, 3)), ((1, 2), (1, 2, 1, 2)), ((1, 2, 3, 4), (1, 2, 3, 4))):
        for tv in (v1, v2):
            assert read(tv.RandomCrop(8, padding), folder).steps == (RandomCrop(size=(8, 8), padding=sides),)


def test_a_conversion_to_bytes_changes_no_bytes(folder: Path) -> None:
    """As torchvision's own examples have it. Of a PIL image it makes no tensor, and of floats it makes other bytes."""
    image, to_bytes, to_floats = (
        v2.ToImage(),
        v2.ToDtype(torch.uint8, scale=True),
        v2.ToDtype(torch.float32, scale=True),
    )
    known = read(v2.Compose([image, to_bytes, v2.RandomResizedCrop(32), to_floats]), folder)
    assert known.unknown is None
    assert known.steps == (ToTensor(), ToTensor(), RandomResizedCrop(size=(32, 32)), ToFloat())
    for steps in ([to_bytes, image, to_floats], [image, to_floats, to_bytes]):
        assert read(v2.Compose(steps), folder).unknown == "ToDtype"


def test_the_prefix_ends_before_the_first_draw(folder: Path) -> None:
    facts = read(v1.Compose([v1.Resize((20, 30)), v1.RandomHorizontalFlip(), v1.CenterCrop(8)]), folder)
    assert facts.prefix == (Resize(size=(20, 30)),)


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (v1.RandomRotation(10), "RandomRotation"),
        (lambda image: image, "test_what_is_not_known_is_named.<locals>.<lambda>"),
        (v1.RandomCrop(8, padding_mode="reflect"), "RandomCrop"),
        (v2.ToDtype(torch.float16, scale=True), "ToDtype"),
        (type("Resize", (v1.Resize,), {})(8), "Resize"),
    ],
)
def test_what_is_not_known_is_named(folder: Path, transform: Any, name: str) -> None:
    facts = read(v1.Compose([v1.RandomHorizontalFlip(), transform, v1.ToTensor()]), folder)
    assert facts.steps == (RandomHorizontalFlip(),), "the steps before it are known"
    assert facts.unknown is not None and facts.unknown.rpartition(".")[2] == name.rpartition(".")[2]


def test_parts_and_subsets_find_their_files(folder: Path) -> None:
    whole = datasets.ImageFolder(folder, v1.ToTensor(), target_transform=lambda label: 10 + label)
    joined = ConcatDataset([Subset(whole, [5, 0]), whole])
    source = read_source(joined)
    assert source.count == len(joined) == 8
    found = [source.locate(index) for index in range(8)]
    assert found == [(whole.samples[index][0], 10 + whole.samples[index][1]) for index in (5, 0, 0, 1, 2, 3, 4, 5)]
    assert [label for _, label in found] == [joined[index][1] for index in range(8)]
    assert [source.locate(index) for index in range(-8, 0)] == found
    assert read_source(Subset(joined, [-8])).locate(0) == found[0]
    with pytest.raises(IndexError):
        source.locate(-9)


def test_parts_with_other_transforms_are_refused(folder: Path) -> None:
    parts = [datasets.ImageFolder(folder, v1.ToTensor()), datasets.ImageFolder(folder, v1.Compose([]))]
    with pytest.raises(NotImages, match="different transforms"):
        read_source(ConcatDataset(parts))


class Listed(Dataset[Any]):
    """Says by the documented method where its samples come from."""

    transform = v1.ToTensor()

    def __len__(self) -> int:
        return 2

    def image_path_and_label(self, index: int) -> tuple[str, int]:
        return f"{index}.jpg", index * 3


class Counted(datasets.ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


def test_a_dataset_may_say_it_itself() -> None:
    source = read_source(Listed())
    assert source.locate(1) == ("1.jpg", 3)
    assert source.facts == ImageFacts(steps=(ToTensor(), ToFloat()), count=2)


def test_others_are_refused_with_the_reason(folder: Path) -> None:
    assert "TensorDataset is not an ImageFolder" in str(read_facts(TensorDataset(torch.zeros(2))))
    assert "its own __getitem__" in str(read_facts(Counted(folder)))
    opened = datasets.ImageFolder(folder, loader=lambda path: path)
    assert "opens its files with" in str(read_facts(opened))
