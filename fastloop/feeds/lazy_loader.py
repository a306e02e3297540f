"""Copies the user's loader with changed settings, and wraps it in a stand-in that starts it late."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

_GUARDED = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")
"""Attributes that DataLoader refuses to set after its __init__."""


def clone(loader: DataLoader[Any], settings: Mapping[str, Any]) -> DataLoader[Any]:
    """Return a shallow copy with `settings` changed; the user's object stays unchanged.

    A copy, unlike a newly constructed loader, keeps the class, unknown constructor arguments, collate_fn, generator
    and custom attributes (tried on ten kinds of loaders; new construction lost three of them).
    """
    twin = copy.copy(loader)
    twin.__dict__["_iterator"] = None
    for name, value in settings.items():
        if name in _GUARDED:
            twin.__dict__[name] = value
        else:
            setattr(twin, name, value)
    return twin


@contextlib.contextmanager
def parts_in_place(loader: DataLoader[Any], parts: Mapping[str, Any]) -> Iterator[None]:
    """Give a loader these attributes inside the context, also those that DataLoader refuses to set."""
    own = {name: getattr(loader, name) for name in parts}
    loader.__dict__.update(parts)
    try:
        yield
    finally:
        loader.__dict__.update(own)


# -- stand-ins for a loader or a sampler, which forward whatever they do not do themselves -----------------------------


class PassesOn:
    """Reads attributes that it does not have from ``inner``."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: a copy or an unpickled stand-in
            raise AttributeError(name)
        return getattr(self.inner, name)


class StandIn(PassesOn):
    """Forwards to `inner`, and has its length."""

    def __len__(self) -> int:
        return len(self.inner)


class Disguised(StandIn):
    """A stand-in that looks like ``inner``: it reports that class, and attributes set on it are set on ``inner``."""

    _OWN: ClassVar[Collection[str]] = ("inner",)
    """Attributes of the stand-in itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.inner.__class__


class StandInDataset(Disguised):
    """Stands in for a map-style dataset. `_OWN` names the attributes in the order of the arguments of ``__init__``."""

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]

    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, name) for name in self._OWN)


class SameOrder(Disguised):
    """Stands in for a loader's (batch) sampler, and passes on its indices unchanged, all or some."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (self.inner,)  # copies and pickles are of the user's sampler


# -- stops after an epoch's last batch, without requesting one more ----------------------------------------------------


class Bounded(SameOrder):
    """Stands in for a loader's (batch) sampler, and is not read past an epoch's last batch.

    Some samplers count their epochs, or draw from their own generator, after the last index or with each one. If they
    are read too far, the next epoch has another order. Lightning's loop counts batches and stops in time; worker
    processes and feeds, which read ahead, do not.
    Source: torch/utils/data/sampler.py, RandomSampler, ``num_samples % n``.

    Args:
        inner: the loader's batch sampler, or its sampler if it has none.
        count: returns how many batches the loop requests in this epoch; None if it reads to the end.
    """

    _OWN = ("inner", "count")

    def __init__(self, inner: Any, count: Callable[[], int | None]) -> None:
        self.inner, self.count = inner, count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.inner), self.count())


class ReadAhead(StandIn):
    """Stands in for a batch sampler, and reads it as a loader with workers does: ahead, from the start of an epoch. So
    the sampler draws as many random numbers, and at the same times, as with workers.

    Source: torch/utils/data/dataloader.py, ``_MultiProcessingDataLoaderIter._reset`` and ``_process_data``.
    """

    def __init__(self, inner: Any, batches: int) -> None:
        self.inner, self.batches = inner, batches

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.inner)
        return self._go_on(source, deque(islice(source, self.batches)))

    def _go_on(self, source: Iterator[Any], ready: deque[Any]) -> Iterator[Any]:
        while ready:
            indices = ready.popleft()
            ready.extend(islice(source, 1))
            yield indices


