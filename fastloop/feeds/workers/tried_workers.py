"""Worker processes for a loader that had none, kept as long as their batches can be sent and they save time.

torch pickles a batch in a worker's background thread that only prints errors; the training then waits forever. Here
each worker pickles its batch itself and sends the bytes, or the reason why it cannot. In that case fewer workers, or
this process as in a run without workers, make the remaining batches, from the same indices in the same order. The same
happens if workers cannot start; if a dataset raises in a worker and not in this process, or waits there for a lock that
its fork has copied; if the first batches show that making one takes less time than getting it from a worker; or if
something changes what the workers have copies of.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from multiprocessing.synchronize import SemLock
from typing import Any, NamedTuple

import psutil
from torch.utils.data import DataLoader

from fastloop.errors import FastLoopError, let_through, quote
from fastloop.evidence import loader_queue
from fastloop.evidence.samples.dataset import walk
from fastloop.evidence.samples.state_mark import StateMark
from fastloop.evidence.worker_limits import fit_in_shm
from fastloop.feeds.batch_tree import walk_storage
from fastloop.feeds.lazy_loader import name_sampler, parts_in_place
from fastloop.feeds.workers.ending import end_workers, kill_started, kill_workers
from fastloop.feeds.workers.in_worker import LeavesRoom, Order, Send, SendsExits, Unsent
from fastloop.feeds.workers.pace import WorkerCosts
from fastloop.feeds.workers.pending_indices import PendingIndices
from fastloop.feeds.workers.read_twice import ReadTwice
from fastloop.feeds.workers.whereabouts import Whereabouts

_SHOWN = 8
"""Most indices of a batch that a message lists."""
LOOK_S = 5.0
"""Interval at which the wait for a batch is interrupted to check the workers."""
SAY_S = 60.0
"""After this long without a batch, a warning says where its worker is."""
LIMIT_S = 300.0
"""After this long without a batch, the training ends with an error that says so."""
STUCK_S = 30.0
"""If all workers have made no batch yet and have neither used a CPU nor read or written for this long, they are stuck:
their fork has lost a thread, or holds a lock forever."""


class Stuck(Exception):
    """No worker will deliver a batch."""


class _Fewer(NamedTuple):
    """The new number of workers, the batches ahead of each, and why."""

    workers: int
    ahead: int
    why: str
    tell: Callable[[int, int, str], None] | None = None
    """Called instead of `step_down`."""


class TriedWorkers:
    """The epochs of a loader that got workers on trial.

    Args:
        room_bytes: free shared memory for this process's batches; None if unknown.
        step_down: receives the new number of workers, the batches ahead of each, and the reason.
        warn: shows the user one line.
        turn_off: the configuration key that turns workers off, as the user writes it.
        free_cpus: CPUs of this machine that the workers leave to the training; 0 for none.
        is_training: whether the training itself requests an epoch now, not a callback.
        replaces: whether they replace the user's own workers, whose copies are as old.
        leave_out: called like `step_down` if workers cost more time than they save; None to keep them even then.
        report_outdated: called before `step_down` if batches that were handed out may have been made from outdated
            data, with their greatest number.
        twice: a check whether reading a sample changes it; None if that does not matter.
        drew: a byte in shared memory, which loaders may have in common; None for one of its own.

    Attributes:
        drew: its ``value`` tells whether a worker has drawn from a global random generator.
        has_handed_out: whether batches that workers made were handed out.
    """

    def __init__(
        self,
        *,
        room_bytes: int | None,
        step_down: Callable[[int, int, str], None],
        warn: Callable[[str], None],
        turn_off: str,
        free_cpus: int = 0,
        is_training: Callable[[], bool] = lambda: False,
        replaces: bool = False,
        leave_out: Callable[[int, int, str], None] | None = None,
        report_outdated: Callable[[int], None] = lambda _: None,
        twice: ReadTwice | None = None,
        drew: Any = None,
    ) -> None:
        self._room_bytes, self._step_down, self._warn, self._turn_off = room_bytes, step_down, warn, turn_off
        self._free_cpus, self._is_training, self._replaces = free_cpus, is_training, replaces
        self._leave_out, self._report_outdated, self._twice = leave_out, report_outdated, twice
        self._mark: StateMark | None = None
        """What the workers' copies hold."""
        self.has_handed_out = False
        self._handed_out = 0
        """Batches that were handed out since the workers made their copies."""
        self._costs, self._is_weighed = WorkerCosts(), False
        self.drew = multiprocessing.RawValue("b", 0) if drew is None else drew
        self.loss_ms: tuple[float, float] | None = None
        """Time to take a ready batch from a worker, and to make one; None unless taking it is slower."""
        self._drawn = PendingIndices()
        self._epoch = self._loading = 0
        """Numbers of the last epoch and of the one that is loading; 0 for none."""
        self._whereabouts = Whereabouts()
        self._idle: tuple[Any, float] = (None, 0.0)
        """What the workers had used and read by the last check, and since when that has not changed."""
        self._may_be_stuck = False
        """False if the dataset has a lock that processes share: a worker that is killed could hold it forever."""
        self._batch_bytes: int | None = None

    def batches(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the batches of one epoch, which begins with this call; `begin` makes the loader's iterator.

        Raises:
            FastLoopError: no batch came for LIMIT_S; says where the worker is.
        """
        if self._loading and loader._iterator is None and not self._is_training():  # a callback also reads the loader
            return begin()
        if self._epoch == 0 and self._twice is not None:
            changes, why = self._twice.find_change(is_urgent=True)
            if changes:
                self._set_workers(loader, 0, 0)
                self._step_down(0, 0, f"each worker would have its own version of the samples: {why}")
        if loader.num_workers and self._leave_out and (loss := self._costs.explain_loss_of_epochs()) is not None:
            self._lighten(loader, _Fewer(0, 0, loss, self._leave_out))
        self._drawn.begin_epoch()
        if self._epoch == 0:
            self._may_be_stuck = not any(isinstance(item, SemLock) for _, item in walk(loader.dataset))
        is_marked = loader.num_workers and not self._replaces
        self._mark = StateMark(dataset=loader.dataset, collate_fn=loader.collate_fn) if is_marked else None
        asked = time.perf_counter()
        source = self._begin(loader, begin) if loader.num_workers else begin()
        self._costs.begin_epoch(1e3 * (time.perf_counter() - asked))
        return self._load(loader, begin, source)

    def _load(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], source: Any) -> Iterator[Any]:
        self._epoch += 1
        self._loading = number = self._epoch
        try:
            yield from self._deliver(loader, begin, source)
        finally:
            if number > 1:  # the first starts what stays
                self._costs.end_epoch()
            self._loading = 0 if self._loading == number else self._loading

    def _deliver(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], source: Any) -> Iterator[Any]:
        while loader.num_workers:
            failed = None
            try:
                for batch in self._wait_for(source):
                    stale = self._find_stale()
                    fewer = stale or self._find_fewer(loader, batch) or self._find_loss()
                    if fewer is not None:
                        end_workers(source)
                        self._lighten(loader, fewer)
                    if stale is None and not isinstance(batch, Unsent):
                        self._drawn.pending.popleft()
                        self._handed_out, self.has_handed_out = self._handed_out + 1, True
                        yield batch
                    if fewer is not None:
                        break
                else:
                    return
                source = self._begin(loader, begin)
            except Stuck as why:
                kill_workers(source, LOOK_S)
                end_workers(source)
                failed = str(why)
            except Exception as error:
                end_workers(source)  # now: the exception holds all frames, and with them the workers
                if not (_was_sent(error) and self._drawn.pending) or self._drawn.has_raised(error):
                    raise
                failed = quote(error, briefly=True)
            if failed is not None:
                yield from self._go_on_here(loader, begin, failed)
                return
        yield from source

    def _go_on_here(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], failed: str) -> Iterator[Any]:
        """Make the batch that raised in a worker, and those after it, in this process. If it raises here too, that
        exception ends the training, as it would without workers."""
        indices = self._drawn.pending[0]
        self._set_workers(loader, 0, 0)
        rest = self._begin(loader, begin)
        try:
            batch = next(rest)
        except StopIteration:
            return
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                named = _name_samples(indices)
                error.add_note(f"fastloop: raised by the batch of samples {named}; a worker raised {failed}")
            raise
        self._step_down(0, 0, f"workers cannot make the loader's batches: {failed}")
        yield batch
        yield from rest

    def _begin(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Any:
        """Start the loader's iterator; without workers if they cannot start, for want of shared memory or files."""
        resumes, others = self._drawn.resumes, active_children()
        try:
            return self._begin_on_ours(loader, begin)
        except Exception as error:
            let_through(error)
            if not loader.num_workers or self._drawn.has_raised(error):
                raise
            why = quote(error, briefly=True)
        kill_started(others, LOOK_S)
        self._set_workers(loader, 0, 0)
        self._drawn.resumes = resumes or bool(self._drawn.pending)
        source = self._begin_on_ours(loader, begin)
        self._step_down(0, 0, f"workers cannot start: {why}")
        return source

    def _begin_on_ours(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Any:
        """Start the loader's iterator with our parts in place; the loader keeps its own afterwards."""
        name = name_sampler(loader)
        self._drawn.inner, self._drawn.send = getattr(loader, name), Order if loader.num_workers else None
        self._costs.provide(loader.num_workers)
        init = LeavesRoom(loader.worker_init_fn, self._free_cpus) if self._free_cpus else loader.worker_init_fn
        parts = {
            name: self._drawn,
            "collate_fn": Send(loader.collate_fn, self._costs.made_ms, self.drew),
            "worker_init_fn": SendsExits(self._whereabouts.make_init(init)),
        }
        self._handed_out = self._handed_out if loader._iterator is not None else 0
        _set_timeout(loader._iterator, 0)  # persistent workers may first have to finish the last epoch's batches
        with parts_in_place(loader, parts):
            iterator = begin()
        if loader.num_workers:
            _set_timeout(iterator, LOOK_S)
        return iterator

    def _wait_for(self, source: Any) -> Iterator[Any]:
        """Yield the iterator's batches; if one takes long, report where its worker is."""
        begun, said, came = time.monotonic(), False, self._epoch > 1 or not self._may_be_stuck
        while True:
            is_there, asked = loader_queue.is_next_ready(source), time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            except Exception as error:
                if not str(error).startswith("DataLoader timed out after"):
                    if (sentence := loader_queue.find_death(source, error)) is not None:
                        raise RuntimeError(sentence) from error
                    raise
            else:
                self._costs.note(1e3 * (time.perf_counter() - asked), was_ready=bool(is_there))
                yield batch
                begun, said, came = time.monotonic(), False, True
                continue
            waited_s = time.monotonic() - begun
            if not came and self._count_idle_s(source) >= STUCK_S:
                raise Stuck(
                    f"for {STUCK_S:.0f} s before the first batch no worker used a CPU (locks and threads do not survive"
                    f" a fork): {self._find_place(source)}"
                )
            if waited_s >= LIMIT_S:
                raise FastLoopError(
                    got=f"no batch for {waited_s:.0f} s: {self._find_place(source)}",
                    why=f"training waits at most {LIMIT_S:.0f} s for a batch",
                    do="look at that line; if it works without workers (locks and threads do not survive a fork),"
                    f" write {self._turn_off}",
                )
            if waited_s >= SAY_S and not said:
                said = True
                self._warn(f"no batch for {waited_s:.0f} s: {self._find_place(source)}")

    def _count_idle_s(self, source: Any) -> float:
        """Return for how long neither a worker nor a process that it started has used a CPU, read or written. Only
        repeated calls can tell."""
        now, used = time.monotonic(), list[Any]()
        try:
            for worker in source._workers:
                process = psutil.Process(worker.pid)
                for each in (process, *process.children(recursive=True)):
                    used.append((each.pid, each.cpu_times(), each.io_counters()[:2]))
        except (psutil.Error, AttributeError, OSError):  # ended, another torch version, or a system without counters
            used = [now]
        if self._idle[0] != used:
            self._idle = used, now
        return now - self._idle[1]

    def _find_place(self, source: Any) -> str:
        worker = loader_queue.find_awaited_worker(source)
        place = None if worker is None else self._whereabouts.find(worker.pid)
        if place is None:
            return "its worker gave no location"
        return f"its worker (pid {worker.pid}) is in {place}"

    # -- fewer workers ------------------------------------------------------------------------------------------------

    def _find_fewer(self, loader: DataLoader[Any], batch: Any) -> _Fewer | None:
        """Return the new settings if fewer workers are needed; else None."""
        workers, ahead = loader.num_workers, int(loader.prefetch_factor or 1)
        if isinstance(batch, Unsent):
            if not batch.no_room:
                return _Fewer(0, 0, batch.why)
            fitting = self._fit(workers, ahead)
            if fitting == (workers, ahead):  # other processes use shared memory too, or batches differ in size
                fitting = (workers // 2, 1) if workers > 1 else (0, 0)
            return _Fewer(*fitting, f"/dev/shm is too small for the batches of {workers} workers: {batch.why}")
        if self._batch_bytes is not None:
            return None
        self._batch_bytes = sum(tensor.nbytes for tensor in walk_storage(batch))
        fitting = self._fit(workers, ahead)
        if fitting == (workers, ahead):
            return None
        room, size = (self._room_bytes or 0) / 2**20, self._batch_bytes / 2**20
        return _Fewer(*fitting, f"memory has room for {room:.0f} MiB of batches, but one takes {size:.1f} MiB")

    def _find_stale(self) -> _Fewer | None:
        """Return settings without workers if something has changed what they hold copies of."""
        if self._mark is None or (changed := self._mark.find_change()) is None:
            return None
        if self._mark.is_late and self._handed_out:
            self._report_outdated(self._handed_out)
        return _Fewer(0, 0, f"{changed} changed while batches were being loaded, and workers hold older copies")

    def _find_loss(self) -> _Fewer | None:
        """Return settings without workers if taking a ready batch from a worker is slower than making it; only once."""
        if self._is_weighed or (both := self._costs.compare_ready()) is None:
            return None
        took_ms, made_ms = both
        self._is_weighed, tell = True, self._leave_out
        if took_ms <= made_ms:
            return None
        if tell is None:
            self.loss_ms = took_ms, made_ms
            return None
        why = f"a batch takes {made_ms:.2f} ms to make, but taking it from a worker took {took_ms:.2f} ms"
        return _Fewer(0, 0, why, tell)

    def _fit(self, workers: int, ahead: int) -> tuple[int, int]:
        if self._room_bytes is None or not self._batch_bytes:
            return workers, ahead
        return fit_in_shm(workers, ahead, self._batch_bytes, self._room_bytes) or (0, 0)

    def _lighten(self, loader: DataLoader[Any], fewer: _Fewer) -> None:
        """Change the loader's workers; the new ones make the batches that the old ones did not deliver."""
        self._set_workers(loader, fewer.workers, fewer.ahead)
        (fewer.tell or self._step_down)(fewer.workers, fewer.ahead, fewer.why)

    def _set_workers(self, loader: DataLoader[Any], workers: int, ahead: int) -> None:
        loader.__dict__["_iterator"] = None
        loader.num_workers, loader.prefetch_factor = workers, ahead or None
        if not workers:
            loader.__dict__["persistent_workers"] = False
        self._drawn.resumes = True


def _name_samples(indices: Any) -> str:
    if isinstance(indices, list) and len(indices) > _SHOWN:
        return f"{str(indices[:_SHOWN])[:-1]}, …] ({len(indices)} in all)"
    return str(indices)


def _was_sent(error: Exception) -> bool:
    """Whether torch raised again here what was raised in a worker. Source: torch/_utils.py, ExceptionWrapper."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_name == "reraise"


def _set_timeout(iterator: Any, timeout_s: float) -> None:
    """Let a multi-process iterator raise if no batch comes in time. As a loader argument, the timeout would also apply
    at the start, when persistent workers finish the last epoch's batches."""
    if hasattr(iterator, "_timeout"):
        iterator._timeout = timeout_s
