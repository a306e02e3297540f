"""The heartbeat of a training in a child process: each rank writes its step, for the process that supervises it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from fastloop.bridge.apply.loop.known_loops import HOOKS_PER_BATCH
from fastloop.bridge.fit.training import ProgressLines
from fastloop.bridge.watch.session import count_planned_steps

WIDTH = 48
"""Characters of a beat, which overwrites the previous one."""


def drop_other_hooks(callback: Callback, *hooks: str) -> None:
    """Keep the Trainer from calling a callback's other batch hooks: even an empty one costs microseconds."""
    for name in HOOKS_PER_BATCH:
        if name not in hooks:
            setattr(callback, name, None)  # Lightning skips hooks that are not callable


class Beats(Callback):
    """Writes ``step steps process`` into one file per rank: ``beat`` for the first, ``beat.1`` for the next.

    It writes at every batch, so that the exact step is known when a training stops; the file stays open, and a write
    takes microseconds. Validation batches and the start and end of training count too: a slow training is not a hung
    one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._ends_at: int | None = None
        self._most: int | None = None
        """The Trainer's own limit, which a trial raises if each batch takes several optimizer steps."""
        drop_other_hooks(self, "on_train_batch_end")

    @classmethod
    def into(cls, trainer: Any, path: Path) -> None:
        """Add it to a Trainer in place of the progress lines, which nobody would read."""
        trainer.callbacks[:] = [each for each in trainer.callbacks if not isinstance(each, ProgressLines)] + [cls(path)]

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._close()
        rank = trainer.global_rank
        with contextlib.suppress(OSError):  # a full disk; the training may still end
            path = self.path.with_name(f"{self.path.name}.{rank}") if rank else self.path
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._beat(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._beat(trainer)

    on_validation_batch_end = on_train_end = on_train_batch_end

    def on_train_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        planned = count_planned_steps(trainer)  # epochs may end before max_steps
        self._ends_at = None if planned is None else trainer.global_step + planned
        self._most = trainer.max_steps
        do_without_metrics(trainer)  # each fit with a heartbeat is a trial
        self._beat(trainer)

    def on_exception(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._beat(trainer)
        self._close()

    def teardown(self, *_: Any, **__: Any) -> None:
        self._close()

    def _beat(self, trainer: Any) -> None:
        if self._file is not None:
            steps = trainer.max_steps if self._ends_at is None or self._most != trainer.max_steps else self._ends_at
            text = f"{trainer.global_step} {steps} {os.getpid()}".ljust(WIDTH - 1) + "\n"
            with contextlib.suppress(OSError):
                os.pwrite(self._file, text.encode(), 0)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def do_without_metrics(trainer: Any) -> None:
    """Let a Trainer continue if a monitored metric is missing: a trial may end before its first validation, and then
    EarlyStopping and ReduceLROnPlateau would raise. Call in ``on_train_start``, when the schedulers exist.

    Source: ``strict`` of callbacks/early_stopping.py and of ``LRSchedulerConfig`` in utilities/types.py.
    """
    for each in (*trainer.callbacks, *trainer.lr_scheduler_configs):
        if getattr(each, "strict", None) is True:
            each.strict = False
