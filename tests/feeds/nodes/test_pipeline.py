"""Threads in a loader's place: the same batches, its exceptions, and no thread that lives on."""

from __future__ import annotations

import functools
import gc
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, Subset

from fastloop.errors import FastLoopError
from fastloop.feeds.lazy_loader import LazyLoader
from fastloop.feeds.nodes.pipeline import ThreadEngine
from fastloop.feeds.workers import tried_workers
from tests.pictures import draw_bad_folder

pytestmark = pytest.mark.timeout(200)


class Numbers(Dataset):
    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index)


class Together(Numbers):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] + 100 for index in indices]


class Reuses(BatchSampler):
    """Fills one list again and again."""

    def __iter__(self) -> Iterator[list[int]]:
        again: list[int] = []
        for indices in super().__iter__():
            again[:] = indices
            yield again


def threaded(threads: int = 3, dataset: Any = None, warned: list[str] | None = None, **settings: Any) -> Any:
    """A loader and what stands in for it, started as in a training."""
    settings = {"batch_size": 4, **settings}
    loader = DataLoader(Numbers() if dataset is None else dataset, **settings)
    warn = [].append if warned is None else warned.append
    engine = ThreadEngine(loader, threads, turn_off="rungs.loads.enabled: false", warn=warn)
    return LazyLoader(loader, engine=engine), engine


def read(loader: Any) -> tuple[list[list[Any]], float]:
    """Two epochs, and the number that the generator draws after them."""
    torch.manual_seed(3)
    return [[batch.tolist() for batch in loader] for _ in range(2)], float(torch.rand(1))


def list_threads() -> list[threading.Thread]:
    """Threads of ours, once those that have been told to end had the time."""
    end = time.monotonic() + 50
    while True:
        ours = [each for each in threading.enumerate() if "_apply_udf" in each.name or "_queue" in each.name]
        if not ours or time.monotonic() > end:
            return ours
        gc.collect()
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_thread_lives_on() -> Iterator[None]:
    yield
    assert list_threads() == []


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"shuffle": True},
        lambda: {"shuffle": True, "drop_last": True},
        lambda: {"dataset": Together(), "shuffle": True},
        lambda: {"dataset": Subset(Numbers(), [5, 3, 8, 2, 9]), "shuffle": True},
        lambda: {"dataset": Subset(Together(), [5, 3, 8, 2, 9]), "shuffle": True},
        lambda: {"batch_size": None, "sampler": RandomSampler(Numbers())},
        lambda: {"batch_size": 1, "batch_sampler": Reuses(RandomSampler(Numbers()), 4, False)},
    ],
)
def test_batches_their_order_and_the_random_stream_stay(make: Any, threads: int) -> None:
    settings = make()
    loader, engine = threaded(threads, **settings)
    dataset = settings.pop("dataset", None) or Numbers()
    expected = read(DataLoader(dataset, **{"batch_size": 4, **settings}))
    assert read(loader) == expected and engine.evidence()["threads"] >= 1
    assert engine.evidence()["samples"] == 2 * len([row for batch in expected[0][0] for row in batch]) // (
        3 if settings.get("batch_size", 4) is None else 1
    )


class Meets(Numbers):
    """Sample 0 is not done before sample 9, two batches later, was."""

    def __init__(self) -> None:
        self.late = threading.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            self.late.set()
        assert index or self.late.wait(20)
        return super().__getitem__(index)


def test_batches_are_made_at_once_and_come_in_order() -> None:
    loader, engine = threaded(3, Meets())
    assert [int(batch[0, 0]) for batch in loader] == list(range(0, 42, 4)) and engine.evidence()["threads"] > 1


class Strange(Exception):
    """Cannot be made anew from its message, as an exception is that comes from a worker process."""

    def __init__(self, path: str, code: int) -> None:
        super().__init__(path, code)


