"""Threads beside which the server may fork."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest

from fastloop.experiments.trials import fork_server
from fastloop.experiments.trials.fork_server import count_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SET_NAME = 15


class Named:
    """A thread with a name in the kernel, for as long as the context is open."""

    def __init__(self, name: str) -> None:
        self.name, self.begun, self.over = name, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        ctypes.CDLL(None).prctl(SET_NAME, self.name.encode())
        self.begun.set()
        self.over.wait(60)

    def __enter__(self) -> None:
        self.thread.start()
        assert self.begun.wait(50)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


@pytest.mark.parametrize(("name", "counts"), [("jemalloc_bg_thd", 0), ("somebody", 1)])
def test_an_allocators_thread_does_not_count(name: str, counts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "THREADS_END_S", 0.0)
    before = count_threads()
    with Named(name):
        assert count_threads() == before + counts


def test_a_thread_that_is_ending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [["a", "b"], ["a", "b"], ["a"]]
    monkeypatch.setattr(fork_server, "_list_threads", lambda: left.pop(0) if len(left) > 1 else left[0])
    monkeypatch.setattr(fork_server, "THREADS_END_S", 60.0)
    assert count_threads() == 1
