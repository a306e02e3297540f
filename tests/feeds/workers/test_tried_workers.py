"""Workers that cannot send, do not fit, hang or die: the epoch is the same without them, or ends with its cause."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.popen_fork import Popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Subset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as DataLoaderIter

from fastloop.errors import FastLoopError
from fastloop.feeds.lazy_loader import LazyLoader
from fastloop.feeds.workers import tried_workers
from fastloop.feeds.workers.in_worker import Order
from fastloop.feeds.workers.pending_indices import PendingIndices
from fastloop.feeds.workers.tried_workers import TriedWorkers
from tests.pictures import draw_bad_folder

pytestmark = pytest.mark.timeout(200)
FULL = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"


class Numbers(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), index)


class Steps:
    """What was done about workers, in order."""

    def __init__(self) -> None:
        self.down: list[tuple[int, int, str]] = []
        self.left_out: list[tuple[int, int, str]] = []
        self.warned: list[str] = []


def tried(
    collate: Callable[[Any], Any] | None = None,
    room_bytes: int | None = None,
    dataset: Any = None,
    pays: bool = False,
    report_outdated: Callable[[int], None] = lambda _: None,
    **settings: Any,
) -> tuple[LazyLoader, Steps]:
    """A shuffling loader with tried workers; with `pays` they have to be worth it."""
    steps = Steps()
    defaults = {"batch_size": 4, "shuffle": True, "num_workers": 3}
    settings = {key: value for key, value in {**defaults, **settings}.items() if value is not ...}
    loader = DataLoader(Numbers() if dataset is None else dataset, collate_fn=collate, **settings)
    epochs = TriedWorkers(
        room_bytes=room_bytes,
        step_down=lambda *given: steps.down.append(given),
        warn=steps.warned.append,
        turn_off="rungs.loads.enabled: false",
        leave_out=(lambda *given: steps.left_out.append(given)) if pays else None,
        report_outdated=report_outdated,
    ).batches
    return LazyLoader(loader, epochs=epochs), steps


def read(loader: Any, epochs: int = 2) -> tuple[list[list[list[int]]], float]:
    """The samples of each batch of each epoch, and the number that the generator draws after them."""
    torch.manual_seed(3)
    seen = [[_content(batch) for batch in loader] for _ in range(epochs)]
    return seen, float(torch.rand(1))


def _content(batch: Any) -> list[int]:
    tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
    return [int(number) for number in tensor[:, 0]]


def expected(**settings: Any) -> Any:
    return read(DataLoader(Numbers(), **{"batch_size": 4, "shuffle": True, **settings}))


def collate_local(samples: Any) -> Any:
    """The fault: a class that no other process can find."""

    class Local:
        pass

    return torch.stack(samples), Local()


def collate_local_late(samples: Any) -> Any:
    """The same, from some batch in the middle of an epoch on."""
    return collate_local(samples) if any(int(sample[0]) == 17 for sample in samples) else (torch.stack(samples), None)


class OneWay:
    """Can be sent, and not be received."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not in this process")


def collate_one_way(samples: Any) -> Any:
    return torch.stack(samples), OneWay()


def collate_noted(samples: Any) -> Any:
    batch = torch.stack(samples)
    batch.note = "from the collate function"  # type: ignore[attr-defined]
    return batch


def collate_conjugated(samples: Any) -> Any:
    numbers = torch.stack(samples).float()
    return torch.complex(numbers, numbers).conj().imag


def collate_quantized(samples: Any) -> Any:
    return torch.quantize_per_tensor(torch.stack(samples).float(), 1.0, 0, torch.quint8)


