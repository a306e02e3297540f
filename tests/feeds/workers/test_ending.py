"""Workers that end although torch does not know them any more, and without torch's hearing of it."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from fastloop.feeds.workers.ending import end_workers, kill_started, kill_workers


@pytest.fixture
def pair() -> Any:
    fork = multiprocessing.get_context("fork")
    older, younger = (fork.Process(target=time.sleep, args=(100,), daemon=True) for _ in range(2))
    older.start()
    yield older, younger
    for each in (older, younger):
        each.kill()
        each.join()


def test_those_that_were_there_before_stay(pair: Any) -> None:
    older, younger = pair
    others = multiprocessing.active_children()
    younger.start()
    kill_started(others, 10.0)
    assert older.is_alive() and not younger.is_alive()


@pytest.fixture
def hears_deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's handler, which it sets once in a process; another test may have restored the one before it."""
    before = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    yield
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


@pytest.mark.usefixtures("hears_deaths")
def test_torch_does_not_raise_at_their_death() -> None:
    def begin() -> Any:
        return iter(DataLoader(torch.zeros(8, 1), num_workers=1, timeout=60))

    source, handler = begin(), signal.getsignal(signal.SIGCHLD)
    kill_workers(source, 10.0)
    assert signal.getsignal(signal.SIGCHLD) is handler and not source._workers[0].is_alive()
    source = begin()
    with pytest.raises(RuntimeError, match="killed by signal"):  # the control
        source._workers[0].kill()
        time.sleep(10)
    end_workers(source)  # or torch would raise at the death of the next worker, in another test