def read_like_workers(engine: Any, loader: DataLoader[Any]) -> None:
    """Make an engine that follows the loader bit for bit read the batch sampler as the user's workers would."""
    if getattr(engine, "begins_at_iter", False) and loader.num_workers and loader.prefetch_factor:
        ahead = ReadAhead(engine.loader.batch_sampler, loader.num_workers * loader.prefetch_factor)
        engine.loader.__dict__["batch_sampler"] = ahead


def name_sampler(loader: DataLoader[Any]) -> str:
    """Return the name of the loader's attribute that yields the indices of its batches."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def makes_iterators(kind: type[DataLoader[Any]]) -> bool:
    """Whether a loader class overrides how a DataLoader iterates."""
    return (kind.__iter__, kind._get_iterator) != (DataLoader.__iter__, DataLoader._get_iterator)


def bound_batches(loader: Any, count: Callable[[], int | None]) -> Bounded | None:
    """Return a stand-in for the loader's sampler if it needs one, else None. With the user's workers it needs none: a
    plain run reads past the end too. A loader with custom iterators gets none, since these may read its state, or
    several batches at once."""
    if not isinstance(loader, DataLoader) or loader.num_workers or makes_iterators(type(loader)):
        return None
    return Bounded(getattr(loader, name_sampler(loader)), count)


Epochs = Callable[[DataLoader[Any], Callable[[], Iterator[Any]]], Iterator[Any]]
"""Makes an epoch's batches from a loader and a function that starts its iterator."""


