"""More worker processes for a loader whose workers, possibly the user's own, do not keep up.

The waits for batches are timed. If more workers would save more time than starting them costs, they take over, in the
middle of an epoch or at the start of the next one, from the next indices on: the old workers still deliver the batches
that they have begun, in the same order. If batches then come no faster, the old number of workers is restored. Later
runs start with the larger number, unless it failed or was no faster.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import active_children
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from fastloop.errors import let_through, quote
from fastloop.evidence import loader_queue
from fastloop.evidence.samples.state_mark import StateMark
from fastloop.evidence.worker_limits import fit_in_shm
from fastloop.feeds.batch_tree import walk_storage
from fastloop.feeds.lazy_loader import Epochs, begin_unchanged, name_sampler, parts_in_place
from fastloop.feeds.workers.ending import end_workers, kill_started
from fastloop.feeds.workers.pace import Left, Pace
from fastloop.feeds.workers.pending_indices import PendingIndices
from fastloop.feeds.workers.tried_workers import LOOK_S
from fastloop.numbers import format_short
from fastloop.records.plan import say_count

LEAST_GAIN = 1.05


@dataclass(frozen=True, kw_only=True)
class FoundWorkers:
    """The number of workers that a run found to keep up."""

    workers: int = 0
    before_s: float | None = None
    """Seconds for each batch with fewer workers."""
    then_s: float | None = None
    """The same with this number; None if the run ended too early to tell."""
    batch_bytes: int = 0


class _Fewer(NamedTuple):
    """The workers that there were before, and the seconds that each of their batches took."""

    workers: int
    batch_s: float | None


class MoreWorkers:
    """The epochs of a loader that may get more workers.

    Args:
        most: limit on the number of workers.
        count_left: returns how many batches the training still has to take.
        tell: receives a line when the number of workers has changed.
        epochs: makes the batches of an epoch.
        room_bytes: free shared memory for this process's batches; None if unknown.
        is_training: whether the training itself requests an epoch now, not a callback.
        found: what an earlier run found, to start with; None if unknown.
        keep: receives what this run finds.
    """

    def __init__(
        self,
        most: int,
        *,
        count_left: Callable[[], Left],
        tell: Callable[[str], None],
        epochs: Epochs = begin_unchanged,
        room_bytes: int | None = None,
        is_training: Callable[[], bool] = lambda: False,
        found: FoundWorkers | None = None,
        keep: Callable[[FoundWorkers], None] = lambda _: None,
    ) -> None:
        self.most, self._count_left, self._tell, self._epochs = most, count_left, tell, epochs
        self._room_bytes, self._is_training = room_bytes, is_training
        self._found, self._keep, self._batch_bytes = found, keep, 0
        self._repeats = epochs is not begin_unchanged
        """Whether the old workers end at a change, and new ones make again what they had begun."""
        self._pending = PendingIndices()
        self._iterator: Callable[[], Any] = lambda: None
        """Returns the iterator that receives the workers' batches."""
        self._epoch = self._loading = 0
        """Numbers of the last epoch and of the one that is loading; 0 for none."""
        self._mark: StateMark | None = None
        self._pace: Pace | None = None
        self._before: _Fewer | None = None
        """The first workers, once there are more."""
        self._next: int | None = None
        """The number of workers for the next epoch, if it changes."""
        self.change: str | None = None
        """How the number of workers changed, in words; None if it has not."""
        self.is_faster: bool | None = None
        """Whether batches come faster with more; None if unknown."""

    def batches(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the batches of one epoch, which begins with this call; `begin` makes the loader's iterator."""
        if not loader.num_workers:  # a trial's replayed batches do not ask the sampler
            return self._epochs(loader, begin)
        if self._loading and loader._iterator is None and not self._is_training():  # a callback also reads the loader
            return self._epochs(loader, begin)
        self._pending.begin_epoch()
        if self._before is None:
            self._mark = StateMark(dataset=loader.dataset, collate_fn=loader.collate_fn)
        if self._next is not None:
            if self._before is not None and loader.num_workers == self._before.workers:
                _set_number(loader, self._next)
            self._next = None
        found, self._found = self._found, None
        if found is not None and found.workers > loader.num_workers:
            source = self._begin_with(found, loader, begin)
        else:
            source = self._begin(loader, begin)
        if self._pace is not None:
            self._pace.begin_epoch(loader_queue.count_batches(loader))
        return self._load(loader, begin, source)

    def _load(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], source: Any) -> Iterator[Any]:
        self._epoch += 1
        self._loading = number = self._epoch
        then = None
        try:
            last = time.perf_counter()
            while True:
                asked = time.perf_counter()
                try:
                    batch = next(source)
                except StopIteration:
                    if then is None:
                        return
                    end_workers(source)
                    source, then = then, None
                    continue
                except Exception as error:
                    if (workers := self._find_old_number(error)) is None:
                        raise
                    end_workers(then)
                    source, then = self._start_anew(loader, begin, source, workers), None
                    continue
                self._pending.pending.popleft()
                now = time.perf_counter()
                if then is None and (found := self._note(loader, batch, now - asked, now - last)) is not None:
                    if self._repeats:
                        source = self._start_anew(loader, begin, source, found)
                    else:
                        then = self._start_beside(loader, begin, found)
                last = now
                yield batch
        finally:
            self._loading = 0 if self._loading == number else self._loading

    def _begin_with(self, found: FoundWorkers, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Any:
        """Start the first epoch with the workers that an earlier run found, if there is room for their batches and they
        can start; else with the loader's own."""
        own, ahead, others = loader.num_workers, loader.prefetch_factor or 1, active_children()
        room = self._room_bytes
        if room is not None and fit_in_shm(found.workers, ahead, found.batch_bytes, room) != (found.workers, ahead):
            return self._begin(loader, begin)
        _set_number(loader, found.workers)
        try:
            source = self._begin(loader, begin)
        except Exception as error:
            let_through(error)
            if self._pending.has_raised(error):
                raise
            kill_started(others, LOOK_S)
            self._pending.resumes = bool(self._pending.pending)
            self._keep_found(own, None)
            _set_number(loader, own)
            return self._begin(loader, begin)
        self._before, self._batch_bytes = _Fewer(own, found.before_s), found.batch_bytes
        self.change = f"{found.workers} workers from the start instead of {own}, as an earlier run found"
        if found.then_s is not None and found.before_s is not None:
            self.is_faster = True
            self.change += f": {_compare_s(found.then_s, found.before_s)}"
        return source

    def _start_beside(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], workers: int) -> Any:
        """Start `workers` workers for the batches that the current ones have not begun; return their iterator. If they
        cannot start, return None; the current ones then continue."""
        old, kept, pace, others = loader.num_workers, loader._iterator, self._pace, active_children()
        self._pending.hand_over()
        loader.__dict__["_iterator"] = None
        _set_number(loader, workers)
        try:
            return self._begin(loader, begin, beside=True)
        except Exception as error:
            let_through(error)
            if self._pending.has_raised(error):
                raise
            kill_started(others, LOOK_S)
            self._pending.take_back()
            loader.num_workers, loader.__dict__["_iterator"], self._pace = old, kept, pace
            self.is_faster, self.change = False, f"{say_count(old, 'worker')} as before: {quote(error, briefly=True)}"
            self._keep_found(old, None)
            return None

    def _start_anew(
        self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], source: Any, workers: int
    ) -> Any:
        """End the current workers, and let `workers` new ones make the batches that were not delivered."""
        end_workers(source)
        if hasattr(source, "close"):  # a generator, whose iterator ends with it
            source.close()
        self._pending.resumes, self._pending.goes_on = True, False
        _set_number(loader, workers)
        return self._begin(loader, begin)

    def _find_old_number(self, error: Exception) -> int | None:
        """Return the old number of workers if having more may have caused this error, such as too little memory, or a
        ``worker_init_fn`` for fewer workers; else None. If the dataset raised it, it will do so again."""
        before, now = self._before, self._pace
        if self._repeats or before is None or now is None or self._pending.has_raised(error):
            return None
        if now.workers <= before.workers:
            return None
        self.is_faster = False
        self.change = f"{say_count(before.workers, 'worker')} again: {quote(error, briefly=True)}"
        self._keep_found(before.workers, None)
        return before.workers

    def _begin(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], *, beside: bool = False) -> Any:
        """Start the loader's iterator on our indices; the loader keeps its own sampler."""
        name = name_sampler(loader)
        self._pending.inner = getattr(loader, name)
        if self._pace is None or self._pace.workers != loader.num_workers:
            ready = loader.num_workers * int(loader.prefetch_factor or 1)
            self._pace = Pace(loader.num_workers, ready if beside else 0)

        def begin_noted() -> Iterator[Any]:
            iterator = begin()
            self._iterator = weakref.ref(iterator)  # weak: its workers end when nothing refers to it
            return iterator

        with parts_in_place(loader, {name: self._pending}):
            return self._epochs(loader, begin_noted)

    def _note(self, loader: DataLoader[Any], batch: Any, waited_s: float, took_s: float) -> int | None:
        """Note a batch's times; return the number of workers to change to, None to keep the current one."""
        pace, before = self._pace, self._before
        if pace is not None and before is not None and not loader.num_workers and pace.workers > before.workers:
            self.is_faster, self.change = False, f"no workers in the end: {pace.workers} could not be used"
            self._keep_found(before.workers, None)
            self._pace = pace = None
        if pace is None or not loader.num_workers or self._next is not None:
            return None
        if self.is_faster is None:
            pace.note(waited_s, took_s, loader_queue.count_ready(self._iterator()))
        return self._find_more(loader, batch, pace) if self._before is None else self._compare(self._before, pace)

    def _find_more(self, loader: DataLoader[Any], batch: Any, pace: Pace) -> int | None:
        """Return the number of workers to change to now, or set it for the next epoch; None if this number stays."""
        stay = bool(loader.persistent_workers)
        found = pace.find_more(self.most, self._count_left(), loses=self._repeats, stay=stay)
        if found is None:
            return None
        workers, is_now = self._fit(loader, batch, found[0]), found[1]
        if workers <= pace.workers:
            self.most = pace.workers
            return None
        self._before = _Fewer(pace.workers, pace.batch_s)
        self._keep_found(workers, None)
        self.change = f"{workers} workers instead of {pace.workers}; the run ended before they could be timed"
        if is_now and self._mark is not None and self._mark.find_change() is None:
            return workers
        self._next = workers  # workers that start now would see what has changed since the others started
        return None

    def _fit(self, loader: DataLoader[Any], batch: Any, workers: int) -> int:
        """Return how many of these workers fit into shared memory together with the current ones."""
        self._batch_bytes = size = sum(tensor.nbytes for tensor in walk_storage(batch))
        if self._room_bytes is None or not size:
            return workers
        ahead = loader.prefetch_factor or 1
        fitting = fit_in_shm(workers + loader.num_workers, ahead, size, self._room_bytes)
        return fitting[0] - loader.num_workers if fitting is not None and fitting[1] == ahead else 0

    def _compare(self, before: _Fewer, pace: Pace) -> int | None:
        """Report whether more workers make batches come faster; return the old number of workers if not, else None."""
        if self.is_faster is not None or (now_s := pace.batch_s) is None or (was_s := before.batch_s) is None:
            return None
        figures = _compare_s(now_s, was_s)
        self.is_faster = now_s * LEAST_GAIN <= was_s
        if self.is_faster:
            self.change = f"{pace.workers} workers instead of {before.workers}: {figures}"
            self._keep_found(pace.workers, now_s)
        else:
            self.change = f"{say_count(before.workers, 'worker')} again: with {pace.workers} it was {figures}"
            self._keep_found(before.workers, was_s)
        self._tell(self.change)
        return None if self.is_faster else before.workers

    def _keep_found(self, workers: int, then_s: float | None) -> None:
        before_s, size = None if self._before is None else self._before.batch_s, self._batch_bytes
        self._keep(FoundWorkers(workers=workers, before_s=before_s, then_s=then_s, batch_bytes=size))


def _compare_s(now_s: float, was_s: float) -> str:
    return f"a batch every {format_short(1e3 * now_s, 'ms')} instead of {format_short(1e3 * was_s, 'ms')}"


def _set_number(loader: DataLoader[Any], workers: int) -> None:
    if (kept := loader._iterator) is not None:
        end_workers(kept)
    loader.__dict__["_iterator"] = None
    loader.num_workers = workers
