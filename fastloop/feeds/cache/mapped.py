"""A store in files that all processes of a node map into memory; the files are in shared memory or on disk.

``samples.bin`` is a sparse file of the store's full size. Records are appended and never evicted, so an epoch that is
larger than the store finds the same samples in it each time. ``index.bin`` is a hash table of their offsets. Writers
take turns with a lock on ``lock``, which the kernel frees when its holder dies. Readers need no lock: each record
contains its key and a checksum.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastloop.errors import NotApplicable
from fastloop.feeds.cache import places
from fastloop.feeds.cache.places import DATA, INFO, StorePlace

_HEAD = struct.Struct("<8sQQQQQ")
"""Magic, slots, capacity, bytes used, records, and 1 once the store is full."""
_MAGIC = b"FLindex1"
_SLOT = struct.Struct("<16sQQ")
"""Key, 1 + the record's offset, its length."""
_SLOTS, _CAPACITY, _USED, _RECORDS, _FULL = 8, 16, 24, 32, 40
_ALIGN, _LEAST_SLOTS, _MOST_LOAD = 64, 1024, 0.7
_PATIENCE_S = 0.25
"""Longest wait of a writer: the lock's holder may be suspended, and a sample need not be stored."""


class StoreFull(Exception):
    """The store accepts no more records; raised only once, in one of the processes."""


class MappedStore:
    """Records by key in the files of one directory. Forked and spawned processes and threads may share one object.

    Args:
        place: the directory, marked as in use.
        remove: delete it when its last user leaves.
    """

    def __init__(self, place: StorePlace, *, remove: bool) -> None:
        self.path, self._remove = place.path, remove
        self._place: StorePlace | None = place
        self._files: _Files | None = None
        self._pid = -1

    def __getstate__(self) -> Mapping[str, Any]:
        return {"path": self.path, "_remove": self._remove}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _place=None, _files=None, _pid=-1)

    def get(self, key: bytes) -> memoryview | None:
        """Return the record under a key, None if there is none; the caller checks whether it is intact."""
        files = self._open()
        return None if files is None else files.get(key)

    def put(self, key: bytes, record: bytes) -> bool:
        """Store a record, replacing an earlier one under this key; return False if that did not work.

        Raises:
            StoreFull: for the first record that does not fit.
        """
        files = self._open()
        return files is not None and files.put(key, record)

    def count(self) -> Mapping[str, int]:
        """Count the bytes and records in the store."""
        files = self._open()
        return {} if files is None else {"kept_bytes": files.read(_USED), "kept_samples": files.read(_RECORDS)}

    def close(self) -> None:
        """Leave the directory."""
        self._files, self._pid = None, -1
        if self._place is not None:
            self._place.leave(remove=self._remove)

    def _open(self) -> _Files | None:
        """Return the files, opened anew in each process: processes that inherit an open file share its lock."""
        if self._pid != os.getpid():
            try:
                self._files = _Files(self.path)
            except (OSError, ValueError):  # removed meanwhile
                self._files = None
            self._pid = os.getpid()
        return self._files


def open_store(
    root: Path, name: str, *, capacity: int, samples: int, info: Mapping[str, Any], remove: bool
) -> MappedStore:
    """Open the store `name` below a root; create it if missing, enlarge it if smaller than `capacity` bytes.

    Raises:
        NotApplicable: the root is not private, or has no room.
    """
    places.make_private(root)
    places.sweep(root, drafts_only=not remove)
    try:
        place = places.enter(root, name, lambda draft: _make(draft, capacity, samples, info))
        try:
            _Files(place.path).widen(capacity)
        except ValueError:  # damaged: create a new one
            place.leave(remove=True)
            place = places.enter(root, name, lambda draft: _make(draft, capacity, samples, info))
    except OSError as error:
        raise NotApplicable(f"no store can be created in {root}: {error.strerror or error}") from None
    return MappedStore(place, remove=remove)


def _make(draft: Path, capacity: int, samples: int, info: Mapping[str, Any]) -> None:
    slots = _LEAST_SLOTS
    while slots < 2 * samples:
        slots *= 2
    with (draft / "index.bin").open("wb") as index:
        os.posix_fallocate(index.fileno(), 0, _HEAD.size + slots * _SLOT.size)  # no SIGBUS if the disk fills up later
        index.write(_HEAD.pack(_MAGIC, slots, capacity, 0, 0, 0))
    with (draft / DATA).open("wb") as data:
        data.truncate(capacity)
    (draft / "lock").touch(mode=0o600)
    (draft / INFO).write_text(json.dumps(dict(info)), encoding="utf-8")


