"""When pictures may be kept on the device, and that a training on them is the same training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fastloop.errors import NotApplicable
from fastloop.feeds.dali.planned import DaliEngine
from fastloop.feeds.device_store.engine import DeviceEngine
from fastloop.feeds.device_store.wanted import PicturesOnDevice, plan_on_device
from fastloop.records import store
from fastloop.records.facts import Facts, LoaderFacts
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
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Plan, Step
from fastloop.records.run_files import PlanFile
from fastloop.rungs.cache import Cache
from tests.pictures import MEAN, STD, Classifier, draw_folder, same_batches
from tests.runs import both, distance, feed_on_cpu

FLOATS = (ToTensor(), ToFloat(), Normalize(mean=MEAN, std=STD))
CROP, FLIP = RandomCrop(size=(32, 32), padding=(4, 4, 4, 4)), RandomHorizontalFlip()
CIFAR = LoaderFacts(
    kind="DataLoader",
    images=ImageFacts(steps=(CROP, FLIP, *FLOATS), count=50_000),
    draws_random=("RandomCrop", "RandomHorizontalFlip"),
)
ON_DEVICE: dict[str, Any] = {"cache": {"store": "device"}}
CUDA = Facts(device="cuda", cpu_count=8, local_ranks=2)


def plan(facts: Facts = CUDA, most_bytes: int | None = None, **loader: Any) -> Change:
    return plan_on_device(facts, dataclasses.replace(CIFAR, **loader), most_bytes)


def test_plan() -> None:
    change = plan()
    assert change.wants == {"loader.engine": PicturesOnDevice(device="cuda", workers=4)} and change.parity == "exact"
    assert change.notes == ("decodes all 50,000 samples once and keeps them on the device, in at most 25% of what is"
                            " free there",)  # fmt: skip
    left = change.facts["loader"]
    assert (left.engine, left.on_device, left.num_workers) == ("an image store", True, 0)
    assert "in at most 3 GB" in plan(most_bytes=3 * 10**9).notes[0]
    busy = plan(num_workers=3)
    assert busy.parity == "approximate" and "your 3 workers are not started" in busy.notes[1]
    assert plan(num_workers=3, draws_random=()).parity == "exact"
    for given in (plan(worker_hazards=("an open file",)), plan(dataclasses.replace(CUDA, shm_free_bytes=2**20))):
        assert given.wants["loader.engine"].workers == 0
    photographs = (Resize(size=256), RandomResizedCrop(size=(224, 224)), FLIP, *FLOATS)
    assert plan(images=ImageFacts(steps=photographs), draws_random=("RandomResizedCrop",)).wants
    fixed = (Resize(size=40), CenterCrop(size=(36, 36)), FLIP, *FLOATS)
    assert plan(images=ImageFacts(steps=fixed), draws_random=("RandomHorizontalFlip",)).wants


@pytest.mark.parametrize(
    ("facts", "loader", "why"),
    [
        ({"device": "mps"}, {}, "this run is on mps"),
        (
            {"device": "cpu"},
            {"images": ImageFacts(steps=(RandomResizedCrop(size=(8, 8)), *FLOATS), count=9)},
            "on cpu, where Pillow resizes faster",
        ),
        ({"steps_with_iterator": True}, {}, "fetches its own batches"),
        ({"transfer_hooks": ("on_before_batch_transfer",)}, {}, "your on_before_batch_transfer needs"),
        ({"reload_every_n_epochs": 1}, {}, "would be decoded again"),
        ({}, {"images": "TensorDataset is not an ImageFolder"}, "TensorDataset is not an ImageFolder"),
        ({}, {"engine": "DALI"}, "DALI already loads the samples"),
        ({}, {"custom_collate": True}, "your code builds the batches"),
        (
            {"max_epochs": 1},
            {"batches": 10, "batch_size": 8},
            "draws 80 samples from 50,000: too few repeats to pay off",
        ),
        ({}, {"stateful": True}, "tracks their position"),
        ({}, {"may_change": ("Own.set_epoch",)}, "may change between epochs: Own.set_epoch"),
        ({}, {"sampler_hazards": ("it looks at losses",)}, "it looks at losses"),
        ({}, {"draws_random": ("RandomCrop", "Own.noise")}, "Own.noise also draws random numbers"),
    ],
)
def test_plan_refuses(facts: dict[str, Any], loader: dict[str, Any], why: str) -> None:
    with pytest.raises(NotApplicable, match="images cannot be kept on the device: ") as refused:
        plan(dataclasses.replace(CUDA, **facts), **loader)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ((FLIP, RandomResizedCrop(size=(8, 8)), *FLOATS), "RandomResizedCrop in that position"),
        ((FLOATS[0], RandomResizedCrop(size=(8, 8)), FLOATS[1]), "matches Pillow"),
        ((RandomResizedCrop(size=(8, 8), interpolation="bicubic"), *FLOATS), "only for bilinear interpolation"),
        ((RandomResizedCrop(size=(8, 8)), CROP, *FLOATS), "it crops twice"),
        ((ColorJitter(), *FLOATS), "ColorJitter in that position"),
        ((FLIP, Resize(size=8), *FLOATS), "Resize in that position"),
        ((CROP, FLIP, CROP, *FLOATS), "it crops twice"),
        ((CROP, ToTensor()), "no transform converts them to floats"),
        ((*FLOATS, CROP), "RandomCrop comes after the conversion to floats"),
    ],
)
def test_steps_that_are_not_done_there(steps: Any, why: str) -> None:
    with pytest.raises(NotApplicable, match=why):
        plan(images=ImageFacts(steps=steps), draws_random=())


def test_the_rung_asks_for_it() -> None:
    cache = Cache(enabled=True, store="device", size_gb=2)
    assert cache.plan(CUDA).may_want == ("loader.engine", "evaluation.engine")
    change = cache.plan(dataclasses.replace(CUDA, loader=CIFAR))
    assert change.wants == {"loader.engine": PicturesOnDevice(device="cuda", most_bytes=2 * 10**9, workers=4)}
    seen = {"device_batches": 7, "pictures": 50_000, "kept_bytes": 154_000_000, "fill_s": 3.0}
    taken = cache.verify(Measurement(evidence={"cache": seen}))
    assert taken.took and taken.why == "7 batches made on the device from 50,000 images kept there (154 MB)"
    assert cache.verify(Measurement(evidence={"cache": {**seen, "device_batches": 0}})).took is False


def test_the_plan_can_be_written_down() -> None:
    step = Step(rung="cache", status="planned", change=plan())
    step.change.wants["loader.engine"].live.append(object())
    written = store.to_json(PlanFile.of(Plan(steps=(step,))))
    assert "live" not in str(written) and "'device': 'cuda'" in str(written)


@pytest.fixture
def photos(tmp_path: Path) -> Callable[..., Any]:
    """Makes loaders of noisy pictures, cropped and flipped at random."""
    pytest.importorskip("torchvision")
    from torchvision import datasets, transforms

    crop = [transforms.RandomCrop(20, padding=4), transforms.RandomHorizontalFlip()]
    floats = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    folder = datasets.ImageFolder(draw_folder(tmp_path), transforms.Compose([*crop, *floats]))
    return lambda **settings: DataLoader(folder, **{"batch_size": 5, "shuffle": True, **settings})


@pytest.mark.parametrize(
    "settings", [{}, {"precision": "64-true"}, {"accumulate_grad_batches": 2}, {"limit_train_batches": 2}]
)
def test_the_same_training(photos: Callable[..., Any], settings: dict[str, Any]) -> None:
    val = partial(photos, shuffle=False)
    plain, ours = both(ON_DEVICE, photos, Classifier, val=val, max_epochs=3, **settings)
    assert ours.seen("cache")["device_batches"] >= len(ours.module.seen) > 0
    assert same_batches(plain.module, ours.module) and distance(plain, ours) == 0
    assert ours.module.kinds == plain.module.kinds
    states = zip(plain.module.random_states, ours.module.random_states, strict=True)
    assert all(torch.equal(one, other) for one, other in states)
    assert ours.verdict("cache").took and ours.verdict("cache").parity_class == "exact"
    assert torch.equal(plain.trainer.callback_metrics["val_loss"], ours.trainer.callback_metrics["val_loss"])


def test_windows_and_a_feed(photos: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What other rungs put around a loader goes around the engine, too."""
    feed_on_cpu(monkeypatch)
    rungs: Any = {**ON_DEVICE, "prefetch": {}, "batch": {"micro_batch": 12}}
    plain, ours = both(rungs, partial(photos, batch_size=4), Classifier, max_epochs=2, accumulate_grad_batches=3)
    assert ours.seen("cache")["device_batches"] == 2 and "byte_batches" not in ours.seen("prefetch")
    whole = [[torch.cat(column) for column in zip(*each.module.seen, strict=True)] for each in (plain, ours)]
    assert all(torch.equal(a, b) for a, b in zip(*whole, strict=True)) and len(ours.module.seen) == 2