def begin_unchanged(_loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """The `Epochs` of a loader that makes its batches itself."""
    return begin()


class Engine(Protocol):
    """Loads batches in place of a loader.

    An engine with a true ``begins_at_iter`` follows the loader bit for bit: ``load`` calls ``iter`` on
    ``loader.batch_sampler`` at once.
    """

    def load(self, seed: int) -> Iterator[Any]:
        """Yield one epoch's batches, from the indices of the loader's own batch sampler.

        Args:
            seed: the seed that was drawn from the loader's generator for its workers.
        """


class _At(NamedTuple):
    """How an epoch starts: the state from which its workers' seed was drawn, and its iterator if that has begun."""

    drawn: torch.Tensor | None
    begun: Iterator[Any] | None


class LazyLoader(Disguised):
    """Stands in for a loader: forwards reads and writes, and starts iterating at the first ``next``.

    It starts late for two reasons. Lightning 2.5.3 to 2.6.6 calls ``iter`` before it sets the sampler's epoch on
    resume, so that worker processes replay the order of epoch 0 (Lightning #21938). And a loader without workers also
    draws its shuffle at the first ``next``: random draws in between keep their place in the stream. A loader with its
    own ``__iter__`` starts at once, since only its class knows what happens there; so does one with the user's own
    workers, since it draws its shuffle at ``iter``.

    Args:
        inner: the loader to stand in for.
        keeps_iterator: whether the user's loader has persistent workers; it then draws a seed for its first epoch only.
        epochs: makes an epoch's batches.
        engine: loads in place of the loader; None if the loader itself loads.
        at_once: whether an epoch starts at ``iter``.
    """

    _OWN: ClassVar[Collection[str]] = (
        *("inner", "at_once", "keeps_iterator", "epochs", "engine", "live"),
        *("_drawn", "_seeded_at", "_restarts", "_has_begun"),
    )

    def __init__(
        self,
        inner: Any,
        *,
        keeps_iterator: bool = False,
        epochs: Epochs = begin_unchanged,
        engine: Engine | None = None,
        at_once: Callable[[], bool] = lambda: False,
    ) -> None:
        self.at_once = at_once
        self.inner, self.keeps_iterator, self.epochs, self.engine = inner, keeps_iterator, epochs, engine
        self._has_begun = False
        self._drawn: torch.Tensor | None = None
        self._seeded_at: torch.Tensor | None = None
        """The generator's state before the seed of the live workers was drawn."""
        self._restarts = 0
        self.live: weakref.ref[Any] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The loader's class, so that ``isinstance(trainer.train_dataloader, DataLoader)`` stays true."""
        return type(self.inner) if isinstance(self.inner, DataLoader) else type(self)

    def __iter__(self) -> Iterator[Any]:
        own = isinstance(self.inner, DataLoader) and makes_iterators(type(self.inner))
        begun = self._follow(iter(self.inner)) if own and not hasattr(self.inner, "state_dict") else None
        self._drawn = self._draw_seed() if begun is None else None
        at = _At(self._drawn, begun)
        begins_at_iter = self.engine is None or getattr(self.engine, "begins_at_iter", False)
        if begun is None and begins_at_iter and self.at_once():
            at = at._replace(begun=self._start(at))
        return _Batches(self._batches(at))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the loader itself, without its workers: a copy has no part in this run."""
        return copy.copy, (clone(self.inner, {}) if isinstance(self.inner, DataLoader) else self.inner,)

    def take_back(self) -> None:
        """Undo the draw of an ``iter`` call that was only a check: Lightning makes one on objects other than a
        DataLoader."""
        if self._drawn is not None:
            _find_generator(self.inner).set_state(self._drawn)
            self._drawn = None

    def _batches(self, at: _At) -> Iterator[Any]:
        yield from self._start(at)

    def _draw_seed(self) -> torch.Tensor | None:
        """Draw the seed for workers when DataLoader draws it, at ``iter``; return the generator's state before that."""
        if not isinstance(self.inner, DataLoader):
            return None
        if self.keeps_iterator and (self.inner._iterator is not None or self._has_begun):
            return None
        generator = _find_generator(self.inner)
        state = generator.get_state()
        draw_seed(generator)
        return state

    def _start(self, at: _At) -> Iterator[Any]:
        self._drawn = None
        if self.engine is not None:
            self._has_begun = True
            return self.engine.load(_read_seed(at.drawn)) if at.begun is None else at.begun
        if at.begun is not None:
            return at.begun
        self._restarts = 0
        return self.epochs(self.inner, lambda: self._begin(at.drawn))

    def _begin(self, drawn: torch.Tensor | None) -> Iterator[Any]:
        """Start the loader's iterator. If it is started again in an epoch, it gets another seed: otherwise its workers
        would draw the same numbers again."""
        self._seeded_at = self._seeded_at if drawn is None else drawn
        is_new = isinstance(self.inner, DataLoader) and self.inner._iterator is None
        with _generator_at(self.inner, self._seeded_at if is_new else None, self._restarts):
            iterator = iter(self.inner)
        self._restarts += 1
        return self._follow(iterator)

    def _follow(self, iterator: Iterator[Any]) -> Iterator[Any]:
        try:
            self.live = weakref.ref(iterator)  # weak: another reference would keep its workers alive
        except TypeError:
            self.live = None
        return iterator


class _Batches(PassesOn):
    """An epoch's batches. Copied or pickled, this becomes None, like a DataLoader's iterator in Lightning."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.inner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a number as a loader draws the seed of its workers; None for torch's global stream."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _read_seed(drawn: torch.Tensor | None) -> int:
    """Return the number that a generator in this state draws."""
    generator = torch.Generator()
    if drawn is not None:
        generator.set_state(drawn)
    return draw_seed(generator)


def _find_generator(loader: DataLoader[Any]) -> torch.Generator:
    """Return the generator that a loader draws its seeds from."""
    return torch.default_generator if loader.generator is None else loader.generator


@contextlib.contextmanager
def _generator_at(loader: Any, state: torch.Tensor | None, skipped: int) -> Iterator[None]:
    """Let a loader draw its seed from a generator in `state`, so that it gets the number that was drawn before, or the
    one that comes `skipped` draws later."""
    if state is None:
        yield
        return
    own, loader.generator = loader.generator, torch.Generator()
    loader.generator.set_state(state)
    for _ in range(skipped):
        draw_seed(loader.generator)
    try:
        yield
    finally:
        loader.generator = own
