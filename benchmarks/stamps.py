"""A callback for runs in which neither fastloop nor the script may be touched; Lightning finds it by its entry points.

It stamps the end of each training batch, and samples what the main thread is doing between the Trainer's construction
and the last batch. Both are written to the file that FIRST_CONTACT_STAMPS names.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback

PLACE = "FIRST_CONTACT_STAMPS"
EVERY_S = 0.005
WAITS = ("_next_data", "_get_data", "_try_get_data", "_take", "wait_for_batch")
"""Functions of a loader that return when a batch is there."""


class Timeline(threading.Thread):
    """Seconds of the main thread by what it was doing, sampled every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.main, self.stopped = threading.main_thread().ident, threading.Event()
        self.spent_s: dict[str, float] = defaultdict(float)

    def run(self) -> None:
        before = time.perf_counter()
        while not self.stopped.wait(EVERY_S):
            frame, now = sys._current_frames().get(self.main or 0), time.perf_counter()
            self.spent_s[name_work(frame)] += now - before
            before = now


def name_work(frame: FrameType | None) -> str:
    """The innermost frame that says what is being done."""
    while frame is not None:
        path, function = frame.f_code.co_filename.replace(os.sep, "/"), frame.f_code.co_name
        if path.endswith(("multiprocessing/process.py", "multiprocessing/context.py")) and function == "start":
            return "starting workers"
        if path.endswith("utils/data/dataloader.py") and function in WAITS:
            return "waiting for a batch"
        if path.endswith("utils/data/dataloader.py") and "shutdown" in function:
            return "stopping workers"
        if "/torch/autograd/" in path and function == "backward":
            return "backward"
        if "/torch/optim/" in path and "step" in function:
            return "optimizer"
        if "/fastloop/" in path:
            return "fastloop " + path.rpartition("/fastloop/")[2].removesuffix(".py") + f".{function}"
        if "/lightning/" not in path and function in ("training_step", "validation_step"):
            return function
        if "/lightning/" in path:
            return "Lightning"
        frame = frame.f_back
    return "other"


class Stamps(Callback):
    """When each training batch ended, on the first rank."""

    def __init__(self) -> None:
        self.built = time.perf_counter()
        self.fits: list[dict[str, Any]] = []
        self.timeline = Timeline()
        self.timeline.start()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.fits.append({"built": self.built, "start": time.perf_counter(), "ends": [], "last": None, "metrics": {}})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = trainer.current_epoch + 1 == trainer.max_epochs and trainer.is_last_batch
        if done or trainer.global_step >= trainer.max_steps > 0:  # before checkpoints are written at the end
            self.finish(trainer)
        self.fits[-1]["ends"].append(time.perf_counter())

    def finish(self, trainer: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        self.fits[-1]["last"] = time.perf_counter()
        self.timeline.stopped.set()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.fits[-1]["last"] is None:
            self.finish(trainer)
        self.fits[-1]["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.write(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.write(trainer)

    def write(self, trainer: Any) -> None:
        if not trainer.is_global_zero:
            return
        with contextlib.suppress(IndexError):
            self.fits[-1]["spent_s"] = dict(self.timeline.spent_s)
        Path(os.environ[PLACE]).write_text(json.dumps(self.fits))


def callbacks() -> list[Callback]:
    return [Stamps()] if os.environ.get(PLACE) else []
