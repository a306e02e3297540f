"""Pictures as bytes, which the prefetch rung plans: when they may, and that the training stays the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fastloop.bridge.apply.staging import Staging
from fastloop.errors import NotApplicable
from fastloop.feeds.cache import places
from fastloop.records.images import ImageFacts, Normalize, RandomCrop, ToFloat, ToTensor
from fastloop.records.measurement import Measurement
from fastloop.rungs.prefetch import Prefetch
from tests.pictures import MEAN, STD, Classifier, Named, draw_folder, same_batches
from tests.rungs.test_prefetch import PREFETCH, facts
from tests.runs import both, distance, feed_on_cpu, run


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)


PHOTOS = ImageFacts(steps=(RandomCrop(size=(8, 8)), ToTensor(), ToFloat(), Normalize(mean=MEAN, std=STD)), count=9)


def test_pictures_are_planned_as_bytes() -> None:
    change = Prefetch(enabled=True).plan(facts({"images": PHOTOS}))
    assert change.wants["dataset.uint8"].device_takes == ("ToFloat", "Normalize")
    assert change.parity == "exact" and change.notes == ()
    assert Prefetch(enabled=True, uint8=True).plan(facts({"images": PHOTOS})).wants == change.wants
    assert set(Prefetch(enabled=True, uint8=False).plan(facts({"images": PHOTOS})).wants) == {"feed.depth"}
    assert set(Prefetch(enabled=True).plan(facts()).may_want) == set(change.wants)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"images": "TensorDataset is not an ImageFolder"}, "TensorDataset is not an ImageFolder"),
        ({"images": ImageFacts(steps=PHOTOS.steps, unknown="RandomErasing")}, "does not know RandomErasing"),
        ({"images": ImageFacts(steps=(ToTensor(),))}, "no transform converts them to floats"),
        (
            {"images": ImageFacts(steps=(*PHOTOS.steps, PHOTOS.steps[0]))},
            "RandomCrop comes after the conversion to floats",
        ),
        ({"images": PHOTOS, "custom_collate": True}, "your own code builds the batches"),
        ({"images": PHOTOS, "own_iterator": True}, "your own code builds the batches"),
        ({"images": PHOTOS, "auto_collates": False}, "your own code builds the batches"),
        ({"images": PHOTOS, "may_change": ("Own.on_train_epoch_end sets .transform",)}, "the dataset may change"),
        ({"images": PHOTOS, "engine": "DALI"}, "DALI makes the batches"),
    ],
)
def test_what_has_to_travel_as_floats(given: dict[str, Any], why: str) -> None:
    change = Prefetch(enabled=True).plan(facts(given))
    assert set(change.wants) == {"feed.depth"}
    said = [note for note in change.notes if note.startswith("images are sent as floats: ") and why in note]
    assert len(said) == isinstance(given["images"], ImageFacts)
    with pytest.raises(NotApplicable, match=r"images cannot be sent as bytes: .*uint8: auto") as refused:
        Prefetch(enabled=True, uint8=True).plan(facts(given))
    assert why in str(refused.value)


def test_bytes_pass_no_transfer_hook_of_the_users() -> None:
    given = facts({"images": PHOTOS}, transfer_hooks=("on_after_batch_transfer",))
    assert set(Prefetch(enabled=True).plan(given).wants) == {"feed.depth"}


@pytest.fixture
def photos(tmp_path: Path) -> Callable[..., Any]:
    """Makes loaders of noisy pictures, cropped and flipped at random."""
    pytest.importorskip("torchvision")
    from torchvision import datasets, transforms

    crop = [transforms.RandomCrop(20, padding=4), transforms.RandomHorizontalFlip()]
    floats = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    folder = datasets.ImageFolder(draw_folder(tmp_path), transforms.Compose([*crop, *floats]))
    return lambda **settings: DataLoader(folder, **{"batch_size": 4, "shuffle": True, **settings})


@pytest.mark.parametrize("fed", [True, False])
@pytest.mark.parametrize(
    ("workers", "merged", "settings"),
    [
        (0, {}, {}),
        (0, {}, {"precision": "64-true"}),
        (2, {}, {"accumulate_grad_batches": 2}),
        (0, {"batch": {"micro_batch": 12}}, {"accumulate_grad_batches": 3}),
    ],
)
def test_the_same_training_on_bytes(
    on_cpu: None,
    photos: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    merged: dict[str, Any],
    settings: dict[str, Any],
    fed: bool,
) -> None:
    """With and without a feed, before and after validation, in windows that another rung merges."""
    if not fed:
        monkeypatch.setattr(Staging, "feed", lambda self, loader, depth, **start: loader)
    val = partial(photos, shuffle=False)
    train = partial(photos, num_workers=workers)
    plain, ours = both({**PREFETCH, **merged}, train, Classifier, val=val, max_epochs=2, **settings)
    assert ours.seen("prefetch")["byte_batches"] == (2 if merged else 6)
    whole = [[torch.cat(column) for column in zip(*each.module.seen, strict=True)] for each in (plain, ours)]
    assert all(torch.equal(a, b) for a, b in zip(*whole, strict=True)) and ours.module.kinds == plain.module.kinds
    assert len(ours.module.seen) == (2 if merged else 6)
    assert distance(plain, ours) == 0 or (merged and distance(plain, ours) < 1e-5)
    assert ours.verdict("prefetch").parity_class == ("exact" if workers else "approximate"), "by the draws of the feed"
    losses = [each.trainer.callback_metrics["val_loss"] for each in (plain, ours)]
    assert torch.equal(*losses) or (merged and torch.allclose(*losses, rtol=1e-5)), "of weights that equal as far"


def test_kept_pictures_travel_as_bytes_too(
    on_cpu: None, photos: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "find_shm_root", lambda: tmp_path / "shm")
    plain, ours = both({"cache": {"store": "shm"}, **PREFETCH}, photos, Classifier, max_epochs=2)
    assert ours.seen("prefetch")["byte_batches"] == 6
    assert ours.seen("cache")["hits"] == 12 and ours.seen("cache")["misses"] == 12
    assert same_batches(plain.module, ours.module) and distance(plain, ours) == 0


def test_threads_make_batches_of_bytes(on_cpu: None, photos: Callable[..., Any]) -> None:
    from torchvision import transforms

    def load() -> Any:
        loader = photos()
        loader.dataset.transform.transforms[:-2] = [transforms.CenterCrop(20)]  # threads share no random numbers
        return loader

    plain, ours = both({"nodes": {"threads": 2}, **PREFETCH}, load, Classifier, max_epochs=2)
    assert ours.reason("nodes") is None and ours.verdict("nodes").took
    assert ours.seen("prefetch")["byte_batches"] == 6 and ours.verdict("prefetch").parity_class == "exact"
    assert same_batches(plain.module, ours.module) and distance(plain, ours) == 0


def test_bytes_that_nobody_makes_floats_of_do_not_train(
    on_cpu: None, photos: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(Staging, "_make_floats", lambda self, moved: moved)
    with pytest.raises(RuntimeError, match="unsigned char"):
        run(PREFETCH, photos(), Classifier, max_epochs=1)


def test_only_the_first_of_several_loaders_sends_bytes(on_cpu: None, photos: Callable[..., Any]) -> None:
    class Two(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert all(type(each) is list and each[0].dtype == torch.float32 for each in batch.values())
            return sum(super(Two, self).training_step(each, batch_idx) for each in batch.values())

    floats, ours = (
        run({"prefetch": {"uint8": uint8}}, {"a": photos(), "b": photos(batch_size=3)}, Two, max_epochs=1)
        for uint8 in (False, "auto")
    )
    assert same_batches(floats.module, ours.module)
    assert "byte_batches" not in floats.seen("prefetch") and ours.seen("prefetch")["byte_batches"] >= 4


def test_a_dataset_that_goes_on_after_its_transform_sends_floats(on_cpu: None, photos: Callable[..., Any]) -> None:
    class More(Named):
        def __getitem__(self, index: int) -> Any:
            path, label = self.inner.samples[index]
            return self.transform(self.inner.loader(path)) * 2 - 1, label

    def load() -> Any:
        return DataLoader(More(photos().dataset), batch_size=4)

    with pytest.warns(
        UserWarning, match="images are sent as floats: More's __getitem__ returns a different image for sample 0"
    ):
        plain, ours = both(PREFETCH, load, Classifier, max_epochs=1)
    assert ours.seen("prefetch")["batches"] == 3 and "byte_batches" not in ours.seen("prefetch")
    assert same_batches(plain.module, ours.module) and distance(plain, ours) == 0


def test_the_report_says_so() -> None:
    seen = {"batches": 16, "ahead_batches": 14, "copied_bytes": 16 * 2**21, "byte_batches": 16}
    assert "16 came as bytes" in Prefetch(enabled=True).verify(Measurement(evidence={"prefetch": seen})).why
