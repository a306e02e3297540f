"""Which samples a train loader hands out, batch by batch: the ids its sampler drew, or a mark of what the batches hold.

Both are noted in the order of use and in bytes that do not depend on how samples are cut into batches. Nothing here
draws a random number or changes an order. For disposable processes: loaders are not put back.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastloop.feeds.batch_tree import count_samples, tensors
from fastloop.feeds.lazy_loader import Bounded, LazyLoader, PassesOn, StandIn, clone
from fastloop.feeds.window_batches import WindowSampler

Source = Literal["sampler", "content"]
_MARKS = 32
"""Numbers noted of each sample of a tensor."""
_ON_THEIR_OWN = (SequentialSampler, DistributedSampler)
_SHUFFLES = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Batch(NamedTuple):
    """One batch of a loader."""

    streams: tuple[bytes, ...]
    """Bytes that name its samples one after the other: their ids, or one stream per tensor."""
    samples: int | None
    window: tuple[int, ...] | None
    """Samples of each loader batch that was merged into it."""


class Drawn:
    """What one loader has handed out, or will, and nobody has taken in yet.

    Args:
        source: by what its samples are known.
        own_order: no other random numbers have a say in the order of its samples. None = unknown.
        dataset: samples of its dataset; None = unknown.
    """

    def __init__(self, source: Source, *, own_order: bool | None = None, dataset: int | None = None) -> None:
        self.source, self.own_order, self.dataset = source, own_order, dataset
        self.why: str | None = None
        """Why its samples are not known."""
        self._ended = False
        self._length: int | None = None
        self._batches: deque[Batch] = deque()
        self._ids: list[bytes] = []
        """Of the present epoch, eight bytes each."""
        self._taken = 0

    def begin(self, length: int | None = None) -> None:
        """An epoch of so many batches begins. What is left of one that was cut short is never used."""
        self._batches.clear()
        self._length, self._ended = length, False

    def add(self, batch: Batch) -> None:
        self._batches.append(batch)

    def take(self) -> Batch | None:
        """The next batch in the order of use; None where the loader had no more."""
        if not self._batches:
            return None
        batch = self._batches.popleft()
        self._taken += 1
        if self.source == "sampler":
            self._ids.append(batch.streams[0])
        return batch

    def end(self) -> None:
        """The loader has no more for this epoch."""
        self._ended = True

    def epoch(self) -> Epoch:
        """An epoch is over: all that was taken since the last one."""
        complete = not self._batches and self._taken > 0 and (self._ended or self._taken == self._length)
        ids, self._ids, self._taken = self._ids, [], 0
        return Epoch(complete, *(_summary(ids, self.dataset) if self.source == "sampler" else ()))


def listen(loader: Any, given: Any) -> tuple[Any, Drawn]:
    """Note what a train loader hands out from now on.

    Args:
        loader: what the Trainer is going to iterate.
        given: what it was made of. The user's own object stays as it is: it is copied where its sampler is noted.

    Returns the loader to use in its place.
    """
    holder, inner = None, loader
    while isinstance(inner, LazyLoader):
        holder, inner = inner, inner.inner
    if not _draws_ids(inner):
        return loader, _note_content(inner)
    name = "sampler" if inner.batch_sampler is None else "batch_sampler"
    known = getattr(inner, name)
    if isinstance(known, _Sampler):  # a loader that comes again
        known.drawn.begin()
        return loader, known.drawn
    drawn = Drawn("sampler", own_order=_own_order(known), dataset=_length(inner.dataset))
    noted = {name: _Sampler(known, drawn, batched=name == "batch_sampler")}
    if inner is not _innermost(given):
        inner.__dict__.update(noted)
        return loader, drawn
    twin = clone(inner, noted)
    if holder is None:
        return twin, drawn
    holder.inner = twin
    return loader, drawn


def _innermost(loader: Any) -> Any:
    while isinstance(loader, LazyLoader):
        loader = loader.inner
    return loader


def _draws_ids(loader: Any) -> bool:
    """Whether batches come in the order in which a sampler draws them."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and getattr(loader, "in_order", True)
    )


def _own_order(sampler: Any) -> bool | None:
    """Whether nothing that draws random numbers elsewhere, like an augmentation, can change the order."""
    while isinstance(sampler, (WindowSampler, Bounded)):
        sampler = sampler.inner
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) in _SHUFFLES:
        return sampler.generator is not None
    return True if type(sampler) in _ON_THEIR_OWN else None


