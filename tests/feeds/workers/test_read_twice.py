"""Datasets whose samples change when they are read, written in ways that reading their code does not find."""

from __future__ import annotations

import copy as copy_module
import functools
import multiprocessing
import os
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from fastloop.feeds.workers import forked, read_twice
from fastloop.feeds.workers.fresh_workers import PENDING
from fastloop.feeds.workers.read_twice import ReadTwice
from tests.runs import Net, Run, batches, both, distance

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class Pictures(Dataset[Any]):
    """Numbered pictures that are 128 everywhere, each sample made by `make`."""

    def __init__(self, make: Callable[[Pictures, int], Any], samples: int = 24) -> None:
        self.make = make
        self.pictures = np.full((samples, 8), 128.0, dtype=np.float32)
        self.records = [{"x": np.full(8, 128.0, dtype=np.float32)} for _ in range(samples)]
        self.count = 0

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        x = torch.as_tensor(np.array(self.make(self, index)), dtype=torch.float32)
        return x, x.mean()[None], torch.tensor(index)


def divide(data: Pictures, index: int) -> Any:
    picture = data.pictures[index]
    picture /= 255
    return picture


def divide_out(data: Pictures, index: int) -> Any:
    return np.multiply(data.pictures[index], 1 / 255, out=data.pictures[index])


def divide_tensor(data: Pictures, index: int) -> Any:
    return torch.from_numpy(data.pictures[index]).div_(255)


def replace(data: Pictures, index: int) -> Any:
    record = data.records[index]
    record["x"] = record["x"] / 255
    return record["x"]


def number(data: Pictures, index: int) -> Any:
    data.count, now = data.count + 1, data.count
    return data.pictures[index] + now


@functools.cache
def draw_once(index: int) -> Any:
    return torch.rand(8).numpy()


def remember(data: Pictures, index: int) -> Any:
    return draw_once(index)


def copy(data: Pictures, index: int) -> Any:
    return data.pictures[index] / 255


def flip(data: Pictures, index: int) -> Any:
    return -data.pictures[index] if random.random() < 0.5 else data.pictures[index]


WRONG = [divide, divide_out, divide_tensor, replace, number, remember]
ANOTHER, FROZEN = (f"sample 0 {why}" for why in (read_twice.ANOTHER, read_twice.FROZEN))


def check(dataset: Any, **settings: Any) -> tuple[bool | None, str]:
    twice = ReadTwice(DataLoader(dataset, 4, **settings))
    try:
        return twice.find_change()
    finally:
        twice.end()


@pytest.mark.parametrize("make", WRONG)
def test_samples_that_change_when_they_are_read(make: Any) -> None:
    data = Pictures(make)
    assert check(data, shuffle=True) == (True, FROZEN if make is remember else ANOTHER)
    assert data.count == 0 and (data.pictures == 128).all() and (data.records[0]["x"] == 128).all(), "not here"


@pytest.mark.parametrize("make", [copy, flip])
def test_samples_that_do_not(make: Any) -> None:
    assert check(Pictures(make)) == (False, "")


def test_what_a_worker_would_do_first_is_done_first() -> None:
    def begin(_: int) -> None:
        worker = get_worker_info()
        assert worker is not None
        worker.dataset.factor = 2

    class Begun(Pictures):
        def __getitem__(self, index: int) -> Any:
            assert get_worker_info() is not None
            return self.pictures[index] * self.factor

    data = Begun(copy)
    assert check(data, worker_init_fn=begin) == (False, "") and not hasattr(data, "factor")


class OddKeys(Sampler[str]):
    def __iter__(self) -> Any:
        return iter("abc")


