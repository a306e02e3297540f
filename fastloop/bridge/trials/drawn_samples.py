"""Records the samples that a train loader yields, batch by batch: its sampler's ids, or a fingerprint of the content.

Both are recorded in the order of use, as bytes that do not depend on how samples are cut into batches. This code draws
no random numbers and changes no order. For disposable processes: loaders are not restored.
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

from fastloop.feeds.batch_tree import count_samples, iterate_tensors
from fastloop.feeds.lazy_loader import LazyLoader, PassesOn, ReadAhead, SameOrder, StandIn, clone
from fastloop.feeds.window_batches import WindowSampler

Source = Literal["sampler", "content"]
_MARKS = 32
"""Numbers recorded from each sample of a tensor."""
_ON_THEIR_OWN = (SequentialSampler, DistributedSampler)
_SHUFFLES = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Batch(NamedTuple):
    """One batch of a loader."""

    streams: tuple[bytes, ...]
    """Bytes that identify its samples in order: their ids, or one stream per tensor."""
    samples: int | None
    window: tuple[int, ...] | None
    """Samples of each loader batch that was merged into it; None if none were."""


class Drawn:
    """Queue of batches that one loader has yielded, or will yield, and that the ledger has not taken yet.

    Args:
        source: how its samples are identified.
        own_order: whether the sample order is independent of other random draws; None if unknown.
        dataset: number of samples in its dataset; None if unknown.
    """

    def __init__(self, source: Source, *, own_order: bool | None = None, dataset: int | None = None) -> None:
        self.source, self.own_order, self.dataset = source, own_order, dataset
        self.why: str | None = None
        """Why its samples are unknown."""
        self._ended = False
        self._length: int | None = None
        self._batches: deque[Batch] = deque()
        self._ids: list[bytes] = []
        """Ids of the current epoch, eight bytes each."""
        self._taken = 0

    def begin(self, length: int | None = None) -> None:
        """Begin an epoch of `length` batches, and drop batches left over from an epoch that was cut short."""
        self._batches.clear()
        self._length, self._ended = length, False

    def add(self, batch: Batch) -> None:
        self._batches.append(batch)

    def take(self) -> Batch | None:
        """Return the next batch in the order of use; None if the loader had no more."""
        if not self._batches:
            return None
        batch = self._batches.popleft()
        self._taken += 1
        if self.source == "sampler":
            self._ids.append(batch.streams[0])
        return batch

    def end(self) -> None:
        """Note that the loader has no more batches in this epoch."""
        self._ended = True

    def epoch(self) -> Epoch:
        """Summarize the batches taken in the epoch that is over."""
        complete = not self._batches and self._taken > 0 and (self._ended or self._taken == self._length)
        ids, self._ids, self._taken = self._ids, [], 0
        return Epoch(complete, *(_summarize_epoch(ids, self.dataset) if self.source == "sampler" else ()))


def listen(loader: Any, given: Any) -> tuple[Any, Drawn]:
    """Record what a train loader yields from now on.

    Args:
        loader: the loader that the Trainer is going to iterate.
        given: the loader it was made from. The user's own object does not change: to record its sampler, it is copied.

    Returns the loader to use in its place, and the record.
    """
    holder, inner = None, loader
    while isinstance(inner, LazyLoader):
        holder, inner = inner, inner.inner
    if not _draws_ids(inner):
        return loader, _note_content(inner)
    name = "sampler" if inner.batch_sampler is None else "batch_sampler"
    known = getattr(inner, name)
    if isinstance(known, _Sampler):  # this loader was passed before
        known.drawn.begin()
        return loader, known.drawn
    drawn = Drawn("sampler", own_order=_keeps_own_order(known), dataset=_count_unlimited(inner.dataset))
    noted = {name: _Sampler(known, drawn, batched=name == "batch_sampler")}
    if inner is not _unwrap_loader(given):
        inner.__dict__.update(noted)
        return loader, drawn
    twin = clone(inner, noted)
    if holder is None:
        return twin, drawn
    holder.inner = twin
    return loader, drawn


def _unwrap_loader(loader: Any) -> Any:
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


def _keeps_own_order(sampler: Any) -> bool | None:
    """Whether the sample order is independent of other random draws, such as augmentations; None if unknown."""
    while isinstance(sampler, (WindowSampler, SameOrder, ReadAhead)):
        sampler = sampler.inner
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) in _SHUFFLES:
        return sampler.generator is not None
    return True if type(sampler) in _ON_THEIR_OWN else None


def _count_unlimited(of: Any) -> int | None:
    """Return an object's length, that of a WindowSampler without the Trainer's limit; None if it has no length."""
    try:
        if isinstance(of, WindowSampler):
            return -(-len(of.inner) // of.window)
        return len(of)
    except Exception:
        return None


# -- ids --------------------------------------------------------------------------------------------------------------


class _Sampler(StandIn):
    """Replaces a (batch) sampler and records what it draws."""

    def __init__(self, inner: Any, drawn: Drawn, *, batched: bool) -> None:
        self.inner, self.drawn, self.batched = inner, drawn, batched
        self._windows = isinstance(inner, WindowSampler)

    def __iter__(self) -> Iterator[Any]:
        self.drawn.begin(_count_unlimited(self.inner))
        iterator = iter(self.inner)
        kind = _StatefulIterator if hasattr(iterator, "state_dict") else _Iterator
        return kind(iterator, self._note, self._end)

    def _note(self, drawn: Any) -> None:
        ids = drawn if isinstance(drawn, (list, tuple)) else _list_ids(drawn)
        # If a sampler draws single indices and the dataset returns whole batches, the batch size is unknown.
        count = len(ids) if self.batched else None
        window = self.inner.sizes[-1] if self._windows else None
        self.drawn.add(Batch((_pack_ids(ids),), count, window))

    def _end(self) -> None:
        if not self._windows:  # windows may end at a limit
            self.drawn.end()


class _Iterator(PassesOn):
    """Forwards to an iterator, and reports each item and the end."""

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
    """An iterator that can save its state: torchdata looks for these methods on the class, not the object."""

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


def _list_ids(drawn: Any) -> Any:
    """Make a list of ids from one id, or from a tensor or array of several."""
    ids = drawn.tolist() if hasattr(drawn, "tolist") else drawn
    return ids if isinstance(ids, list) else [ids]


def _pack_ids(ids: Any) -> bytes:
    """Pack each id into eight bytes, so that the digest does not depend on how ids are grouped."""
    try:
        return array("q", ids).tobytes()
    except (TypeError, OverflowError):
        return b"".join(hashlib.blake2b(repr(each).encode(), digest_size=8).digest() for each in ids)


# -- content ----------------------------------------------------------------------------------------------------------


def _note_content(loader: Any) -> Drawn:
    """Record the content of a loader's batches, through its class, because iter() ignores methods of an instance."""
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
        return _Iterator(kind.__iter__(self), lambda batch: drawn.add(_mark_content(batch, drawn)), drawn.end)

    names = {"__iter__": __iter__, "__module__": kind.__module__, "fastloop_drawn": drawn}
    try:
        loader.__class__ = type(kind.__name__, (kind,), names)
    except Exception as error:  # a list, or a class with a different layout
        drawn.why = f"the batches of a {kind.__name__} cannot be recorded: {error}"
    return drawn


