"""Looks samples up in a store, or makes and stores them; counts hits and misses over all processes."""

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
"""Rows of the table of counts that all processes share; row 0 is for processes that are not loader workers."""
_COUNTS = ("hits", "misses", "not_kept", "damaged", "changed", "fill_us")


class Store(Protocol):
    """Holds records under keys of 16 bytes. Safe with fork, pickling and threads."""

    def get(self, key: bytes) -> memoryview | None:
        """Return the record under a key; None if there is none. May raise ServerAway."""

    def put(self, key: bytes, record: bytes) -> bool:
        """Store a record; return False if that did not work. May raise StoreFull and ServerAway, each once."""

    def count(self) -> Mapping[str, int]:
        """Return the contents as kept_bytes and kept_samples; empty if the store does not count them."""

    def close(self) -> None:
        """Stop using the store."""


class SampleCache:
    """Returns samples from a store, or makes them if they are not there.

    Args:
        store: holds the samples.
        share: share of all samples that may be stored, 0 to 1; the keys decide which, so they are always the same.
    """

    def __init__(self, store: Store, share: float) -> None:
        self.store, self.share = store, share
        # torch's shared memory reaches workers both with fork and with spawn.
        counts: Any = torch.zeros(_PROCESSES, len(_COUNTS), dtype=torch.int64)
        self._counts = counts.share_memory_()
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def __getstate__(self) -> Mapping[str, Any]:
        return {"store": self.store, "share": self.share, "_counts": self._counts}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _warned=set())

    def fetch(self, key: bytes | None, make: Callable[[], Any]) -> Any:
        """Return the sample under a key, as a copy; if it is not stored, `make` makes it.

        Args:
            key: 16 bytes; None for a sample that must not be stored.
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

    def note_changed(self) -> None:
        """Count a sample that was made without the store, since the dataset was changed."""
        self._add(changed=1)

    def _try(self, ask: Callable[[], Any]) -> Any:
        """Return the result of a store operation; if it fails, warn the user and return None."""
        try:
            return ask()
        except CannotKeep as reason:
            self._warn(f"samples are not cached if they contain {reason}")
        except StoreFull as reason:
            why = f" ({reason})" if str(reason) else ""
            self._warn(f"the sample store is full{why}: samples that are not in it are loaded each time")
        except ServerAway as reason:
            self._warn(f"{reason}: samples are loaded each time until it does")
        return None

    def _warn(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(line, RuntimeWarning, stacklevel=2)

    def _add(self, **counts: int) -> None:
        worker = torch.utils.data.get_worker_info()
        row = 0 if worker is None else 1 + worker.id % (_PROCESSES - 1)
        table = self._counts.numpy()
        mine = self._lock.acquire(timeout=0.1)  # in a forked process, the lock's holder may not exist
        for name, count in counts.items():
            table[row, _COUNTS.index(name)] += count
        if mine:
            self._lock.release()

    def evidence(self) -> dict[str, Any]:
        """Return the counts of all processes since the run began; each requested sample is a hit or a miss."""
        totals = dict(zip(_COUNTS, self._counts.sum(dim=0).tolist(), strict=True))
        fill_s = totals.pop("fill_us") / 1e6
        with contextlib.suppress(ServerAway):
            totals.update(self.store.count())
        return {**totals, "fill_s": round(fill_s, 3)}

    def read_fill_s(self) -> tuple[float, float]:
        """Return the seconds spent on storing samples, in this process and in the slowest worker."""
        spent_us = self._counts.numpy()[:, _COUNTS.index("fill_us")]
        return float(spent_us[0]) / 1e6, float(spent_us[1:].max()) / 1e6

    def close(self) -> None:
        """Leave the store."""
        self.store.close()