class Raises(Numbers):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 17:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("error", [Strange("a.jpg", 3), ValueError("planted"), SystemExit(4), KeyboardInterrupt()])
def test_an_exception_arrives_itself_with_its_frames_and_its_sample(error: BaseException) -> None:
    warned: list[str] = []
    loader, _ = threaded(3, Raises(error), warned)
    seen: list[int] = []
    with pytest.raises(type(error)) as raised:
        seen.extend(int(batch[0, 0]) for batch in loader)
    assert raised.value is error and len(seen) <= 4
    told = "".join([*traceback.format_exception(error), *warned])  # Python 3.10 has no notes
    assert "raise self.error" in told and "in __getitem__" in told
    assert "raised by sample 17, in one of the loading threads (rungs.loads.enabled: false turns them off)" in told


def test_the_batches_before_an_exception_come_first() -> None:
    loader, _ = threaded(5, Raises(ValueError("planted")))
    seen: list[int] = []
    with pytest.raises(ValueError, match="planted"):
        for batch in loader:
            seen.append(int(batch[0, 0]))
    assert seen == [0, 4, 8, 12]


def test_a_collate_function_that_raises_names_its_samples() -> None:
    def collate(samples: Any) -> Any:
        raise ValueError("planted")

    warned: list[str] = []
    loader, _ = threaded(2, warned=warned, collate_fn=collate)
    with pytest.raises(ValueError, match="planted") as raised:
        next(iter(loader))
    told = "".join([*traceback.format_exception(raised.value), *warned])
    assert "raised by samples [0, 1, 2, 3], while collating" in told


class Ends(Sampler):
    def __len__(self) -> int:
        return 42

    def __iter__(self) -> Iterator[int]:
        yield from range(8)
        raise ValueError("the sampler's")


def test_a_sampler_that_raises_is_heard_when_its_batch_is_due() -> None:
    loader, _ = threaded(3, sampler=Ends())
    seen: list[int] = []
    with pytest.raises(ValueError, match="the sampler's"):
        for batch in loader:
            seen.append(int(batch[0, 0]))
    assert seen == [0, 4]