def _mark_content(batch: Any, drawn: Drawn) -> Batch:
    """Fingerprint each sample: a few numbers from its ids and labels, or from all its tensors if it has none.

    Ids and labels are neither floating point nor bytes of an image, so augmentation does not change them.
    """
    leaves = [leaf for leaf in iterate_tensors(batch) if leaf.device.type == "cpu" and leaf.layout == torch.strided]
    if not leaves:
        drawn.why = "the loader yields batches that are already on the device, or contain no tensors"
        return Batch((), count_samples(batch), None)
    labels = [leaf for leaf in leaves if not leaf.is_floating_point() and leaf.element_size() > 1]
    return Batch(tuple(_mark(leaf) for leaf in labels or leaves), count_samples(batch), None)


def _mark(leaf: torch.Tensor) -> bytes:
    """Return a few numbers from each row of a tensor [n, ...]."""
    few = round(_MARKS ** (1 / max(1, leaf.dim() - 1)))
    part = leaf.detach()[
        tuple(slice(None, None, max(1, -(-size // few)) if axis else None) for axis, size in enumerate(leaf.shape))
    ]
    return bytes(part.contiguous().reshape(-1).view(torch.uint8).numpy())


# -- whole epochs -----------------------------------------------------------------------------------------------------


class Epoch(NamedTuple):
    """The samples of one epoch of a loader, regardless of order."""

    complete: bool
    """Whether the epoch used all batches of the loader."""
    digest: str | None = None
    """Digest of the ids, independent of their order; None if only the content is known."""
    again: int | None = None
    """Samples that had already been drawn in this epoch; None if unknown."""


def _summarize_epoch(ids: Sequence[bytes], dataset: int | None) -> tuple[str, int | None]:
    """Return the digest of an epoch's ids, eight bytes each, and how many of them had already been drawn.

    The count is None if the ids are not indices into a dataset of `dataset` samples.
    """
    drawn = numpy.sort(numpy.frombuffer(b"".join(ids), dtype=numpy.int64))
    counts = dataset is not None and (len(drawn) == 0 or (drawn[0] >= 0 and drawn[-1] < dataset))
    again = int(numpy.count_nonzero(drawn[1:] == drawn[:-1])) if counts else None
    return hashlib.blake2b(drawn.tobytes(), digest_size=8).hexdigest(), again


def join_epochs(epochs: Sequence[Epoch]) -> Epoch:
    """Combine the epochs of several loaders, keeping their samples distinct."""
    if len(epochs) == 1:
        return epochs[0]
    digests = [epoch.digest for epoch in epochs if epoch.digest is not None]
    known = bool(epochs) and len(digests) == len(epochs)
    digest = hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
    return Epoch(bool(epochs) and all(epoch.complete for epoch in epochs), digest if known else None)
