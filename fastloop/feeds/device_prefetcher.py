"""Copies the next batches to the device on a side stream while the current step computes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar, NamedTuple

import torch

from fastloop.errors import let_through
from fastloop.evidence import loader_queue
from fastloop.feeds.batch_tree import is_container, may_hide_tensors, rebuild, walk_storage
from fastloop.feeds.lazy_loader import LazyLoader
from fastloop.feeds.made_anew import MadeAnew


class _Staged(NamedTuple):
    batch: Any
    copied: torch.cuda.Event | None
    call: int
    """Number of the `next` call that fetched it; later calls get it at no cost."""


class DeviceFeed(LazyLoader):
    """Stands in for a loader and returns its batches on the device, with `depth` of them copied ahead.

    Args:
        inner: the user's loader, or our copy of it.
        depth: batches on the device ahead of the current one.
        device: target of the copies. On the CPU nothing is copied; the feed only reads ahead.
        stage: moves one batch to the device and runs the user's transfer hooks; called on the side stream.
        count: returns how many batches the loop requests; the feed reads no more. None: it reads to the end.
        watch: begins to watch an epoch for changes of what its samples are read from; None if they cannot matter.
        step_down: receives the reason why no more batches are read ahead, and how many may be outdated.
        start: arguments of LazyLoader.
    """

    _OWN: ClassVar[Collection[str]] = (
        *LazyLoader._OWN,
        *("depth", "device", "stage", "count", "watch", "step_down", "retired", "stream", "hides_tensors", "seen"),
    )

    def __init__(
        self,
        inner: Any,
        *,
        depth: int,
        device: torch.device,
        stage: Callable[[Any], Any],
        count: Callable[[], int | None] = lambda: None,
        watch: Callable[[], MadeAnew] | None = None,
        step_down: Callable[[str, int], None] = lambda _why, _outdated: None,
        **start: Any,
    ) -> None:
        super().__init__(inner, **start)
        self.depth, self.device, self.stage, self.count = depth, device, stage, count
        self.watch, self.step_down = watch, step_down
        self.retired = False
        """If true, the feed passes batches through unchanged, from its next start on."""
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.hides_tensors = False
        """Whether batches may hold tensors that `walk_storage` does not find. Nothing tells the allocator which stream
        uses those, so each copy waits until all steps issued so far are done with the memory that it takes."""
        self.seen = {"batches": 0, "ahead_batches": 0, "copied_bytes": 0, "tensors": 0, "pinned_tensors": 0}

    def _batches(self, at: Any) -> Iterator[Any]:
        source, ready = itertools.islice(self._start(at), self.count()), deque[_Staged]()
        if self.retired:
            yield from source
            return
        exhausted, failed = False, None
        anew = None if self.watch is None else self.watch()
        for call in itertools.count(1):
            if anew is not None and ready and (found := anew.find_change(len(ready))) is not None:
                self.depth = 0
                self.step_down(*found)
            if anew is not None and anew.due:
                ready.clear()
                yield self._hand_out(self._copy(anew.make_due(), call), call)
                continue
            # Two at a time until the feed is full: filling it at once would delay the first step.
            for _ in range(2):
                if exhausted or len(ready) > self.depth:
                    break
                try:
                    batch = next(source)
                except StopIteration:  # not kept: its traceback would keep the loader's workers alive
                    exhausted = True
                    break
                except Exception as error:  # raised after the batches before it, as without a feed
                    exhausted, failed = True, self._name_death(error)
                    break
                self._note_fetched()
                if anew is not None:
                    anew.note_fetched()
                ready.append(self._copy(batch, call))
            if not ready:
                if failed is not None:
                    raise failed
                return
            if anew is not None:
                anew.note_handed_out()
            yield self._hand_out(ready.popleft(), call)

    def _name_death(self, error: Exception) -> Exception:
        """Return the loader's error; if that is a broken connection, an error that names the dead worker."""
        sentence = None if self.live is None else loader_queue.find_death(self.live(), error)
        return error if sentence is None else RuntimeError(sentence)

    def _note_fetched(self) -> None:
        """Called after each batch taken from the loader."""

    def _copy(self, batch: Any, call: int) -> _Staged:
        if self.stream is None:
            return _Staged(self.stage(batch), None, call)
        batch = self._pin(batch)
        on_device = [each for each in walk_storage(batch) if each.is_cuda]
        if self.hides_tensors or on_device:  # a loader on the device: its work is on the current stream
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            moved = self.stage(batch)
            for each in on_device:
                each.record_stream(self.stream)
            self.hides_tensors = self.hides_tensors or may_hide_tensors(moved)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self.stream)
        return _Staged(moved, copied, call)

    def _pin(self, batch: Any) -> Any:
        """Pin the tensors that are not pinned yet; otherwise the copy to the device would block the host."""
        loose = 0
        for tensor in walk_storage(batch):
            if tensor.device.type == "cpu":
                pinned = tensor.is_pinned()
                self.seen["tensors"] += 1
                self.seen["pinned_tensors"] += pinned
                self.seen["copied_bytes"] += tensor.nbytes
                loose += not pinned
        if not loose:
            return batch
        # Copy with this thread only. Worker processes keep the CPUs busy, so waiting for torch's other threads would
        # take longer than the copy: for 1.5 MB with two busy cores 16 ms, but 0.2 ms without those threads.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _pin_copies(batch)
        finally:
            torch.set_num_threads(threads)

    def _hand_out(self, staged: _Staged, call: int) -> Any:
        self.seen["batches"] += 1
        self.seen["ahead_batches"] += staged.call < call
        if staged.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(staged.copied)
            for tensor in walk_storage(staged.batch):
                if tensor.is_cuda:
                    tensor.record_stream(current)
        return staged.batch


def _pin_copies(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        loose = batch.device.type == "cpu" and batch.layout is torch.strided and not batch.is_pinned()
        return batch.pin_memory() if loose else batch
    if is_container(batch):
        try:
            return rebuild(batch, _pin_copies)
        except Exception as error:  # a container that cannot be rebuilt from its members is copied without pinning
            let_through(error)
            return batch
    return batch.pin_memory() if callable(getattr(batch, "pin_memory", None)) else batch


class StatefulDeviceFeed(DeviceFeed):
    """A feed that saves the loader's state as of the batches that the Trainer has used, not of those read ahead.

    Args:
        consumed: returns the number of batches that the Trainer has used since the epoch's start.
    """

    _OWN: ClassVar[Collection[str]] = (*DeviceFeed._OWN, "consumed", "_states", "_index", "_resumed")

    def __init__(self, inner: Any, *, consumed: Callable[[], int], **settings: Any) -> None:
        super().__init__(inner, **settings)
        self.consumed = consumed
        self._states: deque[tuple[int, Any]] = deque(maxlen=settings["depth"] + 4)
        self._index, self._resumed = 0, False

    def _start(self, at: Any) -> Iterator[Any]:
        self._index, self._resumed = (self.consumed() if self._resumed else 0), False
        self._states.clear()
        source = super()._start(at)
        self._states.append((self._index, self.inner.state_dict()))
        return source

    def _note_fetched(self) -> None:
        self._index += 1
        self._states.append((self._index, self.inner.state_dict()))

    def state_dict(self) -> Any:
        """Return the loader's state as of the last batch that the Trainer used."""
        used = self.consumed()
        return next((state for index, state in self._states if index == used), None) or self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Pass the state to the loader; the next epoch then continues from the Trainer's position."""
        self.inner.load_state_dict(state)
        self._resumed = True
