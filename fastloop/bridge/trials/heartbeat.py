"""The pulse of a training in a child process: the step it is at, for whoever waits for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from fastloop.bridge.fit.callback import BATCH_HOOKS
from fastloop.bridge.fit.training import ProgressLines

EVERY_S = 0.5


def hear_only(callback: Callback, *hooks: str) -> None:
    """Keep the Trainer from calling the other hooks of a batch: a call costs microseconds, also of an empty one."""
    for name in BATCH_HOOKS:
        if name not in hooks:
            setattr(callback, name, None)  # Lightning skips what is not callable


class Beats(Callback):
    """Writes ``step steps`` into a file, at most twice a second, on the first rank.

    A slow training is not a hung one: each batch counts, also of a validation, and so does each stage it gets to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next = 0.0
        hear_only(self, "on_train_batch_end")

    @classmethod
    def into(cls, trainer: Any, path: Path) -> None:
        """Let a Trainer beat, in place of the lines for people that nobody would read."""
        trainer.callbacks[:] = [each for each in trainer.callbacks if not isinstance(each, ProgressLines)] + [cls(path)]

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if time.monotonic() >= self._next:
            self._beat(trainer)

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._beat(trainer)

    on_validation_batch_end = on_train_batch_end
    on_train_start = on_train_end = on_exception = setup

    def _beat(self, trainer: Any) -> None:
        self._next = time.monotonic() + EVERY_S
        if not trainer.is_global_zero:
            return
        try:
            self.path.write_text(f"{trainer.global_step} {trainer.max_steps}\n")
        except OSError:  # a full disk; the training may still end
            return
