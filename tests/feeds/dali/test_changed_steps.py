"""Transforms that are changed during the training take effect when they would without DALI."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
pytest.importorskip("torchvision")
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as T

from fastloop.feeds.dali import changed_steps
from fastloop.feeds.dali.engine import DaliLoader
from fastloop.feeds.dali.graph import DaliResources
from fastloop.feeds.images.reading import read_source
from tests.feeds.dali.folders import make_folder, read_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("pictures"))


def make(dataset: Any, **settings: Any) -> DaliLoader:
    loader = DataLoader(dataset, batch_size=4, **settings)
    steps = read_source(dataset).facts.steps
    return DaliLoader(loader, steps, DaliResources(threads=2), batch_size=4, turn_off="rungs.dali.enabled: false")


def resize(size: int) -> Any:
    return T.Compose([T.Resize((size, size)), T.ToTensor()])


def read_sizes(batches: Iterator[Any]) -> list[int]:
    return [pictures.shape[-1] for pictures, _ in batches]


def test_the_next_epoch_has_the_new_transforms(folder: Path) -> None:
    dataset = read_folder(folder, T.Resize((24, 24)), T.CenterCrop(16), T.ToTensor(), T.Normalize([0.5] * 3, [0.2] * 3))
    ours = make(Subset(dataset, range(20)))
    assert read_sizes(ours.load(0)) == [16] * 5
    dataset.transform.transforms[1].size = (8, 8)
    assert read_sizes(ours.load(0)) == [8] * 5
    dataset.transform.transforms[3].mean = [0.0] * 3
    batches = list(zip(ours.load(0), DataLoader(dataset, batch_size=4), strict=True))
    assert all((made - own).abs().max() < 0.1 for (made, _), (own, _) in batches)
    dataset.transform = resize(12)
    assert read_sizes(ours.load(0)) == [12] * 5
    assert ours.images == 80 and not ours.plain_batches


@pytest.mark.parametrize("workers", [0, 1])
def test_in_mid_epoch_they_take_effect_where_the_loader_has_no_workers(folder: Path, workers: int) -> None:
    """Batches that DALI has made ahead are made again."""
    ours = make(dataset := read_folder(folder, *resize(16).transforms), num_workers=workers)
    epoch = ours.load(0)
    before = list(islice(epoch, 2))
    dataset.transform = resize(8)
    batches = [*before, *epoch]
    assert read_sizes(iter(batches)) == [16, 16, *([16] * 3 if workers else [8] * 3)]
    assert torch.cat([labels for _, labels in batches]).tolist() == dataset.targets
    assert read_sizes(ours.load(0)) == [8] * 5 and not ours.plain_batches


def test_persistent_workers_would_not_see_a_change(folder: Path) -> None:
    dataset = read_folder(folder, *resize(16).transforms)
    ours = make(dataset, num_workers=1, persistent_workers=True)
    dataset.transform = resize(12)  # before the first epoch, where they start
    assert read_sizes(ours.load(0)) == [12] * 5
    dataset.transform = resize(8)
    assert read_sizes(ours.load(0)) == [12] * 5


def test_what_dali_cannot_play_comes_from_the_dataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make(dataset := read_folder(folder, *resize(16).transforms))
    list(ours.load(0))
    dataset.transform = T.Compose([T.Resize((8, 8)), T.ToTensor(), T.RandomErasing(1.0)])
    with pytest.warns(UserWarning, match="loaded without DALI from now on") as said:
        assert read_sizes(ours.load(0)) == read_sizes(ours.load(0)) == [8] * 5
    seen = ours.evidence()
    assert len(said) == 1 and seen["images"] == 20 and seen["plain_batches"] == 10
    assert seen["why_plain"] == ("the transforms were changed: DALI has no counterpart for the transform RandomErasing")
    dataset.transform = resize(12)
    assert read_sizes(ours.load(0)) == [12] * 5 and ours.plain_batches == 10
    monkeypatch.setattr(changed_steps, "check_pixels", lambda *_: 1 / 0)
    dataset.transform = resize(10)
    with pytest.warns(UserWarning, match="the transforms were changed: ZeroDivisionError"):
        assert read_sizes(ours.load(0)) == [10] * 5


def test_transforms_that_change_with_every_batch_are_left_to_the_dataset(folder: Path) -> None:
    ours, sizes = make(dataset := read_folder(folder, *resize(16).transforms)), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch in range(2):
            for number, (pictures, _) in enumerate(ours.load(epoch)):
                sizes.append(pictures.shape[-1])
                dataset.transform = resize(8 + number)
    assert sizes == [16, 8, 9, 10, 11, 12, 8, 9, 10, 11]
    assert 0 < ours.plain_batches < 5 and "more than 3 times" in ours.evidence()["why_plain"]
