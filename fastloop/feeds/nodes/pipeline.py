"""Runs a DataLoader's epochs in a torchdata.nodes pipeline of threads, with its dataset, sampler and collate function.

The order is deterministic: the loop draws from the sampler, a fixed number of batches ahead, and takes the batches in
that order. Thread timing only decides when a batch is ready. If something changes what the dataset holds while batches
are waiting, these are made anew, and from then on each batch is made when it is due, as without threads.
Source: https://docs.pytorch.org/data/0.11/torchdata.nodes.html
"""

from __future__ import annotations

import copy
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset
from torchdata.nodes import BaseNode, ParallelMapper

from fastloop.errors import FastLoopError
from fastloop.evidence.samples.state_mark import StateMark
from fastloop.feeds.nodes.own_draws import OwnDraws
from fastloop.feeds.workers import tried_workers
from fastloop.feeds.workers.whereabouts import find_thread

AHEAD = 2
"""Batches requested ahead for each thread: one in progress and one waiting, as with worker processes."""


class ThreadEngine:
    """Loads in place of a map-style loader without workers: `threads` threads make its batches.

    Args:
        loader: several threads call its dataset and collate function at once; only the loop calls its sampler.
        own_draws: whether samples draw torch's random numbers, so that each batch gets a separate generator.
        turn_off: the configuration key that turns threads off, as the user writes it.
        warn: shows the user one line.

    Attributes:
        step_down: receives the reason why threads load no more batches, and how many batches that were handed out may
            have been made from outdated data.
    """

    has_one_thread_each = True
    """torchdata lets torch compute with one thread in each of its threads."""

    def __init__(
        self,
        loader: DataLoader[Any],
        threads: int,
        *,
        turn_off: str,
        own_draws: bool = False,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.own_draws = own_draws
        self.loader, self.threads, self.turn_off, self.warn = loader, threads, turn_off, warn
        self.seen = {"threads": 0, "samples": 0}
        self.step_down: Callable[[str, int], None] = lambda _why, _outdated: None
        self.loads_when_due = False
        self._live: weakref.WeakSet[_Epoch] = weakref.WeakSet()

    def load(self, seed: int) -> Iterator[Any]:
        """Return one epoch's batches; `seed` seeds its random numbers."""
        epoch = _Epoch(self, seed if self.own_draws else None)
        self._live.add(epoch)
        return epoch

    def evidence(self) -> Mapping[str, int]:
        """Return the most threads that made batches in one epoch, and the samples in all batches returned."""
        return dict(self.seen)

    def close(self) -> None:
        """End all threads."""
        for epoch in list(self._live):
            epoch.close()


class _Task:
    """One batch: the input for a thread, and its result."""

    def __init__(self, indices: Any, seed: int | None) -> None:
        self.indices = indices
        self.seed = seed
        self.done = threading.Event()
        self.batch: Any = None
        self.error: BaseException | None = None
        self.thread: int | None = None
        self.place = "before its first sample"
        """What the thread is doing: "sample 17", or "collating"."""


class _Tasks(BaseNode[_Task]):  # type: ignore[misc]
    """The pipeline's source: returns tasks in the order in which the loop added them."""

    def __init__(self) -> None:
        super().__init__()
        self.put: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()

    def next(self) -> _Task:
        task = self.put.get()
        if task is None:
            raise StopIteration
        return task

    def get_state(self) -> dict[str, Any]:
        """Return no state: `_Epoch` keeps track of the position."""
        return {}


class _Load:
    """Makes one batch, in the thread that calls it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        self.fetches_one = loader.batch_sampler is None
        self.fetches_all = not self.fetches_one and _fetches_all(loader.dataset)
        self.stopped = False
        # Without this, a thread would pin for the first device, and create a context on it.
        self.pin_for = torch.cuda.current_device() if loader.pin_memory and torch.cuda.is_available() else None

    def __call__(self, task: _Task) -> _Task:
        task.thread = threading.get_ident()
        try:
            with nullcontext() if task.seed is None else OwnDraws(task.seed):
                batch = self._make(task)
            task.batch = self._pin(batch)
        except BaseException as error:  # catch all, so that the loop raises it instead of waiting for a dead thread
            task.error = error
        finally:
            task.done.set()
        return task

    def _make(self, task: _Task) -> Any:
        samples = self._fetch(task)
        if self.stopped:
            return None
        task.place = "collating"
        return self.collate(samples)

    def _fetch(self, task: _Task) -> Any:
        if self.fetches_all:
            task.place = f"samples {task.indices}"
            return self.dataset.__getitems__(task.indices)  # type: ignore[attr-defined]
        samples = []
        for index in [task.indices] if self.fetches_one else task.indices:
            if self.stopped:
                break
            task.place = f"sample {index}"
            samples.append(self.dataset[index])
        return samples[0] if self.fetches_one and samples else samples

    def _pin(self, batch: Any) -> Any:
        if self.pin_for is None or self.stopped:
            return batch
        from torch.utils.data._utils.pin_memory import pin_memory  # what DataLoader does with a batch

        torch.cuda.set_device(self.pin_for)
        return pin_memory(batch)  # type: ignore[no-untyped-call]


def _fetches_all(dataset: Any) -> bool:
    """Whether the dataset makes all samples of a batch in one call. A Subset only forwards that call to its dataset."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


class _Epoch(Iterator[Any]):
    """The batches of one epoch. Its threads start at the first ``next`` and end after the last batch, on an exception,
    or when this object is deleted."""

    def __init__(self, engine: ThreadEngine, seed: int | None) -> None:
        self._engine = engine
        self._seed = seed
        self._node: Any = None
        self._waiting: deque[_Task] = deque()
        self._threads: set[int] = set()
        self._handed_out = 0
        self._mark: StateMark | None = None
        self._over, self._has_started = False, False

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        try:
            if not self._has_started:
                self._start()
            return self._make_due() if self._engine.loads_when_due else self._take()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        loader = self._engine.loader
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._indices: Iterator[Any] | None = iter(sampler)
        self._refused: Exception | None = None
        self._load, self._tasks = _Load(loader), _Tasks()
        self._has_started = True
        if self._engine.loads_when_due:
            return
        self._owner, self._torch_threads = threading.get_ident(), torch.get_num_threads()
        self._node = ParallelMapper(self._tasks, self._load, self._engine.threads, snapshot_frequency=0)
        self._node.reset()  # starts its threads
        self._fill(AHEAD * self._engine.threads)

    def _fill(self, most: int) -> None:
        """Draw from the sampler, in this thread, until this many batches are in progress."""
        while self._indices is not None and len(self._waiting) < most:
            try:
                task = _Task(copy.copy(next(self._indices)), self._seed)  # some samplers reuse one list
            except Exception as error:  # raised after the batches before it
                self._indices, self._refused = None, error
                return
            self._seed = None if self._seed is None else self._seed + 1
            self._waiting.append(task)
            self._tasks.put.put(task)

    def _take(self) -> Any:
        if not self._waiting:
            raise self._refused or StopIteration
        task = self._waiting[0]
        self._wait_for(task)
        if self._is_outdated():
            return self._make_due()
        next(self._node)  # returns this task, since they come in order
        self._waiting.popleft()
        # Clear the task's references: its thread holds the task until the next one, and so does the error.
        batch, error, task.batch, task.error = task.batch, task.error, None, None
        if error is not None:
            raise self._name_samples(error, task)
        self._fill(AHEAD * self._engine.threads)
        self._note(task)
        self._handed_out += 1
        return batch

    def _is_outdated(self) -> bool:
        """Whether waiting batches were made before something changed what the dataset holds; then the threads end."""
        if self._mark is None:  # what the first samples leave behind, such as a library's own caches, is no change
            self._mark = StateMark(dataset=self._load.dataset, collate_fn=self._load.collate)
        if (changed := self._mark.find_change()) is None:
            return False
        self._end_threads()
        self._engine.loads_when_due, self._load = True, _Load(self._engine.loader)
        why = f"{changed} changed while batches were being loaded, and threads had loaded some of them before that"
        self._engine.step_down(why, self._handed_out if self._mark.is_late else 0)
        return True

    def _make_due(self) -> Any:
        """Make the next batch here, from the indices that were drawn for it."""
        self._fill(1)
        if not self._waiting:
            raise self._refused or StopIteration
        task = self._load(self._waiting.popleft())
        if task.error is not None:
            raise task.error
        return task.batch

    def _wait_for(self, task: _Task) -> None:
        begun, said = time.monotonic(), False
        while not task.done.wait(tried_workers.LOOK_S):
            waited_s = time.monotonic() - begun
            if waited_s < tried_workers.SAY_S:
                continue
            place = None if task.thread is None else find_thread(task.thread)
            where = f"no batch for {waited_s:.0f} s: its thread, at {task.place}, is in {place or 'no Python code'}"
            if waited_s >= tried_workers.LIMIT_S:
                raise FastLoopError(
                    got=where,
                    why=f"training waits at most {tried_workers.LIMIT_S:.0f} s for a batch",
                    do="look at that line; if it works without threads (locks that one thread holds and another"
                    f" waits for), write {self._engine.turn_off}",
                )
            if not said:
                said = True
                self._engine.warn(where)

    def _name_samples(self, error: BaseException, task: _Task) -> BaseException:
        """Return the exception with its thread's traceback, and a note that names the sample."""
        which = f"samples {task.indices}, while collating" if task.place == "collating" else task.place
        line = f"raised by {which}, in one of the loading threads ({self._engine.turn_off} turns them off)"
        if hasattr(error, "add_note"):
            error.add_note(line)
        else:  # Python 3.10
            self._engine.warn(f"{type(error).__name__} {line}")
        return error

    def _note(self, task: _Task) -> None:
        self._threads.add(task.thread or 0)
        seen, indices = self._engine.seen, task.indices
        seen["threads"] = max(seen["threads"], len(self._threads))
        is_batch = isinstance(indices, (list, tuple))  # a sampler may yield whole ones
        seen["samples"] += len(indices) if is_batch else 1

    def close(self) -> None:
        """End the threads: each finishes its current sample."""
        self._over = True
        self._waiting.clear()
        self._end_threads()

    def _end_threads(self) -> None:
        if self._node is None:
            return
        self._load.stopped = True
        self._tasks.put.put(None)
        self._node = None  # it joins its threads when it is deleted
        if threading.get_ident() == self._owner:
            # torchdata sets torch's number of threads to 1 in each of its threads; later threads would inherit that.
            torch.set_num_threads(self._torch_threads)

    def __del__(self) -> None:
        self.close()
