"""Hooks that fail open, and the switch that turns them off."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils import signal_handling

from fastloop.bridge.fail_open import fail_open, ignoring_dead_workers, is_disabled
from fastloop.errors import ConfigError, FastLoopError


class Owner:
    off = False

    def __init__(self) -> None:
        self.why: list[str] = []

    def stop_watching(self, why: str) -> None:
        self.why.append(why)

    @fail_open
    def hook(self, error: BaseException | None, result: Any = None) -> Any:
        """What it does."""
        if error is not None:
            raise error
        return result


def test_what_a_hook_returns_is_handed_on() -> None:
    owner = Owner()
    assert owner.hook(None, result=3) == 3 and owner.why == []
    assert (Owner.hook.__name__, Owner.hook.__doc__) == ("hook", "What it does.")


def test_an_exception_of_ours_is_said_and_swallowed() -> None:
    owner = Owner()
    assert owner.hook(ValueError("broken")) is None and owner.why == ["hook: ValueError: broken"]


@pytest.mark.parametrize("kind", [FastLoopError, ConfigError])
def test_errors_meant_for_a_person_pass(kind: type[FastLoopError]) -> None:
    owner = Owner()
    with pytest.raises(kind, match="why not"):
        owner.hook(kind(got="it", why="why not", do="that"))
    assert owner.why == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        Owner().hook(kind())


def test_off_calls_nothing() -> None:
    owner = Owner()
    owner.off = True
    assert owner.hook(ValueError("never raised"), result=3) is None and owner.why == []


@pytest.mark.parametrize(("value", "off"), [(None, False), ("", False), ("0", False), ("1", True), ("true", True)])
def test_the_switch(value: str | None, off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTLOOP_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("FASTLOOP_DISABLE", value)
    assert is_disabled() == off


# -- what is raised inside our hooks, but not by them ------------------------------------------------------------------


class Busy(Owner):
    """A hook that runs for as long as it takes for a signal to come."""

    @fail_open
    def hook(self, send: Callable[[], None]) -> None:  # type: ignore[override]
        send()
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)


class Covers(Busy):
    """One whose cleaning up fails where the signal came."""

    def _wait(self) -> None:
        try:
            super()._wait()
        finally:
            raise KeyError("ours, on the way out")


class Own(Exception):
    """What a handler of the user's raises."""


def raise_own(number: int, frame: Any) -> None:
    raise Own("time is up")


class Handler:
    def handle(self, *_: Any) -> None:
        raise_own(*_)


@pytest.mark.parametrize("kind", [Busy, Covers])
@pytest.mark.parametrize("handler", [raise_own, Handler().handle, lambda *given: raise_own(*given)])
@pytest.mark.timeout(100)
def test_what_a_handler_of_the_users_raises_in_our_hook_is_theirs(handler: Any, kind: type[Busy]) -> None:
    owner, before = kind(), signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Own, match="time is up"):
            owner.hook(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert owner.why == []


@pytest.mark.timeout(100)
def test_the_death_of_a_worker_in_our_hook_is_torchs_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler for SIGCHLD raises wherever the main thread is, and once only."""
    # torch sets it once in a process, and the end of an earlier test's fit, which restores all signals, took it away.
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    owner, iterator = Busy(), iter(DataLoader(TensorDataset(torch.arange(99)), num_workers=1))
    next(iterator)
    with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid \d+\) is killed by signal: Killed"):
        owner.hook(lambda: os.kill(iterator._workers[0].pid, signal.SIGKILL))
    assert owner.why == []


@pytest.mark.parametrize("ignores", [True, False], ids=["ignored", "control"])
def test_workers_that_die_do_not_end_a_report(ignores: bool) -> None:
    before = signal.signal(signal.SIGCHLD, raise_own)
    try:
        with (
            pytest.raises(Own) if not ignores else nullcontext(),
            ignoring_dead_workers() if ignores else nullcontext(),
        ):
            os.kill(os.getpid(), signal.SIGCHLD)
        assert signal.getsignal(signal.SIGCHLD) is raise_own, "put back"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_an_error_of_ours_with_a_frame_in_hand_stays_ours() -> None:
    """The control: a frame among the arguments makes no handler."""

    class Looks(Owner):
        @fail_open
        def hook(self) -> None:  # type: ignore[override]
            self.look_at(sys._getframe())

        def look_at(self, frame: Any) -> None:
            raise ValueError("broken")

    owner = Looks()
    owner.hook()
    assert owner.why == ["hook: ValueError: broken"]