def test_without_the_draws_it_is_another_training(photos: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    load = DeviceEngine.load

    def draw_one_more(self: DeviceEngine, seed: int) -> Any:
        for batch in load(self, seed):
            torch.rand(1)
            yield batch

    monkeypatch.setattr(DeviceEngine, "load", draw_one_more)
    plain, ours = both(ON_DEVICE, photos, Classifier, max_epochs=1)
    assert not same_batches(plain.module, ours.module) and distance(plain, ours) > 1e-6


def test_what_cannot_be_proven_is_left_to_the_loader(
    photos: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceEngine, "make", lambda self, indices: [torch.zeros(3, 3, 20, 20), torch.zeros(3)])
    plain, ours = both(ON_DEVICE, photos, Classifier, max_epochs=1)
    assert same_batches(plain.module, ours.module) and distance(plain, ours) == 0
    assert ours.reason("cache") is not None and "differs from the dataset's" in ours.reason("cache")


@pytest.mark.parametrize("differs", [True, False])
def test_it_takes_the_place_of_an_engine_that_was_refused(
    photos: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, differs: bool
) -> None:
    """Each engine is checked before it is used, the second one, too."""
    pytest.importorskip("nvidia.dali")

    def refuse(*_: Any) -> Any:
        raise NotApplicable("planted")

    monkeypatch.setattr(DaliEngine, "check", refuse)
    if differs:
        monkeypatch.setattr(DeviceEngine, "make", lambda self, indices: [torch.zeros(3, 3, 20, 20), torch.zeros(3)])
    plain, ours = both({"dali": {}, **ON_DEVICE}, photos, Classifier, max_epochs=2)
    assert str(ours.reason("dali")) == "planted" and ours.verdict("cache").took is not differs
    assert same_batches(plain.module, ours.module) and distance(plain, ours) == 0


@pytest.mark.parametrize("differs", [True, False])
def test_auto_takes_shared_memory_where_the_device_fails(
    photos: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, differs: bool
) -> None:
    monkeypatch.setattr(Cache, "_suits_device", lambda self, *_: self.store == "auto")
    if differs:
        monkeypatch.setattr(DeviceEngine, "make", lambda self, indices: [torch.zeros(3, 3, 20, 20), torch.zeros(3)])
    plain, ours = both({"cache": {}}, photos, Classifier, max_epochs=2)
    assert ours.verdict("cache").took and ("device_batches" in ours.seen("cache")) is not differs
    assert not differs or (ours.seen("cache")["store"] == "shm" and ours.seen("cache")["hits"] > 0)
    assert same_batches(plain.module, ours.module) and distance(plain, ours) == 0


@pytest.mark.parametrize("differs", [True, False])
def test_dali_loads_where_the_device_would_have_gone_first_and_fails(
    photos: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, differs: bool
) -> None:
    pytest.importorskip("nvidia.dali")
    monkeypatch.setattr(Cache, "_suits_device", lambda self, *_: self.store == "auto")
    if differs:
        monkeypatch.setattr(DeviceEngine, "make", lambda self, indices: [torch.zeros(3, 3, 20, 20), torch.zeros(3)])
    _, ours = both({"dali": {}, "cache": {}}, photos, Classifier, max_epochs=2)
    assert (ours.verdict("dali").took, ours.verdict("cache").took) == (differs, not differs)
    if differs:
        assert "differs from the dataset's" in str(ours.reason("cache")) and ours.seen("dali")["images"] > 0
    else:
        assert ours.reason("dali") == "an image store already loads the samples"


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n no picture"])
def test_a_picture_that_cannot_be_decoded_is_the_loaders_matter(
    photos: Callable[..., Any], tmp_path: Path, content: bytes
) -> None:
    """The user's sampler never asks for it, and so the training goes on."""
    (tmp_path / "dog" / "999.png").write_bytes(content)
    photos().dataset.samples.append((str(tmp_path / "dog" / "999.png"), 1))
    plain, ours = both(ON_DEVICE, partial(photos, shuffle=False, sampler=range(12)), Classifier, max_epochs=1)
    assert "cannot identify image file" in str(ours.reason("cache"))
    assert same_batches(plain.module, ours.module) and distance(plain, ours) == 0
