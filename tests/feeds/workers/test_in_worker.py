"""Workers keep off the last CPUs, by the kernel's word, and an exit in one arrives as an exception. What they do with
batches: test_tried_workers."""

from __future__ import annotations

import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from fastloop.feeds.workers import in_worker
from fastloop.feeds.workers.in_worker import LeavesRoom, SendsExits


class Exits(Dataset):
    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return sys.exit("no data") if index == self.at else index


def load(at: int, **settings: Any) -> list[torch.Tensor]:
    batches = iter(DataLoader(Exits(at), 4, num_workers=1, worker_init_fn=SendsExits(None), **settings))
    try:
        return list(batches)
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_exit_is_sent_with_its_words(method: str) -> None:
    with pytest.raises(RuntimeError, match="SystemExit: no data"):
        load(5, multiprocessing_context=method)
    assert [batch.tolist() for batch in load(9, multiprocessing_context=method)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_loaders_own_function_is_called() -> None:
    called: list[int] = []
    kind = torch.utils.data._DatasetKind
    before = kind.create_fetcher
    try:
        SendsExits(called.append)(3)
    finally:
        kind.create_fetcher = staticmethod(before)
    assert called == [3]


# -- room for the training ---------------------------------------------------------------------------------------------

has_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")


class Says(Dataset[Any]):
    """Where its worker may run, how nice it is, and what the loader's own function did."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        cpus = os.popen(f"grep Cpus_allowed_list /proc/{os.getpid()}/status").read().split()[-1]
        return cpus, os.nice(0), getattr(info.dataset, "own", None)


def mark(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.own = f"worker {worker_id}"  # type: ignore[attr-defined]


def ask(init: Callable[[int], None]) -> Any:
    loader = DataLoader(Says(), batch_size=None, num_workers=1, worker_init_fn=init, timeout=100)
    return next(iter(loader))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let workers believe in three CPUs, of which the machine has the first; returns that one's number."""
    first = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {first, 1000, 1001})
    return str(first)


@has_affinity
def test_the_last_cpus_are_kept_free_and_the_own_function_runs(three: str) -> None:
    before = os.popen(f"grep Cpus_allowed_list /proc/{os.getpid()}/status").read()
    assert ask(LeavesRoom(mark, 1)) == [three, os.nice(0), "worker 0"]
    assert os.popen(f"grep Cpus_allowed_list /proc/{os.getpid()}/status").read() == before


@has_affinity
def test_where_there_are_few_nothing_is_done() -> None:
    all_of_them = ask(mark)
    assert ask(LeavesRoom(mark, 1000)) == all_of_them and all_of_them[2] == "worker 0"


@has_affinity
def test_without_affinity_workers_give_way(three: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    assert ask(LeavesRoom(None, 1))[1] == min(19, os.nice(0) + in_worker._NICENESS)  # Linux goes no further


def test_it_can_travel_to_a_spawned_worker() -> None:
    assert pickle.loads(pickle.dumps(LeavesRoom(mark, 2))) == LeavesRoom(mark, 2)


@pytest.mark.parametrize(("threads", "expected"), [(os.cpu_count(), [1]), (0, [])])
def test_opencv_has_one_thread_in_a_worker_unless_the_user_said_otherwise(
    threads: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D9."""
    asked: list[int] = []
    fake: Any = types.ModuleType("cv2")
    fake.getNumThreads, fake.setNumThreads = lambda: threads, asked.append
    monkeypatch.setitem(sys.modules, "cv2", fake)
    monkeypatch.setattr(in_worker, "_keep_off", lambda _: True)
    LeavesRoom(None, 1)(0)
    assert asked == expected and torch.get_num_threads() >= 1
