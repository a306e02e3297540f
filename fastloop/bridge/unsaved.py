"""Checkpoints of a run that is one of many: not written, so that those of the user's real run stay as they are.

A script saves where it always does. In an experiment it would overwrite its real checkpoints, delete old ones to make
room for worthless ones, and begin its next run from what the last one left. So whatever Lightning does to checkpoint
files leaves them alone, for every caller: ModelCheckpoint, other callbacks, ``trainer.save_checkpoint`` in a hook or
after the fit. What goes into a checkpoint is still gathered, with all hooks; only the time of writing is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastloop.errors import FastLoopError

SCRATCH = (".lr_find_", ".scale_batch_size_")
"""Files that Lightning's Tuner makes for itself, reads back and deletes. Source: tuner/lr_finder.py, ``_lr_find``, and
tuner/batch_size_scaling.py, ``_scale_batch_size``."""


class LeavesAlone:
    """Stands in for a method that changes checkpoint files, and does so for scratch files only.

    Args:
        held_back: called in place of the method.
    """

    def __init__(self, original: Callable[..., Any], held_back: Callable[[], None]) -> None:
        self._original, self._held_back = original, held_back

    def __call__(self, *args: Any, **named: Any) -> Any:
        paths = [Path(each) for each in (*args, *named.values()) if isinstance(each, (str, os.PathLike))]
        if any(path.name.startswith(SCRATCH) for path in paths):
            return self._original(*args, **named)
        self._held_back()
        return None


def keep_back(trainer: Any, held_back: Callable[[], None]) -> None:
    """Let a Trainer leave checkpoint files alone from now on. In a callback's ``setup``; again, it changes nothing.

    Args:
        held_back: called whenever something would have been written or deleted.

    Raises:
        FastLoopError: it cannot be kept from it. Rather no run than one that overwrites.
    """
    links = [(each, "_link_checkpoint") for each in trainer.callbacks]  # save_last="link" deletes what it replaces
    for owner, name in [(trainer.strategy, "save_checkpoint"), (trainer.strategy, "remove_checkpoint"), *links]:
        method = getattr(owner, name, None)
        if method is None or isinstance(method, LeavesAlone):
            continue
        try:
            setattr(owner, name, LeavesAlone(method, held_back))
        except Exception as error:
            raise FastLoopError(got=f"{name} of {type(owner).__name__}", why=f"it cannot be kept from writing: {error}",
                                do="take checkpoints out of this script for the comparison") from error  # fmt: skip
