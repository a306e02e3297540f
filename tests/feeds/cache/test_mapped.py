"""Stores in files: full, damaged, cut short, filled by several at once, and by some that die of it."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastloop.errors import NotApplicable
from fastloop.feeds.cache import mapped
from fastloop.feeds.cache.mapped import MappedStore, StoreFull, open_store
from fastloop.feeds.cache.records import pack, unpack

SPAWN, FORK = multiprocessing.get_context("spawn"), multiprocessing.get_context("fork")


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 2


def record(number: int, size: int = 1000) -> bytes:
    return pack(key(number), bytes([number % 256]) * size)


def read(store: MappedStore, number: int) -> Any:
    found = store.get(key(number))
    sample = None if found is None else unpack(key(number), found)
    return None if sample is None else sample[0]


def make(root: Path, capacity: int = 10**6, *, remove: bool = False, samples: int = 100) -> MappedStore:
    return open_store(root, "a", capacity=capacity, samples=samples, info={}, remove=remove)


def test_what_was_put_is_there_and_stays(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    assert read(store, 1) is None
    for number in range(50):
        assert store.put(key(number), record(number))
    assert [read(store, number) for number in range(50)] == [bytes([n]) * 1000 for n in range(50)]
    assert store.count()["kept_samples"] == 50 and 50_000 < store.count()["kept_bytes"] < 60_000
    store.close()
    again = make(tmp_path / "s")
    assert read(again, 49) == b"\x31" * 1000 and again.count()["kept_samples"] == 50
    again.close()


def test_in_shared_memory_nothing_is_left(tmp_path: Path) -> None:
    store = make(tmp_path / "s", remove=True)
    store.put(key(1), record(1))
    store.close()
    assert not (tmp_path / "s").exists()


def test_a_full_store_says_so_once_and_keeps_what_it_has(tmp_path: Path) -> None:
    """K8: nothing is evicted, so a store that is too small finds the same samples every time."""
    store = make(tmp_path / "s", 10_000)
    said = 0
    for _ in range(3):
        for number in range(50):
            try:
                store.put(key(number), record(number))
            except StoreFull:
                said += 1
    assert said == 1
    kept = [number for number in range(50) if read(store, number) is not None]
    assert kept == list(range(len(kept))) and 7 <= len(kept) <= 9
    store.close()
    wider = make(tmp_path / "s", 10**6)
    assert all(wider.put(key(number), record(number)) for number in range(50))
    assert [read(wider, number) is not None for number in range(50)] == [True] * 50
    wider.close()
    assert make(tmp_path / "s", 100).put(key(60), record(60)), "a store never gets smaller"


def test_a_table_of_places_that_is_full_takes_no_more(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 10**8, samples=1)
    kept = 0
    with pytest.raises(StoreFull):
        for number in range(2000):
            kept += store.put(key(number), record(number, 10))
    assert 0.6 < kept / 1024 < 0.75 and read(store, 0) is not None and read(store, 1999) is None
    store.close()


@pytest.mark.parametrize("damage", ["cut", "gone", "flipped", "zeros", "index"])
def test_a_damaged_entry_is_a_miss_and_is_written_anew(damage: str, tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    for number in range(3):
        store.put(key(number), record(number))
    data = store.path / "samples.bin"
    if damage == "cut":
        os.truncate(data, 2200)
    elif damage == "gone":
        os.truncate(data, 0)
    elif damage == "index":
        index = bytearray((store.path / "index.bin").read_bytes())
        place = index.find(key(2))
        index[place + 16 : place + 32] = b"\xff" * 16
        with (store.path / "index.bin").open("r+b") as file:
            file.write(index)
    else:
        with data.open("r+b") as file:
            file.seek(2500)
            file.write(b"\x99" if damage == "flipped" else bytes(2000))
    assert read(store, 2) is None, "the fault fired"
    assert store.put(key(2), record(2)) and read(store, 2) == b"\2" * 1000
    assert (read(store, 0) is None) == (damage == "gone")
    store.close()


def test_a_damaged_table_is_begun_anew(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    store.put(key(1), record(1))
    store.close()
    (store.path / "index.bin").write_bytes(b"nonsense" * 10)
    again = make(tmp_path / "s")
    assert read(again, 1) is None and again.put(key(1), record(1)) and read(again, 1)
    again.close()


def test_one_that_is_cleared_meanwhile_keeps_nothing_more(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    store.put(key(1), record(1))
    in_worker = pickle.loads(pickle.dumps(store))
    for file in store.path.iterdir():
        file.unlink()
    assert in_worker.get(key(1)) is None and not in_worker.put(key(1), record(1)) and in_worker.count() == {}
    assert read(store, 1) == b"\1" * 1000, "who has it open still reads it"
    store.close()


# -- no room ----------------------------------------------------------------------------------------------------------


def test_a_disk_that_gets_full_ends_the_filling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K1, where nothing can be mounted."""
    store, writes = make(tmp_path / "s"), []
    write = os.pwrite

    def full(file: int, content: Any, offset: int) -> int:
        writes.append(offset)
        if len(writes) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content, offset)

    monkeypatch.setattr(os, "pwrite", full)
    said = []
    for number in range(10):
        try:
            store.put(key(number), record(number))
        except StoreFull as reason:
            said.append(str(reason))
    assert said == ["No space left on device"] and len(writes) == 4, "it is not tried again"
    assert [number for number in range(10) if read(store, number) is not None] == [0, 1, 2]
    store.close()


