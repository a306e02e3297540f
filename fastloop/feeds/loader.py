"""A copy of the user's loader with some settings changed, and a stand-in that starts it late."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

_GUARDED = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")
"""Attributes DataLoader refuses to set after its __init__."""


def clone(loader: DataLoader[Any], settings: Mapping[str, Any]) -> DataLoader[Any]:
    """A shallow copy with `settings` changed; the user's object stays as it is.

    Copying instead of constructing anew keeps the class, constructor arguments nobody else knows, collate_fn,
    generator and custom attributes (ten kinds of loaders were tried; constructing anew lost three of them).
    """
    twin = copy.copy(loader)
    twin.__dict__["_iterator"] = None
    for name, value in settings.items():
        if name in _GUARDED:
            twin.__dict__[name] = value
        else:
            setattr(twin, name, value)
    return twin


class LazyLoader:
    """Stands in for a loader: forwards reads and writes, and starts iterating at the first ``next``.

    Late, because Lightning 2.5.3 to 2.6.6 calls ``iter`` before it sets the sampler's epoch on resume, so that
    worker processes replay the order of epoch 0 (Lightning #21938).
    """

    _OWN = frozenset({"inner", "live"})

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.live: weakref.ref[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: a copy or an unpickled stand-in
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        yield from self._start()

    def _start(self) -> Iterator[Any]:
        iterator = iter(self.inner)
        try:
            self.live = weakref.ref(iterator)  # weak: an extra hold would keep its workers alive
        except TypeError:
            self.live = None
        return iterator