class Asked(Sampler):
    """Remembers who asks it."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __len__(self) -> int:
        return 42

    def __iter__(self) -> Iterator[int]:
        for number in range(42):
            self.threads.append(threading.current_thread().name)
            yield number


def test_only_the_loop_asks_the_sampler_and_so_many_batches_ahead() -> None:
    sampler = Asked()
    loader, _ = threaded(2, sampler=sampler)
    batches = iter(loader)
    assert sampler.threads == [], "a start is no question"
    for taken in range(1, 4):
        next(batches)
        assert len(sampler.threads) == 4 * (taken + 4) and set(sampler.threads) == {"MainThread"}


class Hangs(Numbers):
    def __init__(self) -> None:
        self.released = threading.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 6:
            self.released.wait(30)
        return super().__getitem__(index)


def test_a_thread_that_hangs_ends_the_training_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK_S", 0.05), ("SAY_S", 0.2), ("LIMIT_S", 0.6)):
        monkeypatch.setattr(tried_workers, name, seconds)
    warned: list[str] = []
    dataset = Hangs()
    loader, _ = threaded(2, dataset, warned)
    with pytest.raises(
        FastLoopError, match=r"sample 6, is in __getitem__ at .*test_pipeline\.py:\d+, which is at"
    ) as error:
        list(loader)
    assert "in wait" in error.value.got and "rungs.loads.enabled: false" in error.value.do
    assert len(warned) == 1 and warned[0].startswith("no batch for 0 s: its thread, at sample 6, is in __getitem__ at")
    dataset.released.set()


@pytest.mark.parametrize("how", ["forgotten", "closed", "ended in its middle"])
def test_an_epoch_that_is_left_ends_its_threads(how: str) -> None:
    loader, engine = threaded(3)
    before = threading.active_count()
    batches = iter(loader)
    assert threading.active_count() == before, "a start is no question"
    next(batches)
    assert threading.active_count() > before + 3
    if how == "forgotten":
        del batches
    elif how == "closed":
        engine.close()
        assert list(batches) == []
    else:
        batches.close()
    assert list_threads() == []


def test_what_waits_is_not_loaded_once_nobody_wants_it() -> None:
    closed = threading.Event()

    class Slow(Numbers):
        asked = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            Slow.asked += 1
            if Slow.asked > 12:  # in the midst of the second batch
                closed.wait(60)
            return super().__getitem__(index)

    loader, engine = threaded(1, Slow(), batch_size=10)
    batches = iter(loader)
    next(batches)
    engine.close()
    closed.set()
    del batches
    assert list_threads() == [] and Slow.asked <= 13


def test_threads_that_come_later_get_as_many_of_torchs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        list(threaded(2)[0])
        later = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert counts == [2] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_loader_that_pins_does_so_in_the_threads_for_the_loops_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [int(batch[0, 0]) for batch in threaded(2, pin_memory=True)[0]][:2] == [0, 4], "no CUDA here"
    devices: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: devices.update({threading.current_thread().name: device})
    )
    from torch.utils.data._utils import pin_memory

    monkeypatch.setattr(pin_memory, "pin_memory", lambda batch: (threading.current_thread().name, batch))
    loader, _ = threaded(2, pin_memory=True)
    names = {name for name, _ in loader}
    assert set(devices.values()) == {3} and names == set(devices) and "MainThread" not in names


# -- data that the training changes ------------------------------------------------------------------------------------


class Levels(Numbers):
    """Samples read what a training may change out of sight of code reading."""

    def __init__(self, rows: int = 42) -> None:
        self.level = 0
        self.table = np.zeros(rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index + self.level + self.table[index])


def train(loader: Any, dataset: Levels, change: Any) -> list[list[Any]]:
    """Two epochs; after the third batch of the first, the training changes the dataset."""
    seen: list[list[Any]] = [[], []]
    for epoch in seen:
        for batch in loader:
            epoch.append(batch.tolist())
            if len(seen[0]) == 3:
                change(dataset)
    return seen


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda dataset: setattr(dataset, "level", 100), "dataset"),
        (lambda dataset: dataset.table.__iadd__(100), "dataset.table"),
        (lambda dataset: None, None),
    ],
)
def test_waiting_batches_are_made_anew_once_the_training_changed_their_data(
    change: Any, place: str | None, threads: int
) -> None:
    dataset, told = Levels(), list[tuple[str, int]]()
    loader, engine = threaded(threads, dataset, shuffle=True)
    engine.step_down = lambda *how: told.append(how)
    torch.manual_seed(3)
    ours = train(loader, dataset, change)
    torch.manual_seed(3)
    again = Levels()
    assert ours == train(DataLoader(again, 4, shuffle=True), again, change)
    why = f"{place} changed while batches were being loaded, and threads had loaded some of them before that"
    assert told == ([] if place is None else [(why, 0)]), "said once"
    assert engine.loads_when_due is (place is not None)
    assert engine.evidence()["samples"] == (84 if place is None else 12)


def test_a_change_in_a_large_table_that_is_seen_late_is_owned_up() -> None:
    dataset, told = Levels(10**5), list[tuple[str, int]]()
    loader, engine = threaded(2, dataset)
    engine.step_down = lambda *how: told.append(how)
    train(loader, dataset, lambda each: each.table.__iadd__(1))
    assert len(told) == 1 and told[0][0].startswith("dataset.table changed") and told[0][1] == 3


def test_what_samples_remember_by_lru_cache_is_no_change() -> None:
    loader, engine = threaded(2, Remembers())
    engine.step_down = lambda *how: pytest.fail(str(how))
    assert [len(list(loader)) for _ in range(2)] == [11, 11] and not engine.loads_when_due


@functools.lru_cache(maxsize=64)
def remember(index: int) -> torch.Tensor:
    return torch.full((3,), index)


class Remembers(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return remember(index) + 0


# -- pictures that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "raises"), [("CMYK", False), ("16 bit", False), ("truncated", True), ("empty", True)])
def test_odd_and_broken_pictures_are_as_with_the_plain_loader(tmp_path: Path, bad: str, raises: bool) -> None:
    """D17."""
    dataset = draw_bad_folder(tmp_path, bad)

    def load(loader: Any) -> Any:
        try:
            return [images.tolist() for images, _ in loader], None
        except Exception as error:
            return type(error), str(error)

    plain = load(DataLoader(dataset, 2))
    ours = load(threaded(2, dataset, batch_size=2)[0])
    assert (plain[1] is not None) is raises
    # Pillow says where its buffer lies in memory.
    assert ours == plain or (ours[0] is plain[0] and str(ours[1]).split("0x")[0] == str(plain[1]).split("0x")[0])
