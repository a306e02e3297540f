"""Where a place cannot be kept, and what is said of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from fastloop import FastLoop
from fastloop.ladder import Ladder, plan
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.rungs.pin import Pin
from fastloop.rungs.prefetch import Prefetch
from tests.bridge.place.resumed import SAMPLES, Recorded, fit, place, shuffled
from tests.feeds.place.samplers import Keeps
from tests.runs import feed_on_cpu, numbered, watching

pytestmark = pytest.mark.usefixtures("on_cpu")
FEED = {"prefetch": {"depth": 2}}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)


class Stream(IterableDataset[Any]):
    """Samples in order, of a known number or not."""

    def __iter__(self) -> Iterator[Any]:
        data = numbered(SAMPLES)
        return (data[number] for number in range(SAMPLES))


class Sized(Stream):
    def __len__(self) -> int:
        return SAMPLES


def notes(loop: FastLoop) -> list[str]:
    return [note for step in loop.plan.planned for note in step.change.notes]


LOST = "a run resumed mid-epoch starts that epoch over: "


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: DataLoader(Stream(), batch_size=8),
            "Stream is an IterableDataset, whose order cannot be drawn again",
        ),
        (
            lambda: DataLoader(Sized(), batch_size=8),
            "Sized is an IterableDataset, whose order cannot be drawn again",
        ),
        (
            lambda: DataLoader(numbered(22), batch_size=8, sampler=Keeps()),
            "sampler.sampler.drawn changes during iteration, and is not a plain value",
        ),
    ],
)
def test_the_plan_says_so_before_the_training(tmp_path: Path, make: Any, reason: str) -> None:
    seen: list[list[str]] = []

    class Looks(Recorded):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(notes(loop))

    loop = watching(FEED)
    torch.manual_seed(0)
    _, _ = fit(None, make(), seed=5, save=tmp_path, module=Looks(), loop=loop, max_epochs=1)
    assert LOST + reason in seen[0]
    assert place(tmp_path / "step=2.ckpt") is None
    resumed, _ = fit(FEED, make(), seed=5, ckpt=tmp_path / "step=2.ckpt", max_epochs=1)
    plain, _ = fit(None, make(), seed=5, ckpt=tmp_path / "step=2.ckpt", max_epochs=1)
    assert resumed.trained == plain.trained, "as Lightning resumes it"


def test_one_rung_says_it() -> None:
    """The first that changes the loader; one that leaves the loader alone says nothing."""
    loader = LoaderFacts(kind="DataLoader", place_lost="planted")
    ladder = Ladder(pin=Pin(enabled=True), prefetch=Prefetch(enabled=True))
    steps = plan(ladder, Facts(device="cuda", loader=loader)).steps
    assert [LOST + "planted" in step.change.notes for step in steps] == [True, False]
    steps = plan(ladder, Facts(device="cuda", loader=LoaderFacts(kind="DataLoader"))).steps
    assert not any(LOST in note for step in steps for note in step.change.notes)


def test_several_loaders(tmp_path: Path) -> None:
    class Both(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

    def make() -> CombinedLoader:
        return CombinedLoader({"a": shuffled(), "b": shuffled()}, "min_size")

    with pytest.warns(UserWarning, match="with several train loaders, a run resumed .* starts that epoch over"):
        fit(FEED, make(), seed=5, save=tmp_path, module=Both(), max_epochs=1)
    assert place(tmp_path / "step=2.ckpt") is None


def test_a_search_for_a_learning_rate_reloads_one_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's Tuner asks for it again in the same epoch, which makes it no second one."""
    monkeypatch.chdir(tmp_path)  # for the Tuner's checkpoint
    module = Recorded()
    module.lr = 0.01
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*several train loaders")
        fit(
            FEED,
            shuffled(),
            seed=5,
            save=tmp_path,
            module=module,
            callbacks=(LearningRateFinder(num_training_steps=4),),
        )
    assert place(tmp_path / "step=2.ckpt")["batches"] == 2


def test_another_order_is_told(tmp_path: Path) -> None:
    """Data that changed under a checkpoint."""
    fit(FEED, shuffled(), seed=5, save=tmp_path, max_epochs=1)
    other = DataLoader(numbered(SAMPLES + 1), batch_size=8, shuffle=True)
    with pytest.warns(UserWarning, match="the sampler draws a different order than before the checkpoint"):
        fit(FEED, other, seed=6, ckpt=tmp_path / "step=3.ckpt", max_epochs=1)


def test_a_line_says_where_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(FEED, shuffled(), seed=5, save=tmp_path)
    loop = FastLoop({"rungs": {"prefetch": {"enabled": True}}, "watch": {"enabled": False}})
    with caplog.at_level(logging.INFO):
        fit(None, shuffled(), seed=6, ckpt=tmp_path / "step=11.ckpt", loop=loop)
    assert loop.measurement is not None and loop.measurement.evidence["resumed"] == {"epoch": 1, "batches": 3}
    assert [each for each in caplog.messages if "continues after" in each] == [
        "fastloop: continues after batch 3 of epoch 1, in the same order (ignore Lightning's warning that the"
        " dataloader is not resumable)"
    ]


def test_the_users_loader_stays_as_it_is(tmp_path: Path) -> None:
    loader = shuffled()
    before = dict(vars(loader))
    fit(FEED, loader, seed=5, save=tmp_path)
    fit(FEED, loader, seed=6, ckpt=tmp_path / "step=11.ckpt")
    assert dict(vars(loader)) == before