@pytest.mark.parametrize(
    ("collate", "why"),
    [
        (collate_noted, "a tensor's attribute note would get lost on the way"),
        (collate_conjugated, "the conjugation of a tensor would get lost on the way"),
        (collate_quantized, "a quantized tensor's scale would get lost on the way"),
    ],
)
def test_a_tensor_that_would_not_arrive_whole_is_made_here(collate: Any, why: str) -> None:
    def read_first(loader: Any) -> Any:
        torch.manual_seed(3)
        batch = next(iter(loader))
        return batch.dequantize().tolist(), getattr(batch, "note", None)

    loader, steps = tried(collate)
    assert read_first(loader) == read_first(DataLoader(Numbers(), 4, shuffle=True, collate_fn=collate))
    ((workers, _, reason),) = steps.down
    assert workers == 0 and reason.startswith(f"workers cannot send the loader's batches: TypeError: {why}")


@pytest.mark.parametrize("collate", [collate_noted, collate_conjugated, collate_quantized])
def test_without_a_look_such_a_tensor_arrives_changed(collate: Any) -> None:
    """The control: torch's own way loses these parts, most of them without an error."""
    whole = collate([Numbers()[index] for index in range(4)])
    sent = pickle.loads(ForkingPickler.dumps(whole))
    try:
        same = torch.equal(sent.dequantize(), whole.dequantize()) and vars(sent) == vars(whole)
    except RuntimeError:  # of a quantized tensor
        same = False
    assert not same


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("collate", "why"),
    [
        (collate_local, "workers cannot send the loader's batches: AttributeError: Can't"),
        (collate_local_late, "workers cannot send the loader's batches: AttributeError: Can't"),
        (collate_one_way, "what workers send cannot be unpickled: ValueError: not in this process"),
    ],
)
def test_what_cannot_be_sent_is_made_here_in_the_same_order(collate: Any, why: str, persistent: bool) -> None:
    loader, steps = tried(collate, persistent_workers=persistent)
    assert read(loader) == expected()
    ((workers, _, reason),) = steps.down
    assert workers == 0 and reason.startswith(why) and loader.num_workers == 0


@pytest.mark.parametrize(("bad", "raises"), [("CMYK", False), ("16 bit", False), ("truncated", True), ("empty", True)])
def test_odd_and_broken_pictures_are_as_with_the_plain_loader(tmp_path: Path, bad: str, raises: bool) -> None:
    """D17: the same batches, or the same error with its worker's frames; workers are not given up for it."""
    pytest.importorskip("torchvision")
    dataset = draw_bad_folder(tmp_path, bad)

    def load(loader: Any) -> tuple[Any, BaseException | None]:
        try:
            return [images.tolist() for images, _ in loader], None
        except Exception as error:
            return None, error

    plain, fault = load(DataLoader(dataset, 2))
    loader, steps = tried(dataset=dataset, batch_size=2, shuffle=False)
    ours, same_fault = load(loader)
    assert ours == plain and steps.down == [] and (fault is not None) is raises
    if fault is not None:
        said, *notes = str(same_fault), *getattr(same_fault, "__notes__", [])
        assert type(same_fault) is type(fault) and said.split("0x")[0] == str(fault).split("0x")[0]  # an address
        if sys.version_info >= (3, 11):
            assert "samples [2, 3]; a worker raised" in notes[0] and "DataLoader worker process" in notes[0]


def test_without_the_trial_torch_waits_for_ever() -> None:
    """The control: that the fault is one."""
    with pytest.raises(RuntimeError, match="timed out"):
        next(iter(DataLoader(Numbers(), 4, num_workers=1, timeout=2, collate_fn=collate_local)))


@pytest.mark.parametrize("persistent", [False, True])
def test_where_all_can_be_sent_workers_stay(persistent: bool) -> None:
    loader, steps = tried(persistent_workers=persistent)
    own = dict(vars(loader.inner))
    assert read(loader) == expected() and steps.down == [] and steps.warned == []
    now = dict(vars(loader.inner))
    assert {**now, "_iterator": None} == {**own, "_iterator": None}, "the loader keeps its own parts"


