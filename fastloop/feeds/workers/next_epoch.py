"""The first batches of the next epoch, made while the last ones of this epoch are trained on.

At the end of an epoch, workers have nothing left to do, and the next epoch has to wait until one of them has made its
first batch. Here a copy of the sampler predicts the next order, on copies of its random streams. When the epoch begins,
the sampler draws as usual: batches made ahead are used only if it drew the same indices.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from numbers import Integral
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

from fastloop.feeds.lazy_loader import Disguised, SameOrder, draw_seed, name_sampler, parts_in_place
from fastloop.feeds.workers.pending_indices import PendingIndices

TORCH_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers whose indices are those of the dataset, and whose order can be predicted."""
_DRAWN_FROM = ("data_source", "dataset", "indices", "weights")
"""Attributes of theirs that have as many members as the order that they draw."""
_STAND_INS = (SameOrder, PendingIndices)
_MOST_SAMPLES = 2**22
"""A longer order takes torch more than half a second to draw."""


class NextEpoch:
    """Begins the epochs of a loader whose workers stay.

    Args:
        count_next: returns how many batches the training will take from the next epoch; None if unknown.
        count_draws: returns how many numbers other code draws from torch's global stream before that epoch begins, such
            as validation loaders for their workers; None if unknown.
        draws_seed: whether the loader draws a seed for its workers in each epoch.

    Attributes:
        used: epochs that began with batches made ahead.
        is_wrong: whether an order was predicted wrong; none is predicted after that.
        may_predict: whether the sampler is of a kind whose order can be predicted; None before the first epoch.
    """

    def __init__(
        self, *, count_next: Callable[[], int | None], count_draws: Callable[[], int | None], draws_seed: bool
    ) -> None:
        self._count_next, self._count_draws, self._draws_seed = count_next, count_draws, draws_seed
        self._generator: torch.Generator | None = None
        """The loader's own generator: it has another one while its iterator is made."""
        self.used, self.is_wrong = 0, False
        self.may_predict: bool | None = None
        self._stream: _Stream | None = None

    def begin(self, loader: DataLoader[Any], make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the batches of one epoch, or of the rest of one; `make` makes the loader's iterator."""
        own, last = getattr(loader, name_sampler(loader)), self._stream
        self.may_predict = find_sampler(own) is not None
        if last is not None and not last.serves(loader):
            last = None
        if not loader.num_workers or not (self.may_predict or last):
            return make()
        self._generator = loader.generator
        source = iter(own)
        if last is not None and last.is_over and last.ahead:
            if (drawn := last.go_on(source)) is None:
                self.used += 1
                return _Epoch(loader._iterator, last)
            self.is_wrong = True
            source = chain(drawn, source)
        return self._begin_anew(loader, make, own, source, last)

    def _begin_anew(
        self, loader: DataLoader[Any], make: Callable[[], Iterator[Any]], own: Any, source: Any, last: _Stream | None
    ) -> Iterator[Any]:
        """Let the loader's iterator read these indices. One that stays only knows its last sampler: that is reused."""
        before = self._stream
        if last is None:
            known = weakref.ref(loader)  # weak: the loader's workers end when nothing refers to it
            last = _Stream(source, lambda stream: self._predict(known(), own, stream))
        else:
            last.begin_epoch(source)
        self._stream = last
        try:
            with parts_in_place(loader, {name_sampler(loader): last}):
                iterator = make()
        except BaseException:
            self._stream = before
            raise
        last.find_iterator = weakref.ref(iterator)
        return _Epoch(iterator, last)

    def _predict(self, loader: DataLoader[Any] | None, own: Any, stream: _Stream) -> Iterator[Any]:
        """Yield the indices of the next epoch's first batches, if they can be predicted."""
        most, draws = self._count_next(), self._count_draws()
        if loader is None or stream is not self._stream or find_sampler(own) is None:
            return iter(())
        if most == 0 or draws is None or self.is_wrong or not stream.is_quiet():
            return iter(())
        count = loader.num_workers * int(loader.prefetch_factor or 1)
        seeds_from = [self._generator] if self._draws_seed else []
        return predict(own, count if most is None else min(most, count), draws=draws, seeds_from=seeds_from)


class _Stream:
    """Stands in for a sampler: yields the indices of an epoch's batches, and then those predicted for the next one."""

    def __init__(self, source: Iterator[Any], predict: Callable[[_Stream], Iterator[Any]]) -> None:
        self._predict = predict
        self.find_iterator: Callable[[], Any] = lambda: None
        self.begin_epoch(source)

    def begin_epoch(self, source: Iterator[Any], asked: int = 0) -> None:
        """Read an epoch's indices from `source`; `asked` batches of the epoch were already requested."""
        self._source, self._asked, self.given = source, asked, 0
        self._total: int | None = None
        self._began_at = torch.default_generator.get_state() if asked else None
        self.ahead, self._next = list[Any](), iter(list[Any]())

    def is_quiet(self) -> bool:
        """Whether no code has drawn from torch's global stream since the epoch's first indices were drawn."""
        return self._began_at is not None and torch.equal(self._began_at, torch.default_generator.get_state())

    @property
    def is_over(self) -> bool:
        """Whether all batches of the epoch were returned."""
        return self.given == self._total

    def serves(self, loader: DataLoader[Any]) -> bool:
        """Whether the loader's workers read from this stream."""
        return loader._iterator is not None and loader._iterator is self.find_iterator()

    def __iter__(self) -> Iterator[Any]:  # torch calls it twice before it reads
        return self

    def __next__(self) -> Any:
        if self._total is None:
            try:
                indices = next(self._source)
            except StopIteration:
                self._total, self._next = self._asked, self._predict(self)
            else:
                self._asked += 1
                if self._began_at is None:
                    self._began_at = torch.default_generator.get_state()
                return indices
        self.ahead.append(next(self._next))
        return self.ahead[-1]

    def go_on(self, source: Iterator[Any]) -> list[Any] | None:
        """Continue with the next epoch if its first indices are those predicted; else return them."""
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
        received = self.inner._rcvd_idx
        try:
            return next(self.inner)
        finally:  # a batch that raises counts too; a timeout does not
            self.stream.given += self.inner._rcvd_idx != received


def find_sampler(sampler: Any) -> Any:
    """Return the sampler behind our stand-ins; None if its order cannot be predicted: not torch's own, or too long."""
    while isinstance(sampler, _STAND_INS):
        sampler = sampler.inner
    base: Any = sampler.sampler if type(sampler) is BatchSampler else sampler
    lengths = (len(getattr(base, name)) for name in _DRAWN_FROM if hasattr(base, name))
    return sampler if type(base) in TORCH_SAMPLERS and max(lengths) <= _MOST_SAMPLES else None


def predict(
    own: Any, count: int, *, draws: int = 0, seeds_from: Iterable[torch.Generator | None] = ()
) -> Iterator[Any]:
    """Yield the indices of the next epoch's first batches, as its workers get them; nothing if they are not integers.
    Leaves all random streams unchanged.

    Args:
        own: the loader's batch sampler, or its sampler.
        draws: how many numbers other code draws from torch's global stream first.
        seeds_from: generators from which the loader then draws a seed; None for the global stream.
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
        for _ in range(draws):
            draw_seed(None)
        for generator in seeds_from:
            draw_seed(None if generator is None else _copy(generator, clones))
        order = list(islice(twin, count))
    if not all(isinstance(index, Integral) for batch in order for index in (batch if type(batch) is list else [batch])):
        return iter(())
    send = _find_send(own)
    return iter(order) if send is None else map(send, order)


def _find_send(sampler: Any) -> Callable[[Any], Any] | None:
    """Return the function that makes what a worker gets from a batch's indices; None if it gets the indices."""
    while isinstance(sampler, _STAND_INS):
        if (send := vars(sampler).get("send")) is not None:
            return send  # type: ignore[no-any-return]
        sampler = sampler.inner
    return None


def _copy(generator: torch.Generator, clones: dict[int, torch.Generator]) -> torch.Generator:
    """Return a copy of a generator, in the same state. If loader and sampler share a generator, they share the copy."""
    if id(generator) not in clones:
        clones[id(generator)] = torch.Generator(generator.device)
        clones[id(generator)].set_state(generator.get_state())
    return clones[id(generator)]


def _read(order: Any) -> Any:
    return getattr(order, "indices", order)
