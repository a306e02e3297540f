"""The want that caches a dataset's samples: which store, its size, and what it holds. Imports torch only when used."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fastloop.errors import NotApplicable
from fastloop.evidence import machine
from fastloop.feeds.cache import places
from fastloop.records.facts import PrefixFacts

if TYPE_CHECKING:
    from fastloop.feeds.cache.sample_cache import Store

_SHARE_OF_FREE = 0.9
"""Share of the free space that a store may take when it is opened; the rest is for others."""
_SHARE_OF_SERVER = 0.8
_MARGIN = 0.97
"""Share of a store's size to plan with, so that samples slightly larger than the measured ones still fit."""


@dataclass(frozen=True, kw_only=True)
class KeptSamples:
    """Which samples of the loader's dataset to cache, and where."""

    store: Literal["shm", "disk", "redis"]
    budget_bytes: int | None
    """Upper limit; None for as much as the server reports free."""
    prefix: PrefixFacts
    path: str | None = None
    url: str | None = None
    live: list[Any] = field(default_factory=list, compare=False, repr=False, metadata={"json": None})
    """Caches that `wrap` opened and `close` closes, each with the methods that use it."""

    def wrap(self, dataset: Any) -> Any:
        """Return the dataset with its samples cached.

        Raises:
            NotApplicable: the store cannot be opened, or samples made with it differ from the dataset's own.
        """
        from fastloop.feeds.cache import datasets
        from fastloop.feeds.cache.sample_cache import SampleCache

        has_marked = any(datasets.list_marked(dataset))
        if not has_marked:
            datasets.check_images(dataset)
        places.sweep(places.find_shm_root())
        store, room = self._open()
        cache = SampleCache(store, compute_share(self.prefix, room))
        self.live.append((cache, datasets.put_in(dataset, cache)))
        atexit.register(self.close)  # for a program that ends without its Trainer's teardown
        if has_marked:  # these methods cache their results, for any loader
            return dataset
        return datasets.CachedImages(dataset, cache, bytes.fromhex(self.prefix.fingerprint))

    def _open(self) -> tuple[Store, int | None]:
        """Open the store; also return its room in bytes."""
        from fastloop.feeds.cache import fingerprint, mapped, records, server

        versions = records.describe_versions()
        words = (self.prefix.fingerprint, self.prefix.dataset, versions)
        name = f"{records.FORMAT}-{fingerprint.digest_texts(*words).hex()}"
        info: Mapping[str, Any] = {
            "schema": 1,
            "format": records.FORMAT,
            "versions": versions,
            "dataset": self.prefix.dataset,
            "what": self.prefix.what,
            "samples": self.prefix.samples,
            "made_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if self.store == "redis":
            assert self.url is not None
            server_room = server.read_room(self.url) if self.budget_bytes is None else None
            room = self.budget_bytes if server_room is None else int(_SHARE_OF_SERVER * server_room)
            return server.open_server(self.url, name, info), room
        in_shm = self.store == "shm"
        root = places.find_shm_root() if in_shm else places.find_disk_root(self.path)
        free = machine.read_disk_free_bytes(root) or 0
        already = sum(found.kept_bytes for found in places.list_caches(root) if found.path.name == name)
        room = min(self.budget_bytes or free, int(_SHARE_OF_FREE * free) + already)
        if not room:
            raise NotApplicable(f"there is no room in {root}")
        fitting = min(self.prefix.samples, room // (self.prefix.sample_bytes or 1024) + 1)
        return mapped.open_store(root, name, capacity=room, samples=fitting, info=info, remove=in_shm), room

    def evidence(self) -> Mapping[str, Any]:
        """Return hits and misses of all processes, and the contents of the store."""
        return {"store": self.store, **self.live[-1][0].evidence()} if self.live else {}

    def read_fill_s(self) -> tuple[float, float]:
        """Return the seconds spent on storing samples, in the training process and in its slowest worker."""
        return self.live[-1][0].read_fill_s() if self.live else (0.0, 0.0)

    def close(self) -> None:
        """Restore the dataset and leave the store."""
        from fastloop.feeds.cache import datasets

        atexit.unregister(self.close)
        while self.live:
            cache, done = self.live.pop()
            datasets.take_out(done)
            cache.close()


def compute_share(prefix: PrefixFacts, room: int | None) -> float:
    """Return the share of the samples that a store has room for, 0 to 1."""
    if room is None or prefix.sample_bytes is None:
        return 1.0
    return min(1.0, _MARGIN * room / max(1, prefix.samples * prefix.sample_bytes))
