"""The step a training is at, in a file, for whoever waits for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from fastloop.bridge.fit.training import ProgressLines
from fastloop.bridge.trials.heartbeat import Beats
from tests import models


class Looks(L.Callback):
    """What the file says at the end of each batch and of each batch of a validation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.train: list[int] = []
        self.val: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.train.append(said(self.path)[0])

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self.val.append(self.path.stat().st_mtime_ns)


def said(path: Path) -> list[int]:
    """Steps done, steps to be done and process, as a beat says them."""
    return [int(number) for number in path.read_text().split()]


def test_each_batch_beats(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    looks = Looks(path)
    trainer = models.trainer(max_epochs=2, callbacks=[Beats(path), looks], accumulate_grad_batches=2)
    trainer.fit(models.Regression(), models.loader(), models.loader(samples=24))
    assert looks.train == [step // 2 for step in range(1, 17)] and said(path) == [8, 8, os.getpid()]
    assert len(set(looks.val)) == len(looks.val) >= 6, "a validation takes its time, too"


def test_a_limit_that_is_raised_later_is_the_total(tmp_path: Path) -> None:
    """As a trial does where each batch takes several optimizer steps."""

    class Raises(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.fit_loop.epoch_loop.max_steps = 6

    path = tmp_path / "beat"
    models.trainer(max_steps=3, callbacks=[Raises(), Beats(path)]).fit(models.Regression(), models.loader())
    assert said(path) == [6, 6, os.getpid()]


def test_a_beat_leaves_nothing_of_a_longer_one_and_no_open_file(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    path.write_text("9" * 200)
    before = len(os.listdir("/proc/self/fd"))
    models.trainer(max_steps=8, callbacks=[Beats(path)]).fit(models.Regression(), models.loader())
    assert said(path) == [8, 8, os.getpid()] and len(os.listdir("/proc/self/fd")) == before


def test_only_the_hook_it_needs_is_called_for_a_batch(tmp_path: Path) -> None:
    called: list[str] = []

    class Notes(SimpleProfiler):
        def start(self, action_name: str) -> None:
            called.append(action_name)

        def stop(self, action_name: str) -> None: ...

    trainer = models.trainer(max_steps=2, callbacks=[Beats(tmp_path / "beat")], profiler=Notes())
    trainer.fit(models.Regression(), models.loader())
    hooks = {name.rpartition(".")[2] for name in called if "[Callback]Beats" in name}
    assert "on_train_batch_end" in hooks and not hooks & {"on_before_backward", "on_train_batch_start"}


def test_it_takes_the_place_of_the_lines_for_people(tmp_path: Path) -> None:
    trainer = models.trainer(callbacks=[ProgressLines(), Looks(tmp_path)])
    Beats.into(trainer, tmp_path / "beat")
    kinds = [type(callback) for callback in trainer.callbacks]
    assert ProgressLines not in kinds and {Beats, Looks} <= set(kinds)


def test_a_full_disk_is_not_the_end_of_a_training(tmp_path: Path) -> None:
    trainer = models.trainer(max_steps=3, callbacks=[Beats(tmp_path / "no" / "such" / "place")])
    trainer.fit(models.Regression(), models.loader())
    assert trainer.global_step == 3


def test_the_last_step_of_a_training_that_raised(tmp_path: Path) -> None:
    class Raises(models.Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 5:
                raise ValueError("no more")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="no more"):
        models.trainer(max_steps=8, callbacks=[Beats(tmp_path / "beat")]).fit(Raises(), models.loader())
    assert said(tmp_path / "beat") == [5, 8, os.getpid()]