EIGHT_MB = """
    import sys, warnings
    from pathlib import Path
    from fastloop.feeds.cache.mapped import open_store
    from fastloop.feeds.cache.sample_cache import SampleCache
    if __name__ == "__main__":
        store = open_store(Path(sys.argv[1]) / "s", "a", capacity=10**9, samples=100, info={}, remove=True)
        cache = SampleCache(store, 1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for epoch in range(2):
                made = [cache.fetch(bytes([n] * 16), lambda: bytes([n]) * 500_000) for n in range(40)]
                assert made == [bytes([n]) * 500_000 for n in range(40)]
        counts = cache.evidence()
        print(len(caught), counts["hits"], counts["misses"], str(caught[0].message))
        cache.close()
        print(sorted(path.name for path in Path(sys.argv[1]).iterdir()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
def test_eight_megabytes_in_earnest(tmp_path: Path) -> None:
    """K1: what does not fit is made each time, the numbers are right, one line says why."""
    script = tmp_path / "small.py"
    script.write_text(textwrap.dedent(EIGHT_MB))
    small = tmp_path / "small"
    small.mkdir()
    inside = f"mount -t tmpfs -o size=8m tmpfs {small} && exec {sys.executable} {script} {small}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", inside], capture_output=True, text=True, timeout=200)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mounting here: {done.stderr.strip()}")
    first, last = done.stdout.splitlines()
    warned, hits, misses, line = first.split(" ", 3)
    assert (warned, last) == ("1", "[]"), done.stderr
    assert int(hits) + int(misses) == 80 and 10 <= int(hits) <= 16
    assert "the sample store is full (No space left on device)" in line


def test_no_room_for_the_table_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped.os, "posix_fallocate", full)
    with pytest.raises(NotApplicable, match=r"no store can be created in .*: No space left on device"):
        make(tmp_path / "s")
    assert list((tmp_path / "s").iterdir()) == []


# -- several at once --------------------------------------------------------------------------------------------------


def fill(store: MappedStore, numbers: range) -> None:
    for number in numbers:
        if read(store, number) is None:
            store.put(key(number), record(number))


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("context", [SPAWN, FORK])
def test_two_processes_fill_one_store(context: Any, tmp_path: Path) -> None:
    store = make(tmp_path / "s", 10**7, samples=500)
    store.put(key(1000), record(1000))
    workers = [context.Process(target=fill, args=(store, numbers)) for numbers in (range(300), range(299, -1, -1))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
        assert worker.exitcode == 0
    assert all(read(store, number) == bytes([number % 256]) * 1000 for number in range(300))
    assert store.count()["kept_samples"] == 301, "each once"
    store.close()


def grow_by_reading(store: Any, copies: bool, grown: Any, together: Any) -> None:
    """Read all, and hold what was read: the store's own memory, or a copy as a worker's own cache would have."""
    together.wait(100)  # what they share of the test's own memory is shared by all from here on
    before, held = psutil.Process().memory_full_info().uss, []
    together.wait(100)
    for number in range(20):
        found = store.get(key(number))
        assert found is not None and sum(found[::4096]) >= 0
        held.append(bytes(found) if copies else found)
    together.wait(100)
    grown.put(psutil.Process().memory_full_info().uss - before)
    together.wait(100)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="nothing tells what is a process's own here")
@pytest.mark.parametrize("copies", [False, True])
def test_what_is_kept_is_in_memory_once_for_all_workers(copies: bool, tmp_path: Path) -> None:
    """K4, with a copy in each worker as the control.

    What is a process's own is counted: its share of libraries changes with processes that come and go elsewhere.
    """
    store, grown, together = make(tmp_path / "s", 50 * 10**6, remove=True), FORK.Queue(), FORK.Barrier(4)
    for number in range(20):
        store.put(key(number), record(number, 2**20))
    workers = [FORK.Process(target=grow_by_reading, args=(store, copies, grown, together)) for _ in range(4)]
    for worker in workers:
        worker.start()
    total = sum(grown.get(timeout=100) for _ in workers)
    for worker in workers:
        worker.join(100)
    store.close()
    assert (total < 1.5 * 20 * 2**20) is not copies, f"{total / 2**20:.0f} MiB in 4 workers"


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 10**7, samples=500)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(key(number % 100), record(number % 100)), range(400)))
        found = list(pool.map(lambda number: read(store, number), range(100)))
    assert found == [bytes([number]) * 1000 for number in range(100)] and store.count()["kept_samples"] == 100
    store.close()


def die_while_writing(store: MappedStore, where: str) -> None:
    """Killed with the lock held: before the record, in the middle of it, or before its place is written down."""
    write = mapped._write_all

    def dies(file: int, content: bytes, offset: int) -> None:
        if where == "middle":
            write(file, content[: len(content) // 2], offset)
        elif where == "end":
            write(file, content, offset)
        os.kill(os.getpid(), signal.SIGKILL)

    mapped._write_all = dies
    store.put(key(7), record(7))


@pytest.mark.parametrize("where", ["begin", "middle", "end"])
def test_a_writer_that_is_killed_holds_nobody_up(where: str, tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    worker = FORK.Process(target=die_while_writing, args=(store, where))
    worker.start()
    worker.join(100)
    assert worker.exitcode == -signal.SIGKILL, "the fault fired"
    assert read(store, 7) is None
    began = time.monotonic()
    assert store.put(key(7), record(7)) and read(store, 7) == b"\7" * 1000
    assert time.monotonic() - began < 10
    fill(store, range(20))
    assert all(read(store, number) == bytes([number]) * 1000 for number in range(20))
    store.close()


def hold_lock(store: MappedStore, held: Any) -> None:
    files = store._open()
    assert files is not None
    with files._hold_lock() as mine:
        assert mine
        held.set()
        time.sleep(1000)


def test_a_writer_that_is_stopped_holds_nobody_up(tmp_path: Path) -> None:
    store, held = make(tmp_path / "s"), FORK.Event()
    store.put(key(1), record(1))
    worker = FORK.Process(target=hold_lock, args=(store, held))
    worker.start()
    assert held.wait(100)
    assert store.put(key(2), record(2)) is False, "not kept, this time"
    assert read(store, 1) == b"\1" * 1000, "reading takes no lock"
    worker.kill()
    worker.join(100)
    assert store.put(key(2), record(2))
    store.close()


def test_a_reader_of_a_place_that_is_being_rewritten_sees_no_mixture(tmp_path: Path) -> None:
    store, stop = make(tmp_path / "s", 5 * 10**7), threading.Event()
    store.put(key(1), record(1, 50_000))

    def rewrite() -> None:
        with contextlib.suppress(StoreFull):
            while not stop.is_set():
                store.put(key(1), record(1, 50_000))

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        seen = {read(store, 1) for _ in range(300)}
    finally:
        stop.set()
        thread.join(100)
    assert seen <= {None, b"\1" * 50_000} and b"\1" * 50_000 in seen
    store.close()
