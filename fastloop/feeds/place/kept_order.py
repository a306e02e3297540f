"""A stand-in for a loader's batch sampler that can draw an epoch's order again and enter it in its middle."""

from __future__ import annotations

import contextlib
import copy
import zlib
from array import array
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypedDict

from fastloop.feeds.lazy_loader import Disguised
from fastloop.feeds.place.draws import Draws, Order

_END = object()


class Place(TypedDict):
    """Where a run stands in its data. Plain values and tensors only."""

    over: bool
    """It stands between two epochs."""
    batches: int
    """Of the user's loader, whose samples are in the weights."""
    digest: int
    """Of their indices."""
    order: Order
    """What the epoch's order is drawn from."""


class KeptOrder(Disguised):
    """Stands in for a loader's batch sampler, or for its sampler where that makes no batches.

    Skips by index: no sample is loaded. Nothing is drawn before the first index is asked for. An epoch is to be drawn
    once, and not before the one before it is done.

    Args:
        inner: the user's.
        draws: what it draws its order from.
        take: gives the place to go on from; None from the second time on, and where there is none.
        warn: takes one line for the user.
    """

    _OWN = ("inner", "draws", "take", "warn", "order", "_digests")

    def __init__(
        self, inner: Any, draws: Draws, *, take: Callable[[], Place | None], warn: Callable[[str], None]
    ) -> None:
        self.inner, self.draws, self.take, self.warn = inner, draws, take, warn
        self.order: Order | None = None
        """What the order of the epoch under way was drawn from; None before the first."""
        self._digests = array("L", [0])

    def __iter__(self) -> Iterator[Any]:
        place, streams, source = self.take(), {}, None
        if place is not None:
            self.draws.put_back(place["order"])
            streams = dict(place["order"]["streams"])
        # A place between two epochs has no streams: the next epoch draws from where they are.
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (self.inner,)  # copies and pickles of its loader have no part in this run

    def digest(self, batches: int) -> int | None:
        """Of the indices of the epoch's first batches; None where fewer were drawn: somebody gave some out twice."""
        return self._digests[batches] if batches < len(self._digests) else None

    def _check(self, place: Any) -> None:
        if self._digests[-1] != place["digest"]:
            self.warn(
                "the sampler draws another order than before the checkpoint (other data, batch size, sampler or number"
                " of ranks?): some samples come twice in this epoch, and some not at all"
            )


def _digest(batch: Any, before: int) -> int:
    """Of one batch of indices, or one index, behind those `before`. What is no number counts as present only."""
    try:
        content = array("q", batch if hasattr(batch, "__iter__") else [batch]).tobytes()
    except (TypeError, OverflowError, ValueError):
        content = b"?"
    return zlib.crc32(content, before)
