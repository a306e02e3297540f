"""Which datasets DALI can load is decided by records alone, and each refusal names what is in the way."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.feeds.dali.pictures import find_obstacle, find_size
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

CROP, FLIP, END = RandomResizedCrop(size=(8, 8)), RandomHorizontalFlip(), (ToTensor(), ToFloat())
NORM = Normalize(mean=(0.5,), std=(0.5,))


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((CROP, FLIP, *END, NORM), None),
        ((ToTensor(), CROP, ToFloat(), NORM, FLIP), None),
        ((CROP, ToTensor()), None),
        ((Resize(size=9), RandomCrop(size=(8, 8), padding=(1, 1, 1, 1)), ColorJitter(contrast=(0.5, 1.5)), *END), None),
        ((CROP,), "the transforms do not end with a tensor (ToTensor, or ToImage and ToDtype)"),
        ((*END, NORM, CROP), "RandomResizedCrop comes after Normalize; DALI works on bytes until then"),
        ((CROP, ToTensor(), NORM), "Normalize is applied to bytes"),
        (
            (Resize(size=9), *END),
            "no transform brings the images to one size (a crop would, or Resize with height and width)",
        ),
        (
            (RandomResizedCrop(size=(8, 8), interpolation="hamming"), *END),
            "RandomResizedCrop with interpolation=hamming: DALI has no such filter",
        ),
        ((Resize(size=9, max_size=12), CROP, *END), "Resize with max_size=12"),
    ],
)
def test_steps(steps: tuple[Any, ...], reason: str | None) -> None:
    assert find_obstacle(ImageFacts(steps=steps, count=3)) == reason


def test_what_is_no_dataset_of_known_steps() -> None:
    assert find_obstacle("it is a list") == "DALI loads datasets of image files only: it is a list"
    unknown = ImageFacts(steps=(CROP,), unknown="Mixup", count=3)
    assert find_obstacle(unknown) == "DALI has no counterpart for the transform Mixup"
    assert find_obstacle(ImageFacts(steps=(CROP, *END))) == "the dataset is empty"


@pytest.mark.parametrize(
    ("steps", "size"),
    [
        ((Resize(size=9),), None),
        ((Resize(size=(20, 30)),), (20, 30)),
        ((Resize(size=(20, 30)), Resize(size=10)), (10, 15)),
        ((Resize(size=9), CenterCrop(size=(7, 8)), FLIP), (7, 8)),
    ],
)
def test_the_size_that_all_pictures_end_with(steps: tuple[Any, ...], size: tuple[int, int] | None) -> None:
    assert find_size(steps) == size
