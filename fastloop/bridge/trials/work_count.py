"""Counts the work of one sample on the model as the user wrote it: eager, no rungs, two samples. For disposable
processes: see `ceilings.py`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from fastloop.bridge.fit import training
from fastloop.bridge.fit.callback import FastLoop
from fastloop.bridge.trials import ceilings
from fastloop.bridge.trials.no_checkpoints import prepare_trial
from fastloop.config.loading import Config, WatchSettings
from fastloop.errors import FastLoopError
from fastloop.evidence.gpu import measured_rates as measured
from fastloop.evidence.work.flops import FlopCount
from fastloop.feeds.batch_tree import CannotRegroup, count_samples
from fastloop.feeds.splitting import cut

FEW = 2
"""Samples to count on; more than one because a BatchNorm after pooling needs more."""


def count_flops(config: Config, beat: Path | None) -> Mapping[str, Any]:
    """Run one step of the bare model on a few samples; returns its work in the form of ``Measurement.flops``.

    Args:
        config: a configuration of one step, see `Job.counted`; its rungs are left out.

    Raises:
        FastLoopError: no step was made.
    """
    counting = _Counting()

    def prepare(trainer: Any, _: FastLoop) -> None:
        prepare_trial(trainer, beat)
        ceilings.replay(trainer, change=lambda batches: [_take_few(batch) for batch in batches[:1]])
        trainer.callbacks.append(counting)

    bare = dataclasses.replace(config, ladder=type(config.ladder)(), watch=WatchSettings(enabled=False), strict=False)
    # Code that the user compiles runs eagerly: under a dispatch mode torch.compile would give up anyway.
    with torch.compiler.set_stance("force_eager"):
        training.train(bare, None, prepare=prepare)
    return counting.count.per(counting.samples or 0, f"a trial, eager, {counting.samples} samples")


def measure_rates() -> Mapping[str, Any]:
    """Measure the rates of this machine's first GPU."""
    if not torch.cuda.is_available():
        raise FastLoopError(got="no CUDA device", why="there is no rate to measure", do="measure on a GPU")
    return dataclasses.asdict(measured.measure(torch.device("cuda", torch.cuda.current_device())))


class _Counting(Callback):
    """Counts from the first batch's start to the end of its backward, or of the batch under manual optimization."""

    def __init__(self) -> None:
        self.count = FlopCount()
        self.samples: int | None = None
        self._open: contextlib.ExitStack | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.samples is None:
            self.samples, self._open = count_samples(batch), contextlib.ExitStack()
            self._open.enter_context(self.count)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module.automatic_optimization:
            self._end()

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._end()
        trainer.should_stop = True  # not by max_steps, because schedules are made for that number of steps

    def on_exception(self, *_: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _take_few(batch: Any) -> Any:
    """Return the first samples of a batch, or the whole batch if it cannot be cut."""
    try:
        return cut(batch, FEW)[0].batch
    except CannotRegroup:
        return batch
