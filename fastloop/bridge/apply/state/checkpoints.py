"""Removes torch's hooks on saved tensors after a trial failed inside an activation checkpoint."""

from __future__ import annotations

import contextlib
import traceback

import torch.utils.checkpoint

from fastloop.errors import walk_causes


def end_checkpoints(error: BaseException) -> None:
    """End the activation checkpoints that `error` passed through.

    torch keeps a checkpoint's hooks in place for as long as the failed call's frames exist, which is as long as
    anything holds the error. Later checkpoints would count their tensors wrongly: "a different number of tensors was
    saved".
    """
    for cause in walk_causes(error):
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        for frame in reversed(frames):  # inner checkpoints first
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                with contextlib.suppress(RuntimeError):  # it is still running
                    frame.clear()
