"""The next batches, already on the device: copied by a side stream while the current step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch

from fastloop.errors import let_through
from fastloop.evidence import loader_queue
from fastloop.feeds.batch_tree import is_container, rebuild, walk_storage
from fastloop.feeds.lazy_loader import LazyLoader


class _Staged(NamedTuple):
    batch: Any
    copied: torch.cuda.Event | None
    call: int
    """The `next` call that fetched it; later ones get it for free."""


class DeviceFeed(LazyLoader):
    """Stands in for a loader and hands out its batches on the device, `depth` of them copied ahead.

    Args:
        inner: the user's loader, or our copy of it.
        depth: batches kept on the device ahead of the one handed out.
        device: where batches go. On the CPU the feed only looks ahead (for tests).
        stage: moves one batch to the device, running the user's transfer hooks; called on the side stream.
        count: gives the batches that the loop asks for; the feed asks for no more. None: until there are no more.
        start: how the loader is started, see LazyLoader.
    """

    _OWN: ClassVar[Collection[str]] = (
        *LazyLoader._OWN,
        "depth",
        "device",
        "stage",
        "count",
        "retired",
        "stream",
        "seen",
    )

    def __init__(
        self,
        inner: Any,
        *,
        depth: int,
        device: torch.device,
        stage: Callable[[Any], Any],
        count: Callable[[], int | None] = lambda: None,
        **start: Any,
    ) -> None:
        super().__init__(inner, **start)
        self.depth, self.device, self.stage, self.count = depth, device, stage, count
        self.retired = False
        """Hands batches through as they are, from its next start on."""
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.seen = {"batches": 0, "ahead_batches": 0, "copied_bytes": 0, "tensors": 0, "pinned_tensors": 0}

    def _batches(self, drawn: torch.Tensor | None) -> Iterator[Any]:
        source, ready = islice(self._start(drawn), self.count()), deque[_Staged]()
        if self.retired:
            yield from source
            return
        call, exhausted = 0, False
        failed: Exception | None = None
        while True:
            call += 1
            # Two at a time until the feed is full: filling it at once would hold up the first step.
            for _ in range(2):
                if exhausted or len(ready) > self.depth:
                    break
                try:
                    batch = next(source)
                except StopIteration:
                    exhausted = True
                    break
                except Exception as error:
                    # The batches before it are used first, as without a feed.
                    exhausted, failed = True, self._name_death(error)
                    break
                self._note_fetched()
                ready.append(self._copy(batch, call))
            if not ready:
                if failed is not None:
                    raise failed
                return
            yield self._hand_out(ready.popleft(), call)

    def _name_death(self, error: Exception) -> Exception:
        """What the loader raised; where that is a connection that broke, the death of the worker at its end."""
        sentence = None if self.live is None else loader_queue.find_death(self.live(), error)
        return error if sentence is None else RuntimeError(sentence)

    def _note_fetched(self) -> None:
        """Called after each batch taken from the loader."""

    def _copy(self, batch: Any, call: int) -> _Staged:
        if self.stream is None:
            return _Staged(self.stage(batch), None, call)
        batch = self._pin(batch)
        with torch.cuda.stream(self.stream):
            moved = self.stage(batch)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self.stream)
        return _Staged(moved, copied, call)

    def _pin(self, batch: Any) -> Any:
        """Pinned copies of what is not pinned yet; without them the copy would block the host."""
        loose = 0
        for tensor in walk_storage(batch):
            if tensor.device.type == "cpu":
                pinned = tensor.is_pinned()
                self.seen["tensors"] += 1
                self.seen["pinned_tensors"] += pinned
                self.seen["copied_bytes"] += tensor.nbytes
                loose += not pinned
        return _pin_copies(batch) if loose else batch

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
        except Exception as error:  # a container that cannot be built from its members is copied from where it is
            let_through(error)
            return batch
    return batch.pin_memory() if callable(getattr(batch, "pin_memory", None)) else batch


class StatefulDeviceFeed(DeviceFeed):
    """A feed whose saved state is that of the batches the Trainer has used, not of those it looked ahead to.

    Args:
        consumed: batches of this epoch that the Trainer has taken in, counted from the epoch's start.
    """

    _OWN: ClassVar[Collection[str]] = (*DeviceFeed._OWN, "consumed", "_states", "_index", "_resumed")

    def __init__(self, inner: Any, *, consumed: Callable[[], int], **settings: Any) -> None:
        super().__init__(inner, **settings)
        self.consumed = consumed
        self._states: deque[tuple[int, Any]] = deque(maxlen=settings["depth"] + 4)
        self._index, self._resumed = 0, False

    def _start(self, drawn: torch.Tensor | None) -> Iterator[Any]:
        self._index, self._resumed = (self.consumed() if self._resumed else 0), False
        self._states.clear()
        source = super()._start(drawn)
        self._states.append((self._index, self.inner.state_dict()))
        return source

    def _note_fetched(self) -> None:
        self._index += 1
        self._states.append((self._index, self.inner.state_dict()))

    def state_dict(self) -> Any:
        """The loader's state as of the last batch the Trainer used."""
        used = self.consumed()
        return next((state for index, state in self._states if index == used), None) or self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Hand the state to the loader; the next epoch then counts on from where the Trainer stands."""
        self.inner.load_state_dict(state)
        self._resumed = True
