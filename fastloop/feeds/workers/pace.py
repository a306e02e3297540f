"""How fast workers' batches come: how many workers would keep up with the training, and whether they save it time."""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastloop.feeds.workers.in_worker import TIMED
from fastloop.numbers import format_short

START_S = 0.05
"""Time to fork a worker from a training process."""
LEAST_BATCHES, LEAST_S = 8, 0.5
"""A pace is measured over at least this many batches, or two per worker if that is more, and this much time."""
WORTH_WAITING = 0.2
"""More workers are worth a try if the training waits for batches for at least this share of its time."""
HEADROOM = 1.5
"""Factor on the number of workers that would keep up if all batches took the same time."""
LOSES = 1.2
"""Workers cost more than they save if batches are waited for longer than this many times what one takes to make."""


class Left(NamedTuple):
    """Batches that the training still has to take; None if unknown."""

    in_epoch: int | None = None
    in_run: int | None = None


class _Span(NamedTuple):
    """The time from one batch to the next, the wait in it, and how many batches the workers finished in it."""

    took_s: float
    waited_s: float
    made: int


class _Sums(NamedTuple):
    """The same over several batches, of which `taken` were taken."""

    took_s: float
    waited_s: float
    made: int
    taken: int

    @property
    def batch_s(self) -> float:
        """Seconds for each batch that was made."""
        return self.took_s / self.made

    @property
    def step_s(self) -> float:
        """Seconds for each batch that was taken, without the wait for it."""
        return (self.took_s - self.waited_s) / self.taken


@dataclass
class Pace:
    """How fast workers have made the last few batches, two or more of each worker: they may finish in bursts. A batch
    counts when it is made, which may be long before it is taken.

    Args:
        workers: their number.
        ready: batches that they could make before any was taken.
    """

    workers: int
    ready: int = 0

    def __post_init__(self) -> None:
        self._spans = deque[_Span]()
        self._took_s = self._waited_s = 0.0
        self._made = 0
        """The sums over `_spans`."""
        self._unsteady = max(self.ready, self.workers)
        """The next batches that do not count, because the workers began them at their start."""
        self._round: list[_Span] | None = None if self.ready else []
        """An epoch's first batches, up to the second one of the first worker; None if some may have been ready."""
        self._ready: int | None = None

    def begin_epoch(self, batches: int | None) -> None:
        """Leave out each worker's first batch if more follow: it could not make that while others were trained on."""
        starts_anew = batches is None or batches >= 2 * self.workers
        self._round = [] if starts_anew and not self.ready else None
        if starts_anew:
            self._unsteady = max(self._unsteady, self.workers)

    def note(self, waited_s: float, took_s: float, ready: int | None = None) -> None:
        """Note a batch: the wait for it, the time since the previous one, and how many are ready after it."""
        before, self._ready = self._ready, ready
        span = _Span(took_s, waited_s, 1 if before is None or ready is None else 1 + ready - before)
        if self._round is not None and len(self._round) <= self.workers:
            self._round.append(span)
        if self._unsteady:
            self._unsteady -= 1
            return
        self._add(span, 1)
        while len(self._spans) > self._least and self._took_s - self._spans[0].took_s >= LEAST_S:
            self._add(self._spans[0], -1)

    def _add(self, span: _Span, sign: int) -> None:
        """Add a span at the end, or remove the first one."""
        if sign > 0:
            self._spans.append(span)
        else:
            self._spans.popleft()
        self._took_s += sign * span.took_s
        self._waited_s += sign * span.waited_s
        self._made += sign * span.made

    @property
    def _least(self) -> int:
        return max(LEAST_BATCHES, 2 * self.workers)

    def _read(self) -> _Sums | None:
        """Return sums over enough batches, or over fewer if these are whole rounds of the workers with long waits; else
        over the time to the first worker's second batch, if the wait for it was long. None if there is nothing yet."""
        count, long_s = len(self._spans), LEAST_S + START_S * self.workers
        is_round = count >= LEAST_BATCHES / 2 and count % self.workers == 0 and self._waited_s >= long_s
        if self._made >= 1 and (is_round or (count >= self._least and self._took_s >= LEAST_S)):
            return _Sums(self._took_s, self._waited_s, self._made, count)
        if self._round is None or len(self._round) <= self.workers:
            return None
        took_s, waited_s = (sum(each) for each in list(zip(*self._round[1:], strict=True))[:2])
        return _Sums(took_s, waited_s, self.workers, self.workers) if waited_s >= LEAST_S else None

    @property
    def batch_s(self) -> float | None:
        """Seconds for each batch that was made; None if unknown."""
        sums = self._read()
        return None if sums is None else sums.batch_s

    def find_more(self, most: int, left: Left, *, loses: bool, stay: bool = False) -> tuple[int, bool] | None:
        """Return the number of workers that would keep up, at most `most`, and whether they should start now rather
        than with the next epoch. None if too few batches were noted, or if more workers would not pay off.

        Args:
            loses: whether batches that the old workers have begun must be made again.
            stay: whether workers stay between epochs: those that start now then also work for the next ones.
        """
        if (sums := self._read()) is None or sums.waited_s < WORTH_WAITING * sums.took_s:
            return None
        batch_s, step_s = sums.batch_s, sums.step_s
        wanted = math.ceil(HEADROOM * self.workers * batch_s / max(step_s, 1e-3))
        workers = min(most, wanted)
        if workers <= self.workers:
            return None
        saved_s = batch_s - max(step_s, batch_s * self.workers / workers)
        # If batches are made again, the first one takes the time that a worker needs for one: `self.workers * batch_s`.
        needed = 2 * (START_S * workers + self.workers * batch_s * loses) / saved_s
        in_epoch, in_run = (math.inf if count is None else count for count in left)
        if (in_run if stay else in_epoch) > needed:
            return workers, True
        return (workers, False) if in_run - in_epoch > needed else None


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
        """Count the epoch that ends here."""
        self._waited_ms += self._epoch_ms
        self._waited_for += self._epoch_batches

    def compare_ready(self) -> tuple[float, float] | None:
        """Return the milliseconds to take a batch that lies ready, and to make one; None while too few are known."""
        made_ms = self._find_made_ms()
        if made_ms is None or len(self._took_ms) < TIMED:
            return None
        return statistics.median(self._took_ms), made_ms

    def explain_loss_of_epochs(self) -> str | None:
        """Return why workers cost more time than they save over whole epochs; None if they do not, or it is unknown. In
        short epochs, no batch is ready when the first one is needed."""
        made_ms = self._find_made_ms()
        if made_ms is None or self._waited_for < TIMED or self._waited_ms <= LOSES * made_ms * self._waited_for:
            return None
        waited, makes = format_short(self._waited_ms / self._waited_for, "ms"), format_short(made_ms, "ms")
        return f"a batch takes {makes} to make, but in epochs this short, waiting for workers takes {waited} a batch"

    def _find_made_ms(self) -> float | None:
        made = [ms for ms in self.made_ms if ms]
        return statistics.median(made) if made else None
