"""Accumulation windows as loader batches: the Trainer's counters of batches, rescaled to windows and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from fastloop.evidence.worker_limits import count_used_batches
from fastloop.feeds.accumulation_windows import count_batches_between_validations
from fastloop.feeds.window_batches import WindowSampler
from fastloop.records.plan import Undo

_PROGRESS = "epoch_loop.batch_progress"


class Merge:
    """Turns accumulation off and windows on, and keeps batch counters correct.

    Args:
        window: the Trainer's accumulate_grad_batches.
        undo: receives a setting's key and the function that reverts its change.
    """

    def __init__(self, trainer: Any, window: int, *, undo: Callable[[str, Undo], None]) -> None:
        self.trainer, self.window = trainer, window
        self.windows: WindowSampler | None = None
        self._before = (trainer.accumulate_grad_batches, trainer.limit_train_batches, trainer.val_check_interval)
        self._frequencies: list[tuple[Any, int]] = []
        self._batches = 1
        self._counts_windows = False
        trainer.accumulate_grad_batches = 1
        undo("loader.window", self.give_up)

    def make_sampler(self, loader: DataLoader[Any]) -> WindowSampler:
        """Group the loader's batch sampler into windows, within the user's limit_train_batches."""
        _, limit, interval = self._before
        self._batches = count_used_batches(len(loader), limit)
        self.trainer.limit_train_batches = 1.0
        if isinstance(interval, int) or (isinstance(interval, float) and interval != 1.0):
            every = count_batches_between_validations(self._batches, interval)
            self.trainer.val_check_interval = math.ceil(every / self.window)
        sampler: Any = loader.batch_sampler
        self.windows = WindowSampler(sampler, self.window, self._batches)
        return self.windows

    def train_start(self, behind: int | None = None) -> None:
        """Rescale what exists only now: scheduler frequencies, and the counters of a resumed or earlier fit.

        Args:
            behind: batches of the epoch that a resumed run has already done; None if its sampler starts anew.
        """
        for config in self.trainer.strategy.lr_scheduler_configs:
            if config.interval == "step" and config.frequency > 1:
                self._frequencies.append((config, config.frequency))
                config.frequency = _InBatches(config.frequency, self._count_batches)
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if self.windows is not None and self.trainer.fit_loop.restarting and 0 < done < self._batches:
            if behind is None:
                self.windows.limit_once = self._batches - done // self.window * self.window
            else:
                self.windows.limit_once = self._batches - behind
                self.windows.first_once = self.window - behind % self.window
        self._count(self._count_windows)
        self._counts_windows = True

    def write_batch_counts(self, checkpoint: dict[str, Any]) -> None:
        """Write the loop's counters into a checkpoint as a plain run counts them, so that runs with or without us can
        resume it."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get(_PROGRESS)
        if not progress or not self._counts_windows:
            return
        for part in ("total", "current"):
            progress[part] = _recount(progress[part], self._count_batches)

    def count_batches(self, counted: int) -> int:
        """Convert Lightning's count in this epoch to batches of the user's loader."""
        return self._count_batches(counted) if self._counts_windows else counted

    def _count_windows(self, batches: int) -> int:
        """Convert batches to windows, rounded down: a checkpoint inside a window lacks its first batches' gradients."""
        epochs, rest = divmod(batches, self._batches)
        return epochs * math.ceil(self._batches / self.window) + rest // self.window

    def _count_batches(self, windows: int) -> int:
        epochs, rest = divmod(windows, math.ceil(self._batches / self.window))
        return epochs * self._batches + rest * self.window

    def _count(self, convert: Callable[[int], int]) -> None:
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        for part in (progress.total, progress.current):
            part.__dict__.update(_recount(vars(part), convert))

    def give_up(self) -> None:
        """Return to counting batches. Idempotent."""
        trainer = self.trainer
        trainer.accumulate_grad_batches, trainer.limit_train_batches, trainer.val_check_interval = self._before
        if self.windows is not None:
            self.windows.window, self.windows.limit = 1, None
        while self._frequencies:
            config, frequency = self._frequencies.pop()
            config.frequency = frequency
        if self._counts_windows:
            self._counts_windows = False
            self._count(self._count_batches)
            trainer.fit_loop.max_batches = self._batches
            if isinstance(trainer.val_check_interval, (int, float)):
                trainer.val_check_batch = count_batches_between_validations(self._batches, trainer.val_check_interval)


class _InBatches(int):
    """A scheduler's frequency in batches, for which ``windows % frequency`` first converts windows to batches.

    Lightning steps a scheduler when ``batches % frequency == 0``, and the last window of an epoch may be short.
    """

    batches_of: Callable[[int], int]

    def __new__(cls, frequency: int, batches_of: Callable[[int], int]) -> _InBatches:
        number = super().__new__(cls, frequency)
        number.batches_of = batches_of
        return number

    def __rmod__(self, windows: int) -> int:
        return self.batches_of(windows) % int(self)


def _recount(counters: dict[str, int], convert: Callable[[int], int]) -> dict[str, int]:
    """Convert counters to the other unit. Differences between them stay the same, because Lightning relies on them
    (completed is one behind processed while a batch's last hooks run).
    """
    done = convert(counters["processed"])
    return {name: max(0, done + value - counters["processed"]) for name, value in counters.items()}
