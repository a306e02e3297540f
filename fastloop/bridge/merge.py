"""Accumulation windows as loader batches: the Trainer's counters of batches, rescaled to windows and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from fastloop.feeds.windows import WindowSampler

_PROGRESS = "epoch_loop.batch_progress"


class Merge:
    """Turns accumulation off and windows on, and keeps what counted batches right.

    Args:
        window: the Trainer's accumulate_grad_batches.
        undo: takes a rung's name and what puts its change back.
    """

    def __init__(self, trainer: Any, window: int, *, undo: Callable[[str, Callable[[], None]], None]) -> None:
        self.trainer, self.window = trainer, window
        self.windows: WindowSampler | None = None
        self._before = (trainer.accumulate_grad_batches, trainer.limit_train_batches, trainer.val_check_interval)
        self._frequencies: list[tuple[Any, int]] = []
        self._batches: int | None = None
        trainer.accumulate_grad_batches = 1
        undo("batch", self.give_up)

    def sampler(self, loader: DataLoader[Any]) -> WindowSampler:
        """The loader's batch sampler in windows, within the user's limit_train_batches."""
        _, limit, interval = self._before
        batches = len(loader)
        self._batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        self.trainer.limit_train_batches = 1.0
        if isinstance(interval, int):
            self.trainer.val_check_interval = interval // self.window
        elif isinstance(interval, float) and interval != 1.0:
            every = max(1, int(self._batches * interval))
            self.trainer.val_check_interval = max(1, round(every / self.window))
        self.windows = WindowSampler(loader.batch_sampler, self.window, self._batches)
        return self.windows

    def train_start(self) -> None:
        """Rescale what exists only now: scheduler frequencies, and the counters of a resumed run."""
        for config in self.trainer.strategy.lr_scheduler_configs:
            if config.interval == "step" and config.frequency > 1 and not self._frequencies_hold(config):
                self._frequencies.append((config, config.frequency))
                # Lightning steps a scheduler where the batch count divides by its frequency: every f / gcd windows.
                config.frequency = config.frequency // math.gcd(config.frequency, self.window)
        if self.trainer.ckpt_path is not None:
            progress = self.trainer.fit_loop.epoch_loop.batch_progress
            for part in (progress.total, progress.current):
                part.__dict__.update(_recount(vars(part), self._windows_of))

    def _frequencies_hold(self, config: Any) -> bool:
        return any(held is config for held, _ in self._frequencies)

    def to_batches(self, checkpoint: dict[str, Any]) -> None:
        """Write the loop's counters into a checkpoint as the plain run counts them, so that either run resumes it."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get(_PROGRESS)
        if not progress:
            return
        for part in ("total", "current"):
            progress[part] = _recount(progress[part], self._batches_of)

    def _windows_of(self, batches: int) -> int:
        epochs, rest = divmod(batches, self._batches or 1)
        return epochs * math.ceil((self._batches or 1) / self.window) + rest // self.window

    def _batches_of(self, windows: int) -> int:
        epochs, rest = divmod(windows, math.ceil((self._batches or 1) / self.window))
        return epochs * (self._batches or 1) + rest * self.window

    def give_up(self) -> None:
        """Count batches again. Idempotent."""
        trainer = self.trainer
        trainer.accumulate_grad_batches, trainer.limit_train_batches, trainer.val_check_interval = self._before
        if self.windows is not None:
            self.windows.window = 1
        while self._frequencies:
            config, frequency = self._frequencies.pop()
            config.frequency = frequency


def _recount(counters: dict[str, int], convert: Callable[[int], int]) -> dict[str, int]:
    """Counters in the other unit. Lightning reads the lag between them (completed behind ready by one): it stays."""
    ready = convert(counters["ready"])
    return {name: max(0, ready - (counters["ready"] - value)) for name, value in counters.items()}
