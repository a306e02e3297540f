"""Whether workers cost a training more time than they save."""

from __future__ import annotations

import multiprocessing
import statistics
from typing import Any

from fastloop.feeds.workers.in_worker import TIMED
from fastloop.numbers import format_short

LOSES = 1.2
"""Workers cost more than they save if batches are waited for longer than this many times what one takes to make."""


class WorkerCosts:
    """Times of the batches of one loader's workers.

    Attributes:
        made_ms: shared by all workers; each writes its median time per batch there.
    """

    def __init__(self) -> None:
        self.made_ms: Any = ()
        self._took_ms: list[float] = []
        """Times to take a batch that lay ready."""
        self._epoch_ms, self._epoch_batches = 0.0, 0
        """The wait for the batches of the epoch that is loading, its start included."""
        self._waited_ms, self._waited_for = 0.0, 0
        """The same for whole epochs: the first does not count."""

    def provide(self, workers: int) -> None:
        """Make room for the times of as many workers. Persistent ones keep writing into their first array."""
        if len(self.made_ms) < workers:
            self.made_ms = multiprocessing.RawArray("d", workers)

    def begin_epoch(self, start_ms: float) -> None:
        self._epoch_ms, self._epoch_batches = start_ms, 0

    def note(self, took_ms: float, *, was_ready: bool) -> None:
        """Note a batch, and how long the training waited for it."""
        self._epoch_ms, self._epoch_batches = self._epoch_ms + took_ms, self._epoch_batches + 1
        if was_ready:
            self._took_ms.append(took_ms)

    def end_epoch(self) -> None:
        """Count this epoch, of which no more batches are taken."""
        self._waited_ms += self._epoch_ms
        self._waited_for += self._epoch_batches

    def compare_ready(self) -> tuple[float, float] | None:
        """Return the milliseconds to take a batch that lies ready, and to make one; None while too few are known."""
        made_ms = self._find_made_ms()
        if made_ms is None or len(self._took_ms) < TIMED:
            return None
        return statistics.median(self._took_ms), made_ms

    def explain_loss_of_epochs(self) -> str | None:
        """Why workers cost time over whole epochs: in short ones, nothing lies ready when the first batch is wanted."""
        made_ms = self._find_made_ms()
        if made_ms is None or self._waited_for < TIMED or self._waited_ms <= LOSES * made_ms * self._waited_for:
            return None
        waited, makes = format_short(self._waited_ms / self._waited_for, "ms"), format_short(made_ms, "ms")
        return f"a batch takes {makes} to make, but in epochs this short, each was waited for {waited} with workers"

    def _find_made_ms(self) -> float | None:
        made = [ms for ms in self.made_ms if ms]
        return statistics.median(made) if made else None