def test_an_order_to_a_worker_does_not_change_until_torch_sends_it() -> None:
    def reuse() -> Iterator[list[int]]:
        again: list[int] = []
        for index in range(3):
            again[:] = [index]
            yield again

    assert [order.indices for order in PendingIndices(reuse(), Order)] == [[0], [1], [2]]


def test_sparse_batches_come_from_workers() -> None:
    loader, steps = tried(_make_sparse, room_bytes=2**30)
    assert sum(int(batch.to_dense()[:, 0].count_nonzero()) for batch in loader) == 39 and steps.down == []


def test_samples_one_by_one_and_a_sampler_that_uses_its_list_again() -> None:
    class Reuses(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            again: list[int] = []
            for indices in super().__iter__():
                again[:] = indices
                yield again

    dataset = Numbers()
    alone = {"batch_size": None, "sampler": RandomSampler(dataset), "dataset": dataset}
    loader, steps = tried(_unsendable_alone, shuffle=..., **alone)
    torch.manual_seed(3)
    seen = [int(sample[0]) for sample in loader]
    torch.manual_seed(3)
    assert seen == [int(sample[0]) for sample in DataLoader(**alone)] and len(seen) == 40
    assert steps.down[0][0] == 0
    sampler = Reuses(RandomSampler(dataset), 4, False)
    loader, steps = tried(collate_local, dataset=dataset, batch_sampler=sampler, batch_size=..., shuffle=...)
    assert read(loader) == expected() and steps.down[0][0] == 0


def _make_sparse(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).to_sparse()


def _unsendable_alone(sample: Any) -> Any:
    if get_worker_info() is not None:
        return lambda: sample
    return sample


# -- what workers cost ------------------------------------------------------------------------------------------------


class Slow(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.1)
        return super().__getitem__(index)


def collate_many(samples: Any) -> Any:
    """Each tensor comes through a socket of its own."""
    return [torch.stack(samples), *(torch.zeros(2) for _ in range(20))]


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_are_made_sooner_than_handed_over_are_made_here(persistent: bool, method: str) -> None:
    loader, steps = tried(
        collate_many, pays=True, num_workers=1, persistent_workers=persistent, multiprocessing_context=method
    )
    torch.manual_seed(3)
    seen: list[list[list[int]]] = []
    while len(seen) < 3 or (not steps.left_out and len(seen) < 15):  # on a crowded machine few lie ready
        seen.append([])
        for batch in loader:
            seen[-1].append(_content(batch))
            time.sleep(0.02)  # the training; the next batch lies ready after it
    assert (seen, float(torch.rand(1))) == read(DataLoader(Numbers(), 4, shuffle=True), len(seen))
    ((workers, _, why),) = steps.left_out
    made, took = re.findall(r"([\d.]+) ms", why)
    assert workers == 0 and float(made) < float(took) and loader.num_workers == 0 and not steps.down
    assert why == f"a batch takes {made} ms to make, but taking it from a worker took {took} ms"


@pytest.mark.parametrize("limit", [2, 1])
def test_workers_that_short_epochs_wait_for_in_vain_are_left_out(limit: int) -> None:
    """Two batches an epoch: none lies ready when the first is wanted, and `safe` made such a training twice as slow."""
    loader, steps = tried(pays=True, dataset=Subset(Numbers(), range(8)), num_workers=1, persistent_workers=True)
    torch.manual_seed(3)
    seen: list[list[list[int]]] = []
    while len(seen) < 3 or (not steps.left_out and len(seen) < 60):
        seen.append([_content(batch) for batch, _ in zip(loader, range(limit), strict=False)])
    ((workers, _, why),) = steps.left_out
    assert workers == 0 and "in epochs this short, waiting for workers takes" in why and loader.num_workers == 0
    plain = DataLoader(Subset(Numbers(), range(8)), 4, shuffle=True)
    torch.manual_seed(3)
    assert seen == [[_content(batch) for batch, _ in zip(plain, range(limit), strict=False)] for _ in seen]


def test_workers_that_short_epochs_gain_from_stay() -> None:
    """The control: making the batches takes longer than the waits."""
    loader, steps = tried(
        pays=True, dataset=Subset(Slow(), range(8)), num_workers=2, persistent_workers=True, batch_size=2
    )
    for _ in range(5):
        assert len(list(loader)) == 4
    assert loader.num_workers == 2 and not steps.left_out and not steps.down


@pytest.mark.parametrize(("dataset", "pays"), [(Slow(), True), (Numbers(), False)], ids=["pay", "by_name"])
def test_workers_stay_where_they_pay_or_are_asked_for_by_name(dataset: Any, pays: bool) -> None:
    loader, steps = tried(collate_many, pays=pays, dataset=dataset, num_workers=2)
    for _ in range(3 - 2 * pays):
        for _ in loader:
            time.sleep(0.01)
    assert loader.num_workers == 2 and not steps.left_out and not steps.down


def test_workers_asked_for_by_name_tell_what_they_lose() -> None:
    trying = TriedWorkers(room_bytes=None, step_down=list.append, warn=print, turn_off="rungs.loads.enabled: false")
    loader = LazyLoader(DataLoader(Numbers(), 4, collate_fn=collate_many, num_workers=1), epochs=trying.batches)
    assert trying.loss_ms is None
    for _ in range(15):  # on a crowded machine few lie ready
        for _ in loader:
            time.sleep(0.02)
        if trying.loss_ms is not None:
            break
    assert trying.loss_ms is not None and trying.loss_ms[0] > trying.loss_ms[1] > 0 and loader.num_workers == 1


# -- shared memory ----------------------------------------------------------------------------------------------------

BATCH_BYTES = 4 * 1000 * 8


@pytest.mark.parametrize(
    ("batches_of_room", "left"),
    [(20, None), (8, (3, 1)), (6, (2, 1)), (4, (1, 1)), (3, (0, 0))],
)
def test_a_batch_that_is_too_heavy_leaves_fewer_workers(batches_of_room: int, left: Any) -> None:
    """A quarter of the room stays free, and two batches lie there beside those of the workers."""
    loader, steps = tried(room_bytes=batches_of_room * BATCH_BYTES)
    assert read(loader) == expected()
    assert [step[:2] for step in steps.down] == ([] if left is None else [left])
    assert all("of batches, but one takes 0.0 MiB" in step[2] for step in steps.down)
    assert loader.num_workers == (3 if left is None else left[0])


def collate_full_for_more(samples: Any) -> Any:
    """Shared memory that is full with more than one worker."""
    info = get_worker_info()
    if info is not None and info.num_workers > 1:
        raise RuntimeError(FULL)
    return torch.stack(samples)


class Full:
    """Its pickling finds no room, in a worker."""

    def __reduce__(self) -> Any:
        if get_worker_info() is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return Full, ()


def collate_full_in_pickling(samples: Any) -> Any:
    return torch.stack(samples), Full()


@pytest.mark.parametrize(
    ("collate", "left"), [(collate_full_for_more, [1]), (collate_full_in_pickling, [1, 0])], ids=["collate", "pickle"]
)
def test_full_shared_memory_leaves_fewer_workers_and_then_none(collate: Any, left: list[int]) -> None:
    loader, steps = tried(collate)
    assert read(loader) == expected()
    assert [step[0] for step in steps.down] == left
    assert "/dev/shm is too small" in steps.down[0][2] and "No space left on device" in steps.down[0][2]


@pytest.mark.parametrize(
    ("fails_at", "room_bytes", "left", "persistent"),
    [
        (1, None, [0], False),
        (2, None, [0], True),
        (4, None, [0], False),
        (5, None, [0], False),
        (4, 130_000, [1, 0], True),
    ],
    ids=["first", "some started", "second epoch", "second epoch, some started", "in mid-epoch"],
)
def test_workers_that_cannot_start_leave_their_batches_to_this_process(
    monkeypatch: pytest.MonkeyPatch, fails_at: int, room_bytes: int | None, left: list[int], persistent: bool
) -> None:
    """D6, D7: no room for a semaphore, say, or too many open files, in the first epoch or later."""
    launch, starts, wanted = Popen._launch, list[int](), expected()

    def fail(self: Popen, process: Any) -> None:
        starts.append(1)
        if len(starts) >= fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        launch(self, process)

    monkeypatch.setattr(Popen, "_launch", fail)
    monkeypatch.setattr(DataLoaderIter, "_workers_status", [False] * 3, raising=False)  # torch asks before it is there
    loader, steps = tried(room_bytes=room_bytes, persistent_workers=persistent)
    assert read(loader) == wanted
    assert not multiprocessing.active_children() and [step[0] for step in steps.down] == left
    assert steps.down[-1][2] == "workers cannot start: OSError: [Errno 28] No space left on device"
    with pytest.raises(OSError, match="No space left"):  # the control
        list(DataLoader(Numbers(), 4, num_workers=3))


def test_what_a_sampler_raises_is_no_failed_start() -> None:
    """Its exception holds torch's half-made iterator, and nothing else does: from cyclic garbage, its connections are
    closed twice, and the second time may close another's."""

    class Breaks(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            raise OSError(errno.ENOSPC, "of the sampler")

    gc.disable()
    try:
        loader, steps = tried(sampler=Breaks(Numbers()), shuffle=False)
        with pytest.raises(OSError, match="of the sampler") as raised:
            read(loader)
        assert not steps.down and multiprocessing.active_children()
        del raised
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


SMALL_SHM = """
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Heavy(Dataset):
        def __len__(self): return 12
        def __getitem__(self, index): return torch.full((1 << 20,), float(index))

    def collate(samples): return torch.stack(samples).clone()

    if __name__ == "__main__":
        from fastloop.evidence.machine import read_shm_free_bytes
        from fastloop.feeds.lazy_loader import LazyLoader
        from fastloop.feeds.workers.tried_workers import TriedWorkers
        down = []
        for room in (read_shm_free_bytes(), None):
            loader = DataLoader(Heavy(), 2, num_workers=2, collate_fn=collate)
            tried = TriedWorkers(room_bytes=room, step_down=lambda *a: down.append(a[0]), warn=print, turn_off="")
            print([float(batch[0, 0]) for batch in LazyLoader(loader, epochs=tried.batches)], down.pop(), flush=True)
        list(DataLoader(Heavy(), 2, num_workers=2, collate_fn=collate, timeout=5))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm takes root")
def test_a_small_shared_memory_in_earnest(tmp_path: Any) -> None:
    """16 MiB, known or not; batches of 8: plain workers fail there, the control; tried ones leave their place."""
    script = tmp_path / "small.py"
    script.write_text(textwrap.dedent(SMALL_SHM))
    inside = f"mount -t tmpfs -o size=16m tmpfs /dev/shm && exec {sys.executable} {script}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", inside], capture_output=True, text=True, timeout=180)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mounting here: {done.stderr.strip()}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines == ["[0.0, 2.0, 4.0, 6.0, 8.0, 10.0] 0"] * 2, done.stderr
    assert done.returncode != 0 and "unable to allocate shared memory" in done.stderr and "timed out" in done.stderr


# -- workers that hang or die -----------------------------------------------------------------------------------------


class Hangs(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return self.wait() if index == 9 else super().__getitem__(index)

    def wait(self) -> torch.Tensor:
        time.sleep(1000)
        raise AssertionError


def place_of(function: Callable[..., Any], line: int) -> str:
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + line}"


@pytest.fixture
def brief_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits five seconds for workers that do not end by themselves."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 1.0)


@pytest.mark.usefixtures("brief_joins", "quick_starts")
@pytest.mark.parametrize("start", [None, "spawn"])
def test_a_hung_worker_ends_the_epoch_with_its_line(start: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried_workers, "LOOK_S", 0.2)
    dataset = Subset(Hangs(), range(20))
    loader, steps = tried(dataset=dataset, shuffle=False, num_workers=1, multiprocessing_context=start)
    seen = []
    with pytest.raises(FastLoopError, match=r"no batch for \d+ s") as raised:
        for batch in loader:
            seen += _content(batch)
            if len(seen) == 8:  # a start takes as long as the machine needs for it
                monkeypatch.setattr(tried_workers, "SAY_S", 0.5)
                monkeypatch.setattr(tried_workers, "LIMIT_S", 2.0)
    assert seen == list(range(8))
    inner, outer = place_of(Hangs.wait, 1), place_of(Hangs.__getitem__, 1)
    for said in (raised.value.got, *steps.warned):
        assert f"is in __getitem__ at {outer}, which is at {inner} in wait" in said
    assert len(steps.warned) == 1 and "rungs.loads.enabled: false" in raised.value.do


class Locked(Numbers):
    """The fault: a lock that another thread holds while workers are forked, and that no thread of theirs releases."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return super().__getitem__(index)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_that_waits_for_a_lock_of_before_its_fork_gives_the_batch_back(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """polars and other libraries with threads of their own do this, too."""
    monkeypatch.setattr(tried_workers, "LOOK_S", 0.2)
    monkeypatch.setattr(tried_workers, "STUCK_S", 2.0)
    dataset = Locked()
    loader, steps = tried(dataset=dataset, num_workers=workers, shuffle=False)
    dataset.lock.acquire()
    threading.Timer(1.0, dataset.lock.release).start()
    before, began = signal.getsignal(signal.SIGCHLD), time.monotonic()
    assert read(loader)[0] == expected(shuffle=False)[0]
    assert time.monotonic() - began < 60 and signal.getsignal(signal.SIGCHLD) is before
    ((left, _, why),) = steps.down
    assert left == 0 and "for 2 s before the first batch no worker used a CPU" in why and "in __getitem__ at" in why
    assert not multiprocessing.active_children()


PREPARED = multiprocessing.get_context("fork").Value("i", 0)


class PreparesOnce(Numbers):
    """One worker prepares for all, and the others wait for its lock. One that was killed would hold it for ever."""

    def __init__(self) -> None:
        self.lock = multiprocessing.get_context("fork").Lock()

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            if not PREPARED.value:
                time.sleep(3.0)
                PREPARED.value = 1
        return super().__getitem__(index)


def test_workers_that_wait_for_a_lock_of_all_processes_are_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried_workers, "LOOK_S", 0.2)
    monkeypatch.setattr(tried_workers, "STUCK_S", 1.0)
    PREPARED.value = 0
    loader, steps = tried(dataset=PreparesOnce(), num_workers=2, shuffle=False)
    assert read(loader, 1)[0] == expected(shuffle=False)[0][:1] and steps.down == [] and PREPARED.value == 1


def test_a_worker_that_works_for_long_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: it uses its CPU."""

    def busy(samples: Any) -> Any:
        until = time.process_time() + 1.5
        while time.process_time() < until:
            pass
        return torch.stack(samples)

    monkeypatch.setattr(tried_workers, "LOOK_S", 0.1)
    monkeypatch.setattr(tried_workers, "STUCK_S", 0.7)
    loader, steps = tried(busy, dataset=Subset(Numbers(), range(4)), shuffle=False, num_workers=1)
    assert read(loader, 1)[0] == [[[0, 1, 2, 3]]] and steps.down == []


def test_a_slow_batch_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: looking at the worker takes nothing from the epoch."""

    def slow(samples: Any) -> Any:
        time.sleep(0.3)
        return torch.stack(samples)

    monkeypatch.setattr(tried_workers, "LOOK_S", 0.05)
    loader, steps = tried(slow)
    assert read(loader, 1)[0][0] == expected()[0][0] and steps.down == steps.warned == []


class Dies(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.usefixtures("brief_joins")
@pytest.mark.parametrize("hears", [True, False])
def test_the_death_of_a_worker_is_told_in_torchs_words(hears: bool) -> None:
    """Whether its handler for SIGCHLD speaks first, or there is none and a connection breaks."""
    loader, _ = tried(dataset=Dies(), shuffle=False, num_workers=2)
    before = signal.getsignal(signal.SIGCHLD)
    try:
        with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid"):
            for _ in loader:
                if not hears:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGCHLD, before)


class Broken(Exception):
    """What a dataset raises, or a handler of the user's."""


class Signals:
    """While it is put together again, a signal comes."""

    def __reduce__(self) -> Any:
        return _signal, ()


def _signal() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def raise_broken(number: int, frame: Any) -> None:
    raise Broken("from a handler")


def test_what_a_handler_raises_while_a_batch_comes_in_is_no_fault_of_the_batch() -> None:
    """torch's for SIGCHLD, say, when a worker was killed."""
    loader, steps = tried(lambda samples: (torch.stack(samples), Signals()), num_workers=1)
    before = signal.signal(signal.SIGUSR1, raise_broken)
    try:
        with pytest.raises(Broken, match="from a handler"):
            list(loader)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert steps.down == []


class Breaks(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise Broken("no such sample")
        return super().__getitem__(index)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_exception_of_the_datasets_is_the_one_that_it_raises_without_workers(persistent: bool) -> None:
    """D5."""
    loader, steps = tried(dataset=Breaks(), shuffle=False, persistent_workers=persistent)
    with pytest.raises(Broken) as raised:
        list(loader)
    with pytest.raises(Broken) as plain:
        list(DataLoader(Breaks(), 4))
    assert raised.value.args == plain.value.args and raised.value.__context__ is None and steps.down == []
    if sys.version_info >= (3, 11):
        (note,) = raised.value.__notes__
        assert note.startswith("fastloop: raised by the batch of samples [8, 9, 10, 11]; a worker raised ")
        assert note.endswith("Broken: no such sample (in DataLoader worker process 2)")


class Exits(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            sys.exit(7)
        return super().__getitem__(index)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_that_exits_exits_the_training(persistent: bool) -> None:
    loader, steps = tried(dataset=Exits(), shuffle=False, persistent_workers=persistent)
    seen = []
    with pytest.raises(SystemExit) as raised:
        for batch in loader:
            seen += _content(batch)
    assert raised.value.code == 7 and seen == list(range(8)) and steps.down == []


@pytest.mark.usefixtures("brief_joins")
def test_in_a_worker_alone_it_would_die() -> None:
    """The control."""
    with pytest.raises((RuntimeError, OSError, EOFError)):
        list(DataLoader(Exits(), 4, num_workers=1))


class RefusesWorkers(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is None, "not in a worker"
        return super().__getitem__(index)


class RefusesLate(RefusesWorkers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) if index == 17 else Numbers.__getitem__(self, index)


class StartsProcesses(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 8 == 0:
            child = torch.multiprocessing.get_context("fork").Process(target=abs, args=(index,))
            child.start()
            child.join()
        return super().__getitem__(index)


@pytest.mark.usefixtures("brief_joins")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (RefusesWorkers(), "AssertionError: not in a worker"),
        (RefusesLate(), "AssertionError: not in a worker"),
        (StartsProcesses(), "AssertionError: daemonic processes are not allowed to have children"),
    ],
)
def test_what_only_a_worker_cannot_make_is_made_here(dataset: Any, why: str, persistent: bool) -> None:
    loader, steps = tried(dataset=dataset, persistent_workers=persistent)
    assert read(loader) == expected()
    ((workers, _, reason),) = steps.down
    assert reason.startswith(f"workers cannot make the loader's batches: {why}") and workers == loader.num_workers == 0


class Mute(Exception):
    """Drops what torch says of its worker."""

    def __init__(self, message: str) -> None:
        super().__init__("mute")


class MuteInWorkers(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            raise Mute("there")
        return super().__getitem__(index)


def test_an_exception_that_drops_torchs_words_is_known_by_where_it_was_raised() -> None:
    loader, steps = tried(dataset=MuteInWorkers())
    assert read(loader) == expected()
    assert steps.down == [(0, 0, "workers cannot make the loader's batches: Mute: mute")]


class AsksWorkers(BatchSampler):
    """Has workers of its own, as one that scores its candidates would, and one of them fails."""

    def __iter__(self) -> Iterator[list[int]]:
        for place, indices in enumerate(super().__iter__()):
            if place == 5:
                fails = iter(DataLoader(Breaks(), 4, num_workers=1))
                try:
                    list(fails)
                finally:
                    fails._shutdown_workers()  # type: ignore[attr-defined]
            yield indices


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_sampler_raises_ends_the_epoch(workers: int) -> None:
    """Also what its own workers sent: none of ours raised."""
    sampler = AsksWorkers(RandomSampler(Numbers()), 4, False)
    loader, steps = tried(batch_sampler=sampler, batch_size=..., shuffle=..., num_workers=workers)
    with pytest.raises(Broken, match="in DataLoader worker process"):
        list(loader)
    assert steps.down == []


def test_a_long_batch_is_named_by_its_first_samples() -> None:
    assert tried_workers._name_samples([3, 1]) == "[3, 1]" and tried_workers._name_samples(7) == "7"
    assert tried_workers._name_samples(list(range(100))) == "[0, 1, 2, 3, 4, 5, 6, 7, …] (100 in all)"


def test_what_is_set_up_in_workers_only_may_fail_there() -> None:
    def fail(_: int) -> None:
        raise Broken("no such device")

    loader, steps = tried(worker_init_fn=fail)
    assert read(loader) == expected()
    assert "Broken: no such device (in DataLoader worker process" in steps.down[0][2]


class Grows(Numbers):
    level = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), index + 100 * self.level)


def read_growing(loader: Any, dataset: Grows) -> list[list[list[int]]]:
    """The samples of three epochs; the training changes the dataset in the middle of the second."""
    torch.manual_seed(3)
    seen: list[list[list[int]]] = []
    for epoch in range(3):
        seen.append([])
        for number, batch in enumerate(loader):
            seen[-1].append(_content(batch))
            if (epoch, number) == (1, 4):
                dataset.level = 1
    return seen


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_change_in_mid_epoch_is_seen_from_the_next_batch_on(
    persistent: bool, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_data, data = Grows(), Grows()
    plain = read_growing(DataLoader(plain_data, 4, shuffle=True), plain_data)
    assert plain[1][4][0] < 100 <= plain[1][5][0]
    if not looks:  # the control
        monkeypatch.setattr(tried_workers.StateMark, "find_change", lambda _: None)
    loader, steps = tried(dataset=data, persistent_workers=persistent)
    assert (read_growing(loader, data) == plain) is looks
    assert [why for _, _, why in steps.down] == [
        "dataset changed while batches were being loaded, and workers hold older copies"
    ] * looks


class HasTable(Grows):
    """Reads a large table, of which a look sees only some numbers."""

    def __init__(self) -> None:
        self.table = np.zeros(100_000)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), index + self.table[index] + 100 * self.level)


@pytest.mark.parametrize("is_late", [True, False])
def test_batches_that_may_be_outdated_are_counted(is_late: bool) -> None:
    data, owned = HasTable(), list[int]()
    loader, steps = tried(dataset=data, report_outdated=owned.append)
    for number, _ in enumerate(loader):
        if number == 4 and is_late:
            data.table[:] = 100
        if number == 4 and not is_late:
            data.level = 1
    assert owned == [5] * is_late and "changed while batches were being loaded" in steps.down[0][2]
