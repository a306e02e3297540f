"""Looks samples up in a store, or makes and keeps them; counts hits and misses in every process."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from fastloop.feeds.cache.mapped import StoreFull
from fastloop.feeds.cache.records import CannotKeep, pack, unpack
from fastloop.feeds.cache.server import ServerAway

_PROCESSES = 512
"""Rows of the table that all processes count in: row 0 for those that are no loader's workers."""
_COUNTS = ("hits", "misses", "not_kept", "damaged", "fill_us")


class Store(Protocol):
    """Where records are kept by their keys of 16 bytes. Survives fork, pickling and threads."""

    def get(self, key: bytes) -> memoryview | None:
        """The record under a key; None where there is none. May raise ServerAway."""

    def put(self, key: bytes, record: bytes) -> bool:
        """Keep a record; False where that did not come about. May raise StoreFull and ServerAway, each once."""

    def count(self) -> Mapping[str, int]:
        """What is in it, as far as that is counted: kept_bytes, kept_samples."""

    def close(self) -> None:
        """Use it no more."""


class SampleCache:
    """Hands out samples, from a store where they are there.

    Args:
        store: where they are kept.
        share: of all samples that may be kept, 0 to 1; always the same ones, by their keys.
    """

    def __init__(self, store: Store, share: float) -> None:
        self.store, self.share = store, share
        # torch's own way to share memory goes to workers by fork and by spawn.
        counts: Any = torch.zeros(_PROCESSES, len(_COUNTS), dtype=torch.int64)
        self._counts = counts.share_memory_()
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def __getstate__(self) -> Mapping[str, Any]:
        return {"store": self.store, "share": self.share, "_counts": self._counts}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _warned=set())

    def fetch(self, key: bytes | None, make: Callable[[], Any]) -> Any:
        """The sample under a key, a copy for the caller alone; made by `make` where it is not kept.

        Args:
            key: 16 bytes; None: it is not to be kept.
        """
        if key is None or int.from_bytes(key[-4:], "little") >= self.share * 2**32:
            self._add(misses=1, not_kept=1)
            return make()
        record = self._try(lambda: self.store.get(key))
        if record is not None:
            found = unpack(key, record)
            if found is not None:
                self._add(hits=1)
                return found[0]
        sample = make()
        began = time.perf_counter_ns()
        kept = self._try(lambda: self.store.put(key, pack(key, sample)))
        spent_us = (time.perf_counter_ns() - began) // 1000
        self._add(misses=1, not_kept=not kept, damaged=record is not None, fill_us=spent_us)
        return sample

    def _try(self, ask: Callable[[], Any]) -> Any:
        """The store's answer; None, and a line for the user, where it cannot do what it is for."""
        try:
            return ask()
        except CannotKeep as reason:
            self._warn(f"samples that hold {reason} are not kept")
        except StoreFull as reason:
            why = f" ({reason})" if str(reason) else ""
            self._warn(f"the sample store is full{why}: samples that are not in it are made each time")
        except ServerAway as reason:
            self._warn(f"{reason}: samples are made each time until it does")
        return None

    def _warn(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(line, RuntimeWarning, stacklevel=2)

    def _add(self, **counts: int) -> None:
        worker = torch.utils.data.get_worker_info()
        row = 0 if worker is None else 1 + worker.id % (_PROCESSES - 1)
        table = self._counts.numpy()
        mine = self._lock.acquire(timeout=0.1)  # in a forked process its holder may not exist
        for name, count in counts.items():
            table[row, _COUNTS.index(name)] += count
        if mine:
            self._lock.release()

    def evidence(self) -> dict[str, Any]:
        """Counts of all processes since the run began: samples asked for are hits and misses."""
        totals = dict(zip(_COUNTS, self._counts.sum(dim=0).tolist(), strict=True))
        fill_s = totals.pop("fill_us") / 1e6
        with contextlib.suppress(ServerAway):
            totals.update(self.store.count())
        return {**totals, "fill_s": round(fill_s, 3)}

    def read_fill_s(self) -> tuple[float, float]:
        """Seconds spent on putting samples into the store: in this process, and in the worker that spent most."""
        spent_us = self._counts.numpy()[:, _COUNTS.index("fill_us")]
        return float(spent_us[0]) / 1e6, float(spent_us[1:].max()) / 1e6

    def close(self) -> None:
        """Leave the store."""
        self.store.close()
