"""The device feed, on the CPU: it looks ahead there and copies nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fastloop.feeds.device_prefetcher import DeviceFeed, StatefulDeviceFeed, _Staged
from tests.feeds.containers import Bare, Graphs

CPU = torch.device("cpu")
DATA = TensorDataset(torch.arange(20))


class Source:
    """Counts what is taken from it."""

    def __init__(self, batches: int = 8) -> None:
        self.batches, self.taken, self.started = batches, 0, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[int]:
        self.started += 1
        for number in range(self.batches):
            self.taken += 1
            yield number


def feed(inner: Any, depth: int = 2, **settings: Any) -> DeviceFeed:
    return DeviceFeed(inner, depth=depth, device=CPU, stage=settings.pop("stage", lambda batch: batch), **settings)


@pytest.mark.parametrize("depth", [1, 2, 3, 50])
@pytest.mark.parametrize("batches", [0, 1, 2, 8])
def test_order_and_exhaustion(depth: int, batches: int) -> None:
    source = Source(batches)
    ahead = feed(source, depth)
    assert list(ahead) == list(range(batches)) and len(ahead) == batches
    assert list(ahead) == list(range(batches)) and source.started == 2 and source.taken == 2 * batches


@pytest.mark.parametrize(("depth", "expected"), [(1, [1, 1, 1, 1]), (2, [1, 2, 2, 2]), (4, [1, 2, 3, 4])])
def test_depth_is_reached_two_at_a_time_and_kept(depth: int, expected: list[int]) -> None:
    source = Source(20)
    ahead = feed(source, depth)
    iterator = iter(ahead)
    seen = []
    for number in range(4):
        assert next(iterator) == number
        seen.append(source.taken - number - 1)
    assert seen == expected


def test_starts_at_the_first_next_and_anew_after_a_break() -> None:
    source = Source()
    ahead = feed(source)
    iterator = iter(ahead)
    assert source.started == 0
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    assert list(ahead) == list(range(8)) and source.started == 2


def test_what_was_seen_is_counted() -> None:
    ahead = feed(Source(8))
    list(ahead)
    # The first call has to fetch what it hands out; all later batches were there before.
    assert ahead.seen == {"batches": 8, "ahead_batches": 7, "copied_bytes": 0, "tensors": 0, "pinned_tensors": 0}


class OnCuda(torch.Tensor):
    """Says that it is on a GPU, and notes the streams that it must outlive."""

    is_cuda = True  # type: ignore[assignment]
    streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        OnCuda.streams.append(stream)


class Stream:
    def wait_event(self, event: Any) -> None: ...


def test_tensors_of_objects_are_counted_and_kept_for_the_stream_that_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = DeviceFeed([], depth=1, device=torch.device("cpu"), stage=lambda batch: batch)
    graphs = Graphs(3, 20)
    assert feed._pin(graphs) is graphs
    assert (feed.seen["tensors"], feed.seen["pinned_tensors"]) == (3, 0)
    assert feed.seen["copied_bytes"] == sum(each.nbytes for each in graphs.store.values())

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    moved = Bare(x=torch.zeros(2).as_subclass(OnCuda), deep=[torch.zeros(1).as_subclass(OnCuda)], host=torch.zeros(1))
    copied: Any = object()
    assert feed._hand_out(_Staged(moved, copied, 1), 2) is moved
    assert len(OnCuda.streams) == 2  # else memory of theirs is given away while a kernel reads it


@pytest.mark.parametrize("fails", [False, True])
def test_batches_are_pinned_by_one_thread(fails: bool) -> None:
    """Beside busy workers a copy of 1.5 MB by two threads took 16 ms, and 0.2 by one."""
    seen = []

    class Pinned(Bare):
        def pin_memory(self) -> Bare:
            seen.append(torch.get_num_threads())
            if fails:
                raise RuntimeError("no memory")
            return self

    feed = DeviceFeed([], depth=1, device=CPU, stage=lambda batch: batch)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError) if fails else nullcontext():
            feed._pin(Pinned(x=torch.zeros(4)))
        assert seen == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


class SideStream(Stream):
    """Counts the waits of a feed's stream for the stream of the steps."""

    waits = 0

    def wait_stream(self, stream: Any) -> None:
        self.waits += 1


class Plain:
    """A batch that only the user's transfer hook can move, as in Lightning's manual."""

    def __init__(self) -> None:
        self.x = torch.zeros(2)


