"""Live figures during a training, in the Trainer's own loggers and on its progress bar.

Not through ``self.log``, which costs a synchronization and some 250 us per step: the loggers get numbers that are
already on the host, every few seconds, and the bar shows one short figure whenever it is drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from lightning.pytorch.utilities import rank_zero_warn

from fastloop.bridge.attributes import replace_method
from fastloop.errors import let_through
from fastloop.records.plan import Undo

EVERY_S = 10.0
PREFIX = "fastloop/"

now = time.monotonic


class LiveMetrics:
    """Writes the figures of a running fit. Does nothing on ranks other than global rank 0.

    Args:
        trainer: used only to read the rank; not kept.
        read: returns the figures by name, without the prefix, from host memory without a synchronization; called when
            they are due. Only finite numbers are written: None means unknown, and a tensor would have to be fetched.
        every_s: seconds between two writes.
    """

    def __init__(self, trainer: Any, read: Callable[[], Mapping[str, Any]], *, every_s: float = EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._on = bool(trainer.is_global_zero)
        self._due = now() + every_s if self._on else math.inf
        self._dropped: list[Any] = []
        self.shown: Mapping[str, str] = {}
        """Figures that the progress bar shows in addition to its own."""

    def tick(self, trainer: Any) -> None:
        """Write figures if due. Call at the end of every optimizer step, while Lightning still counts it as current."""
        if now() < self._due:
            return
        self._due = now() + self._every_s
        figures = self._read()
        self.shown = shorten(figures)
        self._write(trainer, figures)

    def end(self, trainer: Any, figures: Mapping[str, Any]) -> None:
        """Write the figures of the whole fit, once. Call in ``on_train_end``, before the loggers are closed."""
        if self._on:
            self._on, self._due = False, math.inf
            self._write(trainer, figures)

    def show_on_bar(self, trainer: Any) -> Undo:
        """Add the short figures to the Trainer's progress bar. If other code has wrapped our method by the time of the
        undo, it stays and adds nothing from then on."""
        bar = getattr(trainer, "progress_bar_callback", None)
        original: Any = getattr(bar, "get_metrics", None)
        if not self._on or not callable(original):
            return lambda: None

        def get_metrics(*args: Any, **kwargs: Any) -> Any:
            items = original(*args, **kwargs)
            if not self.shown or not isinstance(items, dict):
                return items
            return {**items, **{name: text for name, text in self.shown.items() if name not in items}}

        put_back = replace_method(bar, "get_metrics", get_metrics)

        def undo() -> None:
            self.shown = {}
            put_back()

        return undo

    def _write(self, trainer: Any, figures: Mapping[str, Any]) -> None:
        numbers = {f"{PREFIX}{name}": float(value) for name, value in figures.items() if _is_number(value)}
        if not numbers:
            return
        step = find_logged_step(trainer)
        for logger in trainer.loggers:
            if any(logger is dropped for dropped in self._dropped):
                continue
            try:
                logger.log_metrics(dict(numbers), step=step)
                logger.save()  # as Lightning does after each write; otherwise a file logger would buffer everything
            except Exception as error:
                let_through(error)
                self._dropped.append(logger)
                rank_zero_warn(
                    f"fastloop: live figures in {type(logger).__name__} are now off: {type(error).__name__}: {error}"
                )


def shorten(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the figure that fits on a progress bar: the share of the step in which the device has its data."""
    wait = figures.get("data_wait_pct")
    return {"fed": f"{min(100.0, max(0.0, 100 - wait)):.0f}%"} if _is_number(wait) else {}


def find_logged_step(trainer: Any) -> int:
    """Return the step under which Lightning writes its own metrics; some loggers require that steps never decrease.

    Lightning has no public name for it (`_LoggerConnector.log_metrics`); it equals ``global_step`` for one optimizer.
    """
    step = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "_batches_that_stepped", None)
    return int(trainer.global_step if step is None else step)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
