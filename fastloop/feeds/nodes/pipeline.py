"""A DataLoader's epochs through a torchdata.nodes pipeline of threads: the same dataset, sampler and collate function.

The order is deterministic: the loop asks the sampler, a fixed number of batches ahead, and takes the batches in that
order. Threads only decide when a batch is done.
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
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset
from torchdata.nodes import BaseNode, ParallelMapper

from fastloop.errors import FastLoopError
from fastloop.feeds.nodes.own_draws import draw_own
from fastloop.feeds.workers import tried_workers
from fastloop.feeds.workers.whereabouts import find_thread

AHEAD = 2
"""Batches asked for ahead, for each thread: one that it makes and one that waits, as with worker processes."""


class ThreadEngine:
    """Loads in the place of a map-style loader without workers: `threads` threads make its batches.

    Args:
        loader: its dataset and collate function are called by several threads at once, its sampler by the loop alone.
        own_draws: the samples are drawn from torch's random numbers, and each batch gets a generator for them.
        turn_off: the key that does without threads, as it is written.
        warn: takes one line for the user.
    """

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
        self._live: weakref.WeakSet[_Epoch] = weakref.WeakSet()

    def load(self, seed: int) -> Iterator[Any]:
        """One epoch's batches; `seed` is that of its random numbers."""
        epoch = _Epoch(self, seed if self.own_draws else None)
        self._live.add(epoch)
        return epoch

    def evidence(self) -> Mapping[str, int]:
        """The most threads that made batches of one epoch, and the samples in the batches that were handed out."""
        return dict(self.seen)

    def close(self) -> None:
        """End all threads."""
        for epoch in list(self._live):
            epoch.close()


class _Task:
    """One batch: what a thread is told, and what it leaves."""

    def __init__(self, indices: Any, seed: int | None) -> None:
        self.indices = indices
        self.seed = seed
        self.done = threading.Event()
        self.batch: Any = None
        self.error: BaseException | None = None
        self.thread: int | None = None
        self.place = "before its first sample"
        """What the thread is at: "sample 17", or "collating"."""


class _Tasks(BaseNode[_Task]):  # type: ignore[misc]
    """The pipeline's source: tasks in the order in which the loop put them in."""

    def __init__(self) -> None:
        super().__init__()
        self.put: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()

    def next(self) -> _Task:
        task = self.put.get()
        if task is None:
            raise StopIteration
        return task

    def get_state(self) -> dict[str, Any]:
        """None: the place is kept by who hands the batches out."""
        return {}


class _Load:
    """Makes one batch, in whatever thread it is called."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        self.fetches_one = loader.batch_sampler is None
        self.fetches_all = not self.fetches_one and _fetches_all(loader.dataset)
        self.stopped = False
        # A thread would pin for the first device, and open it for that.
        self.pin_for = torch.cuda.current_device() if loader.pin_memory and torch.cuda.is_available() else None

    def __call__(self, task: _Task) -> _Task:
        task.thread = threading.get_ident()
        try:
            task.batch = self._pin(draw_own(task.seed, partial(self._make, task)))
        except BaseException as error:  # any: the loop raises it, and nobody waits for a thread that has ended
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
    """Whether it makes the samples of a batch together. A Subset says so too, and only asks its dataset."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


class _Epoch(Iterator[Any]):
    """The batches of one epoch. Its threads start with the first ``next`` and end with the last batch, with an
    exception, or when nobody holds it any more."""

    def __init__(self, engine: ThreadEngine, seed: int | None) -> None:
        self._engine = engine
        self._seed = seed
        self._node: Any = None
        self._waiting: deque[_Task] = deque()
        self._threads: set[int] = set()
        self._over = False

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        try:
            if self._node is None:
                self._start()
            return self._take()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        loader = self._engine.loader
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._indices: Iterator[Any] | None = iter(sampler)
        self._refused: Exception | None = None
        self._load, self._tasks = _Load(loader), _Tasks()
        self._owner, self._torch_threads = threading.get_ident(), torch.get_num_threads()
        self._node = ParallelMapper(self._tasks, self._load, self._engine.threads, snapshot_frequency=0)
        self._node.reset()  # starts its threads
        self._fill()

    def _fill(self) -> None:
        """Ask the sampler, here and not in a thread, until enough batches are on their way."""
        while self._indices is not None and len(self._waiting) < AHEAD * self._engine.threads:
            try:
                task = _Task(copy.copy(next(self._indices)), self._seed)  # some fill one list again and again
            except Exception as error:  # what came before it is handed out first
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
        next(self._node)  # this task: they come in order
        self._waiting.popleft()
        # Nothing of it stays with the task, which its thread holds until the next one, and which the error holds.
        batch, error, task.batch, task.error = task.batch, task.error, None, None
        if error is not None:
            raise self._name_samples(error, task)
        self._fill()
        self._note(task)
        return batch

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
                    why=f"a training that gets no batch for {tried_workers.LIMIT_S:.0f} s would wait forever",
                    do="look at that line; where it works without threads (locks that one thread holds and another"
                    f" waits for), write {self._engine.turn_off}",
                )
            if not said:
                said = True
                self._engine.warn(where)

    def _name_samples(self, error: BaseException, task: _Task) -> BaseException:
        """The exception itself, with the frames it has from its thread, and a line that says which sample it was."""
        which = f"samples {task.indices}, while collating" if task.place == "collating" else task.place
        line = f"raised by {which}, in one of the threads that load ({self._engine.turn_off} does without them)"
        if hasattr(error, "add_note"):
            error.add_note(line)
        else:  # Python 3.10
            self._engine.warn(f"{type(error).__name__} {line}")
        return error

    def _note(self, task: _Task) -> None:
        self._threads.add(task.thread or 0)
        seen, indices = self._engine.seen, task.indices
        seen["threads"] = max(seen["threads"], len(self._threads))
        seen["samples"] += 1 if self._load.fetches_one else len(indices)

    def close(self) -> None:
        """End the threads: each finishes the sample that it is at."""
        self._over = True
        if self._node is None:
            return
        self._load.stopped = True
        self._waiting.clear()
        self._tasks.put.put(None)
        self._node = None  # it joins its threads when nobody holds it
        if threading.get_ident() == self._owner:
            # torchdata gives its threads one of torch's each, and torch gives as many to all threads that come later.
            torch.set_num_threads(self._torch_threads)

    def __del__(self) -> None:
        self.close()