@pytest.mark.parametrize(
    ("batch", "waits"), [(Plain(), 2), (torch.zeros(2), 0), (torch.zeros(2).as_subclass(OnCuda), 3)]
)
def test_memory_that_steps_still_read_is_not_copied_into(
    batch: Any, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second and third copy may get the memory of the first, which nothing keeps for the steps that read it. What a
    loader makes on the device may still be in the making."""
    ahead = feed([])
    ahead.stream = stream = SideStream()
    monkeypatch.setattr(DeviceFeed, "_pin", lambda _self, each: each)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _stream: None))
    for call in range(3):
        assert ahead._copy(batch, call).batch is batch
    assert stream.waits == waits


def test_each_batch_is_staged_once_and_early() -> None:
    log: list[Any] = []
    ahead = feed(Source(4), stage=lambda batch: log.append(("staged", batch)) or batch)
    for batch in ahead:
        log.append(("used", batch))
    assert log == [
        ("staged", 0),
        ("staged", 1),
        ("used", 0),
        ("staged", 2),
        ("staged", 3),
        ("used", 1),
        ("used", 2),
        ("used", 3),
    ]


def test_reads_and_writes_go_to_the_loader() -> None:
    inner = DataLoader(DATA, batch_size=4)
    ahead = feed(inner)
    ahead.worker_init_fn, ahead.depth = print, 5
    assert inner.worker_init_fn is print and not hasattr(inner, "depth") and ahead.depth == 5
    assert ahead.dataset is DATA and not hasattr(ahead, "state_dict")


def test_an_exception_in_the_loader_comes_when_the_batches_before_it_are_used() -> None:
    def broken() -> Iterator[int]:
        yield from range(3)
        raise RuntimeError("planted")

    class Broken:
        def __iter__(self) -> Iterator[int]:
            return broken()

    seen: list[int] = []
    with pytest.raises(RuntimeError, match="planted") as error:
        seen.extend(feed(Broken(), depth=5))
    assert seen == [0, 1, 2]
    assert "broken" in [entry.name for entry in error.traceback]


def test_a_retired_feed_hands_through() -> None:
    staged: list[Any] = []
    source = Source(4)
    ahead = feed(source, stage=lambda batch: staged.append(batch))
    ahead.retired = True
    iterator = iter(ahead)
    assert next(iterator) == 0 and source.taken == 1 and not staged
    assert list(iterator) == [1, 2, 3] and ahead.seen["batches"] == 0


def test_persistent_workers_leave_no_processes() -> None:
    loader = DataLoader(DATA, batch_size=4, num_workers=2, persistent_workers=True)
    ahead = feed(loader, keeps_iterator=True)
    before = {child.pid for child in psutil.Process().children()}
    for _ in range(2):
        iterator = iter(ahead)
        assert [next(iterator)[0].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    workers = {child.pid for child in psutil.Process().children()}
    assert len(workers - before) <= 2 and loader._iterator is not None
    del iterator, ahead, loader
    gc.collect()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in workers - before if psutil.pid_exists(pid)], 5)
    assert not alive


class Consumer:
    """Stands in for the loop: `used` batches of the current epoch are done."""

    def __init__(self) -> None:
        self.used = 0

    def take(self, iterator: Iterator[Any], count: int) -> list[int]:
        taken = []
        for _ in range(count):
            batch = next(iterator)
            self.used += 1
            taken.append(batch[0].tolist())
        return taken


def stateful(workers: int, depth: int, consumer: Consumer, kind: type[DeviceFeed] = StatefulDeviceFeed) -> Any:
    torch.manual_seed(3)
    loader = StatefulDataLoader(DATA, batch_size=2, shuffle=True, num_workers=workers)
    settings = {"consumed": lambda: consumer.used} if kind is StatefulDeviceFeed else {}
    return kind(loader, depth=depth, device=CPU, stage=lambda batch: batch, **settings)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("used", [0, 4, 10])
def test_saved_state_is_that_of_the_batches_used(workers: int, depth: int, used: int) -> None:
    consumer = Consumer()
    first = stateful(workers, depth, consumer)
    iterator = iter(first)
    head = consumer.take(iterator, used)
    state = first.state_dict()
    rest = [batch[0].tolist() for batch in iterator]
    resumed = stateful(workers, depth, consumer)
    resumed.load_state_dict(state)
    again = consumer.take(iter(resumed), 10 - used)
    assert again == rest
    assert sorted(chain.from_iterable(head + again)) == list(range(20))


@pytest.mark.parametrize("workers", [0, 2])
def test_without_tracking_the_look_ahead_is_lost(workers: int) -> None:
    consumer = Consumer()
    first = stateful(workers, 3, consumer, DeviceFeed)
    iterator = iter(first)
    consumer.take(iterator, 4)
    state = first.inner.state_dict()
    rest = [batch[0].tolist() for batch in iterator]
    resumed = stateful(workers, 3, consumer, DeviceFeed)
    resumed.inner.load_state_dict(state)
    again = [batch[0].tolist() for batch in resumed]
    assert again != rest and len(again) < len(rest)


def test_a_resumed_feed_saves_right_again() -> None:
    consumer = Consumer()
    first = stateful(0, 2, consumer)
    iterator = iter(first)
    consumer.take(iterator, 3)
    second = stateful(0, 2, consumer)
    second.load_state_dict(first.state_dict())
    rest = iter(second)
    consumer.take(rest, 2)  # five are used, three of them before the resume
    third = stateful(0, 2, consumer)
    third.load_state_dict(second.state_dict())
    assert [batch[0].tolist() for batch in third] == [batch[0].tolist() for batch in rest]
