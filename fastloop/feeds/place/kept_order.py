"""A stand-in for a loader's batch sampler that can redraw an epoch's order and start in the middle of it."""

from __future__ import annotations

import contextlib
import zlib
from array import array
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypedDict

from fastloop.feeds.lazy_loader import SameOrder
from fastloop.feeds.place.draws import Draws, Order

_END = object()


class EpochPlace(TypedDict):
    """A run's position in its data, in plain values and tensors only."""

    over: bool
    """Whether the run is between two epochs."""
    batches: int
    """Batches of the user's loader that the weights were trained on in this epoch."""
    digest: int
    """Digest of their indices."""
    order: Order
    """Random state that the epoch's order is drawn from."""


class KeptOrder(SameOrder):
    """Stands in for a loader's batch sampler, or for its sampler if that loader makes no batches.

    Skips by index, without loading samples. Draws nothing before the first index is requested. Each epoch may be drawn
    only once, after the previous one has ended.

    Args:
        inner: the user's sampler.
        draws: the random state that decides its order.
        take: returns the place to resume from; None if there is none, and from the second call on.
        warn: shows the user one line.
    """

    _OWN = ("inner", "draws", "take", "warn", "order", "_digests")

    def __init__(
        self, inner: Any, draws: Draws, *, take: Callable[[], EpochPlace | None], warn: Callable[[str], None]
    ) -> None:
        self.inner, self.draws, self.take, self.warn = inner, draws, take, warn
        self.order: Order | None = None
        """State that the current epoch's order was drawn from; None before the first epoch."""
        self._digests = array("L", [0])

    def __iter__(self) -> Iterator[Any]:
        place, streams, source = self.take(), {}, None
        if place is not None:
            self.draws.put_back(place["order"])
            streams = dict(place["order"]["streams"])
        # A place between two epochs has no streams: the next epoch draws from their current state.
        self.order = {**self.draws.read(), **({"streams": dict(streams)} if streams else {})}
        self._digests = array("L", [0])
        skipped = 0 if place is None else place["batches"]
        for number in count():
            draws = streams and (number == 0 or not self.draws.draws_at_once)
            with self.draws.on_streams(streams) if draws else contextlib.nullcontext():
                source = iter(self.inner) if source is None else source
                batch = next(source, _END)
            if (place is not None and number == skipped) or (batch is _END and number < skipped):
                self._check(place)
            if batch is _END:
                return
            self._digests.append(_digest(batch, self._digests[-1]))
            if number >= skipped:
                yield batch

    def digest(self, batches: int) -> int | None:
        """Return the digest of the indices in the epoch's first `batches`; None if fewer were drawn, which means that
        other code repeated some."""
        return self._digests[batches] if batches < len(self._digests) else None

    def _check(self, place: Any) -> None:
        if self._digests[-1] != place["digest"]:
            self.warn(
                "the sampler draws a different order than before the checkpoint (other data, batch size, sampler or"
                " number of ranks?): some samples come twice in this epoch, and others not at all"
            )


def _digest(batch: Any, before: int) -> int:
    """Extend the digest `before` by a batch of indices, or by one index. All indices but integers hash alike."""
    try:
        content = array("q", batch if hasattr(batch, "__iter__") else [batch]).tobytes()
    except (TypeError, OverflowError, ValueError):
        content = b"?"
    return zlib.crc32(content, before)
