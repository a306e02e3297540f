"""The first batches of the next epoch, made while the last ones of this epoch are trained on.

At the end of an epoch workers have nothing left to do, and the first batch of the next one comes no sooner than a
worker can make it. Here a copy of the sampler foretells the next order, on copies of its random streams. When the epoch
begins, the sampler draws as ever: batches made ahead count only if it drew the same indices.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from fastloop.feeds.lazy_loader import Bounded, Disguised, name_sampler
from fastloop.feeds.place.kept_order import KeptOrder
from fastloop.feeds.workers.pending_indices import PendingIndices

_KNOWN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_STAND_INS = (Bounded, KeptOrder, PendingIndices)
_MOST_SAMPLES = 2**22
"""A longer order takes torch more than half a second to draw."""
_MOST_DRAWS = 16
_MOST_MISSES = 2


class NextEpoch:
    """Begins the epochs of a loader whose workers stay.

    Args:
        count_next: returns how many batches the training will take from the next epoch; None if unknown.
        guess_draws: returns how many numbers others draw from torch's global stream between two epochs, such as a
            validation loader for its workers; None to find out first.
        draws_seed: whether the loader draws a seed for its workers in each epoch.

    Attributes:
        used: epochs that began with batches made ahead.
        dropped: epochs whose order was foretold wrong.
    """

    def __init__(
        self, *, count_next: Callable[[], int | None], guess_draws: Callable[[], int | None], draws_seed: bool
    ) -> None:
        self._count_next, self._guess_draws, self._draws_seed = count_next, guess_draws, draws_seed
        self._between: int | None = None
        self._generator: torch.Generator | None = None
        """The loader's, which has another one while its iterator is made."""
        self.used = self.dropped = 0
        self._stream: _Stream | None = None
        self._left_at: torch.Tensor | None = None
        """The state of the global stream when the last order was foretold."""

    def begin(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of one epoch, or of the rest of one; `begin` makes the loader's iterator."""
        name = name_sampler(loader)
        own, last = getattr(loader, name), self._stream
        if not loader.num_workers or find_sampler(own) is None:
            return begin()
        self._generator = loader.generator
        source, serves = iter(own), last is not None and last.serves(loader)
        if last is not None and serves and last.is_over:
            self._look_at_draws()
            if last.ahead:
                if (drawn := last.go_on(source)) is None:
                    self.used += 1
                    return _Epoch(loader._iterator, last)
                self.dropped += 1
                source = chain(drawn, source)
        if last is not None and serves:  # its iterator knows no other sampler
            stream = last
            stream.begin_epoch(source)
        else:
            known = weakref.ref(loader)  # its workers end when nobody holds it
            stream = _Stream(source, lambda stream: self._foretell(known(), own, stream))
        loader.__dict__[name] = self._stream = stream
        try:
            iterator = begin()
        except BaseException:
            self._stream = last
            raise
        finally:
            loader.__dict__[name] = own
        stream.find_iterator = weakref.ref(iterator)
        return _Epoch(iterator, stream)

    def _foretell(self, loader: DataLoader[Any] | None, own: Any, stream: _Stream) -> Iterator[Any]:
        """The indices of the next epoch's first batches, where they are known."""
        most = self._count_next()
        if loader is None or stream is not self._stream or most == 0 or self.dropped >= self.used + _MOST_MISSES:
            return iter(())
        self._left_at = torch.default_generator.get_state()
        between = self._guess_draws() if self._between is None else self._between
        if between is None:
            return iter(())
        ahead = loader.num_workers * int(loader.prefetch_factor or 1)
        count = ahead if most is None else min(most, ahead)
        return foretell(own, count, between=between, seeds_from=[self._generator] if self._draws_seed else [])

    def _look_at_draws(self) -> None:
        """Count the numbers that were drawn since the last order was foretold."""
        if self._left_at is None:
            return
        generator, now = torch.Generator(), torch.default_generator.get_state()
        generator.set_state(self._left_at)
        self._left_at = None
        for count in range(_MOST_DRAWS):
            if torch.equal(generator.get_state(), now):
                self._between = max(0, count - (self._draws_seed and self._generator is None))
                return
            _draw_seed(generator)


class _Stream:
    """Stands in for a sampler: the indices of an epoch's batches, and then those foretold for the next one."""

    def __init__(self, source: Iterator[Any], foretell: Callable[[_Stream], Iterator[Any]]) -> None:
        self._foretell = foretell
        self.find_iterator: Callable[[], Any] = lambda: None
        self.begin_epoch(source)

    def begin_epoch(self, source: Iterator[Any], asked: int = 0) -> None:
        """Read an epoch's indices from `source`; so many were read already."""
        self._source, self._asked, self.given = source, asked, 0
        self._total: int | None = None
        self.ahead, self._next = list[Any](), iter(list[Any]())

    @property
    def is_over(self) -> bool:
        """Whether all batches of the epoch were given."""
        return self.given == self._total

    def serves(self, loader: DataLoader[Any]) -> bool:
        """Whether the loader's workers read this."""
        return loader._iterator is not None and loader._iterator is self.find_iterator()

    def __iter__(self) -> Iterator[Any]:  # torch calls it twice before it reads
        return self

    def __next__(self) -> Any:
        if self._total is None:
            try:
                indices = next(self._source)
            except StopIteration:
                self._total, self._next = self._asked, self._foretell(self)
            else:
                self._asked += 1
                return indices
        self.ahead.append(next(self._next))
        return self.ahead[-1]

    def go_on(self, source: Iterator[Any]) -> list[Any] | None:
        """Continue with the next epoch if its first indices are those foretold; else return them."""
        drawn = list(islice(source, len(self.ahead)))
        if [_read(each) for each in drawn] != [_read(each) for each in self.ahead]:
            return drawn
        self.begin_epoch(source, asked=len(drawn))
        return None


class _Epoch(Disguised):
    """An iterator's batches up to the end of the epoch."""

    _OWN = ("inner", "stream")

    def __init__(self, inner: Any, stream: _Stream) -> None:
        self.inner, self.stream = inner, stream

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.stream.is_over:
            raise StopIteration
        batch = next(self.inner)
        self.stream.given += 1
        return batch


def find_sampler(sampler: Any) -> Any:
    """The sampler behind our stand-ins whose next order can be foretold; None if it is not one of torch's."""
    while isinstance(sampler, _STAND_INS):
        sampler = sampler.inner
    base: Any = sampler.sampler if type(sampler) is BatchSampler else sampler
    return sampler if type(base) in _KNOWN and len(base) <= _MOST_SAMPLES else None


def foretell(own: Any, count: int, *, between: int, seeds_from: Iterable[torch.Generator | None] = ()) -> Iterator[Any]:
    """The indices of the next epoch's first batches, as its workers get them. Leaves all random streams as they are.

    Args:
        own: the loader's batch sampler, or its sampler.
        between: numbers that others draw from torch's global stream before.
        seeds_from: generators from which the loader draws a seed before, None for the global stream.
    """
    twin, clones = copy.copy(find_sampler(own)), dict[int, torch.Generator]()
    base = twin
    if type(twin) is BatchSampler:
        twin.sampler = base = copy.copy(twin.sampler)
    if getattr(base, "generator", None) is not None:
        base.generator = _copy(base.generator, clones)
    if type(base) is DistributedSampler:
        base.epoch += 1
    with torch.random.fork_rng(devices=[]):
        for _ in range(between):
            _draw_seed(None)
        for generator in seeds_from:
            _draw_seed(None if generator is None else _copy(generator, clones))
        order = list(islice(twin, count))
    send = _find_send(own)
    return iter(order) if send is None else map(send, order)


def _find_send(sampler: Any) -> Callable[[Any], Any] | None:
    """What makes a worker's order from indices."""
    while isinstance(sampler, _STAND_INS):
        if (send := vars(sampler).get("send")) is not None:
            return send  # type: ignore[no-any-return]
        sampler = sampler.inner
    return None


def _copy(generator: torch.Generator, clones: dict[int, torch.Generator]) -> torch.Generator:
    """A generator in the same state; the same one for a generator that the loader and its sampler share."""
    if id(generator) not in clones:
        clones[id(generator)] = torch.Generator(generator.device)
        clones[id(generator)].set_state(generator.get_state())
    return clones[id(generator)]


def _draw_seed(generator: torch.Generator | None) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def _read(order: Any) -> Any:
    return getattr(order, "indices", order)