class _Files:
    """The open files of one process."""

    def __init__(self, path: Path) -> None:
        self._mutex = threading.Lock()
        self._lock = _Descriptor(path / "lock")
        self._data = _Descriptor(path / DATA)
        index = _Descriptor(path / "index.bin")
        self._index = mmap.mmap(index.number, 0)
        magic, self._slots, *_ = _HEAD.unpack_from(self._index)
        if magic != _MAGIC or len(self._index) < _HEAD.size + self._slots * _SLOT.size or not self._slots:
            raise ValueError(f"{path} is damaged")
        self._map = self._map_data()

    def _map_data(self) -> mmap.mmap | None:
        size = os.fstat(self._data.number).st_size
        return mmap.mmap(self._data.number, size, access=mmap.ACCESS_READ) if size else None

    def read(self, place: int) -> int:
        return int(struct.unpack_from("<Q", self._index, place)[0])

    def _write(self, place: int, value: int) -> None:
        struct.pack_into("<Q", self._index, place, value)

    def get(self, key: bytes) -> memoryview | None:
        slot, found = self._find(key)
        if slot is None or not found:
            return None
        _, place, length = _SLOT.unpack_from(self._index, slot)
        start, end = place - 1, place - 1 + length
        if start < 0 or os.fstat(self._data.number).st_size < end:  # truncated: reading the map there is a SIGBUS
            return None
        if self._map is None or len(self._map) < end:
            self._map = self._map_data()
        return None if self._map is None else memoryview(self._map)[start:end]

    def _find(self, key: bytes) -> tuple[int | None, bool]:
        """Return the position of a key's slot, or of the free slot for it, and whether the key is there. The position
        is None if the table has no free slot."""
        number = int.from_bytes(key[:8], "little")
        for step in range(self._slots):
            slot = _HEAD.size + (number + step) % self._slots * _SLOT.size
            if not self.read(slot + 16):
                return slot, False
            if self._index[slot : slot + 16] == key:
                return slot, True
        return None, False

    def put(self, key: bytes, record: bytes) -> bool:
        with self._hold_lock() as mine:
            if not mine:
                return False
            slot, found = self._find(key)
            if slot is None:
                return False
            offset = self._find_room(len(record))
            if offset is None:
                return False
            try:
                _write_all(self._data.number, record, offset)
            except OSError as error:  # disk full, over quota, or broken: do not try again
                self._write(_FULL, 1)
                raise StoreFull(error.strerror or str(error)) from None
            if not found:
                self._write(_RECORDS, self.read(_RECORDS) + 1)
            self._index[slot : slot + _SLOT.size] = _SLOT.pack(key, offset + 1, len(record))
            return True

    def _find_room(self, length: int) -> int | None:
        """Reserve space for a record after the last one and return its offset; None if the store is full."""
        slots, capacity, used = (self.read(place) for place in (_SLOTS, _CAPACITY, _USED))
        if self.read(_FULL):
            return None
        if used + length > capacity or self.read(_RECORDS) >= _MOST_LOAD * slots:
            self._write(_FULL, 1)
            raise StoreFull("")
        self._write(_USED, used + length + -length % _ALIGN)
        return used

    def widen(self, capacity: int) -> None:
        """Enlarge the store to `capacity` bytes; it never shrinks."""
        with self._hold_lock() as mine:
            if mine and capacity > self.read(_CAPACITY):
                os.ftruncate(self._data.number, max(capacity, os.fstat(self._data.number).st_size))
                self._write(_CAPACITY, capacity)
            if mine:
                self._write(_FULL, 0)  # there may be room again

    @contextmanager
    def _hold_lock(self) -> Iterator[bool]:
        """Hold the lock; yield False if it did not become free in time."""
        end = time.monotonic() + _PATIENCE_S
        if not self._mutex.acquire(timeout=_PATIENCE_S):
            yield False
            return
        try:
            mine = False
            while not mine and time.monotonic() < end:
                try:
                    fcntl.flock(self._lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    mine = True
                except BlockingIOError:
                    time.sleep(0.0005)
            try:
                yield mine
            finally:
                if mine:
                    fcntl.flock(self._lock.number, fcntl.LOCK_UN)
        finally:
            self._mutex.release()


class _Descriptor:
    """An open file, closed when this object is deleted."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def _write_all(file: int, record: bytes, offset: int) -> None:
    rest = memoryview(record)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written