@pytest.mark.parametrize("case", ["another sampler", "spawned", "writes", "fails", "hangs", "dies", "daemon", "random"])
def test_nothing_is_known_where_it_cannot_be_tried(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data: Any = Pictures(copy)
    settings: dict[str, Any] = {}
    if case == "another sampler":
        settings["sampler"] = OddKeys()
    if case == "spawned":
        settings |= {"multiprocessing_context": "spawn", "num_workers": 1}
    if case == "writes":
        data.make = functools.partial(write_down, tmp_path / "made")
    if case == "fails":
        data.make = lambda *_: 1 / 0
    if case == "hangs":
        monkeypatch.setattr(read_twice, "SOON_S", 0.5)
        data.make = lambda *_: time.sleep(100)
    if case == "dies":
        data.make = lambda *_: os._exit(3)
    if case == "daemon":
        monkeypatch.setattr(multiprocessing.process.current_process(), "_config", {"daemon": True})
    if case == "random":
        data.make = lambda *_: np.random.default_rng().random(8)
    assert check(data, **settings) == (None, "") and not multiprocessing.active_children()
    assert not (tmp_path / "made").exists()


def write_down(place: Path, data: Pictures, index: int) -> Any:
    place.write_text(str(index))
    return data.pictures[index]


class Visits(Pictures):
    """Counts in memory that its workers share."""

    def __init__(self, how: str, place: Path) -> None:
        super().__init__(copy)
        if how == "array":
            shared = multiprocessing.Array("f", 24)
            self.visits = torch.from_numpy(np.ctypeslib.as_array(shared.get_obj()))
        elif how == "tensor":
            self.visits = torch.zeros(24).share_memory_()
        else:
            self.visits = torch.from_numpy(np.memmap(place, dtype="f4", mode="w+", shape=24))

    def __getitem__(self, index: int) -> Any:
        self.visits[index] += 1
        return self.visits[index].clone()


@pytest.mark.parametrize("how", ["array", "tensor", "file"])
def test_shared_memory_is_not_written(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Visits(how, tmp_path / "visits")
    assert check(data) == (True, ANOTHER) and (data.visits == 0).all()
    monkeypatch.setattr(forked, "_list_shared", list)
    check(data)
    assert (data.visits != 0).any(), "the control"


def test_what_a_collate_function_changes_is_found() -> None:
    def halve(samples: Any) -> Any:
        for x, *_ in samples:
            x.div_(2)
        return torch.utils.data.default_collate(samples)

    class Stored(Pictures):
        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(self.pictures[index]), torch.tensor(index)

    assert check(Stored(copy), collate_fn=halve) == (True, ANOTHER) and check(Stored(copy)) == (False, "")


@pytest.mark.parametrize(
    "sample",
    [
        {"a": [1, "b", None], "c": {2, 3}},
        np.array([{"box": 1}, None], dtype=object),
        torch.eye(3).to_sparse(),
        deque([1, 2]),
        range(4),
    ],
    ids=str,
)
def test_samples_of_any_kind(sample: Any) -> None:
    class Gives(Pictures):
        def __getitem__(self, index: int) -> Any:
            return copy_module.deepcopy(sample)

    assert check(Gives(copy)) == (False, "")


def test_a_kind_whose_content_cannot_be_told() -> None:
    class Gives(Pictures):
        def __getitem__(self, index: int) -> Any:
            return (each for each in range(index))

    assert check(Gives(copy)) == (None, "")


# -- in a fit ---------------------------------------------------------------------------------------------------------


def fit_both(make: Any, workers: int, rungs: dict[str, Any]) -> tuple[Run, Run]:
    draw_once.cache_clear()

    def load() -> Any:
        draw_once.cache_clear()
        return DataLoader(Pictures(make), 8, shuffle=True, num_workers=workers)

    return both({"workers": rungs}, load, max_epochs=3)


@pytest.mark.parametrize("make", [divide, replace, number])
def test_the_users_own_workers_start_anew_where_reading_changes_samples(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = fit_both(make, 1, {"persistent": True})
    assert distance(plain, ours) == 0 and ours.verdict("workers").took is False
    assert ours.verdict("workers").why == f"your workers were not kept between epochs: {ANOTHER}"
    monkeypatch.setattr(ReadTwice, "find_change", lambda *_, **__: (False, ""))
    plain, kept = fit_both(make, 1, {"persistent": True})
    assert distance(plain, kept) > 0, "the control"


def test_the_users_own_workers_start_anew_until_there_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is too busy for one."""
    monkeypatch.setattr(ReadTwice, "_receive", lambda *_: None)
    plain, ours = fit_both(divide, 1, {"persistent": True})
    assert distance(plain, ours) == 0 and PENDING in ours.verdict("workers").why
    monkeypatch.setattr(ReadTwice, "is_pending", False)
    plain, kept = fit_both(divide, 1, {"persistent": True})
    assert distance(plain, kept) > 0, "the control"


def test_the_users_own_workers_stay_where_it_does_not() -> None:
    plain, ours = fit_both(copy, 1, {"persistent": True, "across_epochs": True})
    assert distance(plain, ours) == 0 and ours.verdict("workers").took is True


@pytest.mark.parametrize("make", [divide, number])
def test_no_workers_are_added_where_reading_changes_samples(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = fit_both(make, 0, {"count": 2})
    assert distance(plain, ours) == 0 and ANOTHER in str(ours.reason("workers"))
    monkeypatch.setattr(ReadTwice, "find_change", lambda *_, **__: (False, ""))
    plain, added = fit_both(make, 0, {"count": 2})
    assert distance(plain, added) > 0, "the control"


def test_no_workers_are_added_before_there_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that take long to make."""
    monkeypatch.setattr(read_twice, "SOON_S", 0.0)
    plain, ours = fit_both(divide, 0, {"count": 2})
    assert distance(plain, ours) == 0 and ANOTHER in str(ours.reason("workers"))
    monkeypatch.setattr(read_twice, "LATE_S", 0.0)
    monkeypatch.setattr(ReadTwice, "_receive", lambda *_: None)
    plain, added = fit_both(divide, 0, {"count": 2})
    assert distance(plain, added) > 0, "the control"


def test_validation_workers_start_anew_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Validates(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(float(batch[0].mean()))

    def fit() -> tuple[Run, Run]:
        def load() -> Any:
            return DataLoader(Pictures(divide), 8, num_workers=1)

        return both(
            {"workers": {"persistent": True}}, lambda: batches(24, num_workers=1), Validates, val=load, max_epochs=3
        )

    plain, ours = fit()
    assert ours.module.seen == plain.module.seen and len(set(plain.module.seen)) == 1
    monkeypatch.setattr(ReadTwice, "find_change", lambda *_, **__: (False, ""))
    plain, kept = fit()
    assert kept.module.seen != plain.module.seen, "the control"