def _length(of: Any) -> int | None:
    """Its length, or that without the limit of a Trainer; None where it has none."""
    try:
        if isinstance(of, WindowSampler):
            return -(-len(of.inner) // of.window)
        return len(of)
    except Exception:
        return None


# -- ids --------------------------------------------------------------------------------------------------------------


class _Sampler(StandIn):
    """Stands in for a (batch) sampler and notes what it draws."""

    def __init__(self, inner: Any, drawn: Drawn, *, batched: bool) -> None:
        self.inner, self.drawn, self.batched = inner, drawn, batched
        self._windows = isinstance(inner, WindowSampler)

    def __iter__(self) -> Iterator[Any]:
        self.drawn.begin(_length(self.inner))
        iterator = iter(self.inner)
        kind = _StatefulIterator if hasattr(iterator, "state_dict") else _Iterator
        return kind(iterator, self._note, self._end)

    def _note(self, drawn: Any) -> None:
        ids = drawn if isinstance(drawn, (list, tuple)) else _listed(drawn)
        # Of a sampler that draws samples one by one where the dataset hands out whole batches, the size is not known.
        count = len(ids) if self.batched else None
        window = self.inner.sizes[-1] if self._windows else None
        self.drawn.add(Batch((_bytes(ids),), count, window))

    def _end(self) -> None:
        if not self._windows:  # those may end at a limit
            self.drawn.end()


class _Iterator(PassesOn):
    """Passes on what it is asked, and notes what comes out and that no more comes."""

    def __init__(self, inner: Iterator[Any], note: Callable[[Any], None], end: Callable[[], None]) -> None:
        self.inner, self._note, self._end = inner, note, end

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            drawn = next(self.inner)
        except StopIteration:
            self._end()
            raise
        self._note(drawn)
        return drawn


class _StatefulIterator(_Iterator):
    """One that can say where it stands: torchdata asks the class, not the object."""

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


def _listed(drawn: Any) -> Any:
    """One id, or a tensor or array of several."""
    ids = drawn.tolist() if hasattr(drawn, "tolist") else drawn
    return ids if isinstance(ids, list) else [ids]


def _bytes(ids: Any) -> bytes:
    """Eight each: the same whether the ids come in one list or in several."""
    try:
        return array("q", ids).tobytes()
    except (TypeError, OverflowError):
        return b"".join(hashlib.blake2b(repr(each).encode(), digest_size=8).digest() for each in ids)


# -- content ----------------------------------------------------------------------------------------------------------


def _note_content(loader: Any) -> Drawn:
    """Note what the batches of a loader hold, as it hands them out; at its class, for an object has no say in iter."""
    kind: Any = type(loader)
    if (known := vars(kind).get("fastloop_drawn")) is not None:
        known.begin()
        return known  # type: ignore[no-any-return]
    drawn = Drawn("content")
    if not hasattr(kind, "__iter__"):
        drawn.why = f"a {kind.__name__} is read by index"
        return drawn

    def __iter__(self: Any) -> Iterator[Any]:
        drawn.begin()
        return _Iterator(kind.__iter__(self), lambda batch: drawn.add(_content(batch, drawn)), drawn.end)

    names = {"__iter__": __iter__, "__module__": kind.__module__, "fastloop_drawn": drawn}
    try:
        loader.__class__ = type(kind.__name__, (kind,), names)
    except Exception as error:  # a list, or a class of a layout of its own
        drawn.why = f"a {kind.__name__} does not let its batches be looked at: {error}"
    return drawn


def _content(batch: Any, drawn: Drawn) -> Batch:
    """A mark of each sample: a few numbers of its ids and labels, or of all of it where it has none.

    Those are no floating point and no bytes of an image, so they stay what they are when an image is augmented.
    """
    leaves = [leaf for leaf in tensors(batch) if leaf.device.type == "cpu" and leaf.layout == torch.strided]
    if not leaves:
        drawn.why = "the loader hands out batches that are on the device already, or hold no tensors"
        return Batch((), count_samples(batch), None)
    labels = [leaf for leaf in leaves if not leaf.is_floating_point() and leaf.element_size() > 1]
    return Batch(tuple(_mark(leaf) for leaf in labels or leaves), count_samples(batch), None)


def _mark(leaf: torch.Tensor) -> bytes:
    """A few numbers of each row of a tensor [n, ...]."""
    few = round(_MARKS ** (1 / max(1, leaf.dim() - 1)))
    part = leaf.detach()[
        tuple(slice(None, None, max(1, -(-size // few)) if axis else None) for axis, size in enumerate(leaf.shape))
    ]
    return bytes(part.contiguous().reshape(-1).view(torch.uint8).numpy())


# -- whole epochs -----------------------------------------------------------------------------------------------------


class Epoch(NamedTuple):
    """What one loader gave to an epoch, in whatever order."""

    complete: bool
    """All batches that the loader had."""
    digest: str | None = None
    """The same for the same ids in another order; None where only the content is known."""
    again: int | None = None
    """Samples that had been drawn before in this epoch; None = unknown."""


def _summary(ids: Sequence[bytes], dataset: int | None) -> tuple[str, int | None]:
    """Digest of an epoch's ids, eight bytes each, and how many had been drawn before.

    The latter is None where ids do not count the `dataset` samples of a dataset.
    """
    drawn = numpy.sort(numpy.frombuffer(b"".join(ids), dtype=numpy.int64))
    counts = dataset is not None and (len(drawn) == 0 or (drawn[0] >= 0 and drawn[-1] < dataset))
    again = int(numpy.count_nonzero(drawn[1:] == drawn[:-1])) if counts else None
    return hashlib.blake2b(drawn.tobytes(), digest_size=8).hexdigest(), again


def join_epochs(epochs: Sequence[Epoch]) -> Epoch:
    """An epoch of several loaders, whose samples are told apart."""
    if len(epochs) == 1:
        return epochs[0]
    digests = [epoch.digest for epoch in epochs if epoch.digest is not None]
    known = bool(epochs) and len(digests) == len(epochs)
    digest = hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
    return Epoch(bool(epochs) and all(epoch.complete for epoch in epochs), digest if known else None)
