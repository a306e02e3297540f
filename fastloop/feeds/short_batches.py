"""Short batches among full ones, as the last one of an epoch is: not worth a graph of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

RARE = 0.1
"""Share of calls up to which a short batch is an exception."""


class Ragged:
    """Tells calls with a rare, short batch from all others.

    Short is a first dimension below the largest one seen, all others being equal. What comes more often than once in
    ten calls, as the short pieces of a batch cut in parts do, is no exception.
    """

    def __init__(self) -> None:
        self.rare = 0
        self._calls = self._short = 0
        self._usual: tuple[int, ...] = ()

    def __call__(self, arguments: Sequence[Any]) -> bool:
        """Whether this call is one. Counts it."""
        shape = next((tuple(each.shape) for each in arguments if getattr(each, "shape", None)), ())
        self._calls += 1
        if not shape or not self._usual or shape[1:] != self._usual[1:] or shape[0] >= self._usual[0]:
            self._usual = shape or self._usual
            return False
        self._short += 1
        is_rare = self._short <= RARE * self._calls
        self.rare += is_rare
        return is_rare


class EagerWhenShort:
    """A module's compiled call that hands rare, short batches to the module as it is."""

    def __init__(self, module: Any, compiled: Callable[..., Any]) -> None:
        self.module, self.compiled = module, compiled
        self.ragged = {True: Ragged(), False: Ragged()}
        """By training and evaluation, whose batches have sizes of their own."""

    @property
    def eager(self) -> int:
        return sum(each.rare for each in self.ragged.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        short = self.ragged[self.module.training]((*args, *kwargs.values()))
        return (self.module._call_impl if short else self.compiled)(*args, **kwargs)
