"""Keeps an experiment's runs from writing checkpoints, so that those of the user's real run stay as they are.

A script saves where it always does. In an experiment it would overwrite its real checkpoints, delete old ones to make
room for worthless ones, and start its next run from the files of the last one. So Lightning's operations on checkpoint
files do nothing, for every caller: ModelCheckpoint, other callbacks, ``trainer.save_checkpoint`` in a hook or after the
fit. The content of a checkpoint is still gathered, with all hooks; only the time of writing is missing.

The trial of a configuration has its own directory, and there checkpoints are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from fastloop.bridge.fit import training
from fastloop.bridge.fit.callback import FastLoop
from fastloop.bridge.trials.heartbeat import Beats, drop_other_hooks
from fastloop.config.loading import Config, WatchSettings
from fastloop.errors import FastLoopError

SCRATCH = (".lr_find_", ".scale_batch_size_")
"""Prefixes of files that Lightning's Tuner makes for itself, reads back and deletes. Source: tuner/lr_finder.py,
``_lr_find``, and tuner/batch_size_scaling.py, ``_scale_batch_size``."""


class LeavesAlone:
    """Replaces a method that changes checkpoint files, and calls it for scratch files only.

    Args:
        held_back: called instead of the method.
        inside: a directory below which files are changed as usual.
    """

    def __init__(self, original: Callable[..., Any], held_back: Callable[[], None], inside: Path | None = None) -> None:
        self._original, self._held_back = original, held_back
        self._inside = None if inside is None else inside.resolve()

    def __call__(self, *args: Any, **named: Any) -> Any:
        paths = [Path(each) for each in (*args, *named.values()) if isinstance(each, (str, os.PathLike))]
        if any(path.name.startswith(SCRATCH) for path in paths) or self._are_inside(paths):
            return self._original(*args, **named)
        self._held_back()
        return None

    def _are_inside(self, paths: Sequence[Path]) -> bool:
        where = self._inside
        return where is not None and bool(paths) and all(path.resolve().is_relative_to(where) for path in paths)


class OnlyInside(Callback):
    """Keeps a trial from changing checkpoint files, except those below a directory.

    Args:
        inside: that directory; None: no exceptions.
        marker: a file created as a sign that some files were left alone.
    """

    def __init__(self, inside: Path | None, marker: Path | None = None) -> None:
        self.inside, self.marker = inside, marker
        drop_other_hooks(self)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        keep_back(trainer, self._mark, self.inside)

    def _mark(self) -> None:
        if self.marker is not None:
            with contextlib.suppress(OSError):  # a full disk; the training may still end
                self.marker.touch()


def prepare_trial(trainer: Any, beat: Path | None, inside: Path | None = None, marker: Path | None = None) -> None:
    """Give a Trainer what the fit of each trial has: a heartbeat, and no checkpoint files except those `inside`.

    Args:
        beat: the file that gets the heartbeat, see `heartbeat.py`.
        inside, marker: see `OnlyInside`.
    """
    if beat is not None:
        Beats.into(trainer, beat)
    trainer.callbacks.insert(0, OnlyInside(inside, marker))  # set up first; by then the model's callbacks exist


def keep_back(trainer: Any, held_back: Callable[[], None], inside: Path | None = None) -> None:
    """Keep a Trainer from changing checkpoint files from now on. Call in a callback's ``setup``; idempotent.

    Args:
        held_back: called whenever a file would have been written or deleted.
        inside: a directory whose files it may write and delete.

    Raises:
        FastLoopError: that is impossible. No run is better than one that overwrites.
    """
    links = [(each, "_link_checkpoint") for each in trainer.callbacks]  # save_last="link" deletes what it replaces
    for owner, name in [(trainer.strategy, "save_checkpoint"), (trainer.strategy, "remove_checkpoint"), *links]:
        method = getattr(owner, name, None)
        if method is None or isinstance(method, LeavesAlone):
            continue
        try:
            setattr(owner, name, LeavesAlone(method, held_back, inside))
        except Exception as error:
            raise FastLoopError(
                got=f"{name} of {type(owner).__name__}",
                why=f"it cannot be kept from writing: {error}",
                do="remove checkpoints from this training for the comparison",
            ) from error


class Measured(Exception):
    """Ends a fit after its measurement, without the steps of a regular end: checkpoints, schedulers that miss a metric,
    epoch hooks. ``should_stop`` would not do, because ``min_steps`` overrides it."""


def train_until_measured(config: Config, beat: Path | None, prepare: Callable[[Any, FastLoop], None]) -> None:
    """Train until a callback raises `Measured`. Nothing is resumed, rehearsed, watched, logged or written.

    Args:
        beat: the file that gets the heartbeat, see `heartbeat.py`.
        prepare: called right before the fit, in every rank.

    Raises:
        FastLoopError: as in `training.train`.
    """

    def prepare_both(trainer: Any, loop: FastLoop) -> None:
        prepare(trainer, loop)
        prepare_trial(trainer, beat)  # afterwards, since `prepare` may lift the limit on steps, which a beat repeats

    silent = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    bare = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, resume=None),
        watch=WatchSettings(enabled=False),
        rehearsal="off",
        trainer={**config.trainer, **silent},
    )
    with contextlib.suppress(Measured):
        training.train(bare, None, prepare=prepare_both)
