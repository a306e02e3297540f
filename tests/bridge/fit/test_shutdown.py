"""Ending a training: by a signal, by an exception, and with the ranks it started. Processes are in test_run.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from fastloop.bridge.fit import shutdown

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A test that fails must not leave its handlers to the others."""
    numbers = (signal.SIGTERM, signal.SIGALRM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    left = {number for number in numbers if signal.getsignal(number) != before[number]}
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert left == set()


def trainer(**more: Any) -> Any:
    given = {
        "received_sigterm": False,
        "interrupted": False,
        "callbacks": [],
        "world_size": 1,
        "is_global_zero": True,
        "strategy": SimpleNamespace(launcher=None),
    }
    return SimpleNamespace(**{**given, **more})


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)  # the handler runs between two bytecodes


def test_nothing_happens_to_a_fit_that_ends_well() -> None:
    before = threading.active_count()
    with shutdown.ends(trainer()):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert threading.active_count() == before


def test_sigterm_before_lightning_hears_it() -> None:
    with pytest.raises(SystemExit) as caught, shutdown.ends(trainer()):
        terminate()
    assert caught.value.code == 143


def test_lightning_gets_its_time_to_end_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class SIGTERMException(SystemExit):
        pass

    with pytest.raises(SystemExit) as caught, shutdown.ends(trainer(received_sigterm=True)):
        terminate()
        raise SIGTERMException
    assert caught.value.code == 143


def test_a_batch_that_does_not_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "PATIENCE_S", 0.2)
    begun = time.monotonic()
    with pytest.raises(SystemExit) as caught, shutdown.ends(trainer(received_sigterm=True)):
        terminate()
        time.sleep(60)
    assert caught.value.code == 143 and time.monotonic() - begun < 50


def test_a_second_sigterm_does_not_wait() -> None:
    with pytest.raises(SystemExit) as caught, shutdown.ends(trainer(received_sigterm=True)):
        terminate()
        terminate()
    assert caught.value.code == 143


@pytest.mark.parametrize(
    ("rank", "variables", "handler"),
    [
        (0, {}, "leave"),
        (1, {}, "ignore"),
        (1, {"TORCHELASTIC_RUN_ID": "x"}, "leave"),
        (1, {"SLURM_PROCID": "1"}, "leave"),
    ],
)
def test_of_several_ranks_the_first_leaves_and_the_others_wait_for_it(
    rank: int, variables: dict[str, str], handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    several = trainer(world_size=2, is_global_zero=rank == 0)
    with shutdown.ends(several):
        (callback,) = several.callbacks
        callback.on_train_start(several, None)
        ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert ignored is (handler == "ignore")
        if not ignored:
            with pytest.raises(SystemExit):
                terminate()


@pytest.mark.usefixtures("quick_starts")
def test_the_last_resort_ends_everything(tmp_path: Any) -> None:
    """A handler that never comes back, as Lightning's in a collective that another rank does not join."""
    program = (
        "import os, signal, subprocess, sys, time\n"
        "from types import SimpleNamespace\n"
        "from fastloop.bridge.fit import shutdown\n"
        "shutdown.PATIENCE_S = 60; shutdown.LIMIT_S = 1\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(250)'])\n"
        "stuck = SimpleNamespace(received_sigterm=True, callbacks=[], strategy=SimpleNamespace(launcher=None))\n"
        "with shutdown.ends(stuck):\n"
        "    print(child.pid, flush=True); os.kill(os.getpid(), signal.SIGTERM); time.sleep(250)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 143, done.stderr
    with pytest.raises(ProcessLookupError):
        for _ in range(1000):
            os.kill(int(done.stdout), 0)
            time.sleep(0.05)


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), SystemExit("x"), KeyboardInterrupt()])
def test_other_ends_pass_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, shutdown.ends(trainer()):
        raise error
    assert caught.value is error


def test_ctrl_c_is_told_from_an_exit() -> None:
    """Lightning handles Ctrl-C itself, and then exits with 1."""
    with pytest.raises(KeyboardInterrupt), shutdown.ends(trainer()):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_what_a_training_raises_once_it_was_told_to_end_is_a_consequence(number: int) -> None:
    """On Ctrl-C in a terminal the loader's workers hear it too, and the loader then misses them."""
    told = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}[signal.Signals(number)]
    with pytest.raises(told), shutdown.ends(trainer()):
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        except BaseException:
            raise RuntimeError("DataLoader worker exited unexpectedly") from None


def test_in_the_background_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with shutdown.ends(trainer()):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_ranks_it_started_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "RANKS_S", 0.3)
    hung, done = subprocess.Popen(SLEEPS), subprocess.Popen([sys.executable, "-c", ""])
    launcher = SimpleNamespace(procs=[hung, done])
    observer = _ChildProcessObserver(os.getpid(), launcher.procs)
    with pytest.raises(ValueError, match="x"), shutdown.ends(trainer(strategy=SimpleNamespace(launcher=launcher))):
        raise ValueError("x")
    assert hung.wait(50) == -signal.SIGKILL and done.wait(50) in (0, -signal.SIGKILL)
    ended: list[str] = []
    monkeypatch.setattr(observer, "_terminate_all", lambda: ended.append("all"))
    assert observer._run() and ended == [], "Lightning ends no process whose ranks were ended"
    observer._child_processes = [hung]
    assert observer._run() and ended == ["all"], "the control"


def test_ranks_of_a_fit_that_ended_well_are_left_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = subprocess.Popen(SLEEPS)
    with shutdown.ends(trainer(strategy=SimpleNamespace(launcher=SimpleNamespace(procs=[rank])))):
        pass
    assert rank.poll() is None
    rank.kill()
    rank.wait()


def test_in_another_thread_signals_are_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def fit() -> None:
        with shutdown.ends(trainer()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert seen == [before]


class Swallows:
    """Python drops what is raised in here."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ctrl_c_that_a_destructor_swallowed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "AGAIN_S", 0.1)
    swallowed = False
    with pytest.raises(KeyboardInterrupt), shutdown.ends(trainer()):
        thing = Swallows()
        del thing
        swallowed = True
        time.sleep(60)
    assert swallowed


@pytest.mark.parametrize("marked", [True, False])
def test_a_ctrl_c_that_was_heard_is_not_repeated(marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "AGAIN_S", 60.0)
    fit, alarms = trainer(), []
    alarm = shutdown._Signals._on_alarm
    monkeypatch.setattr(shutdown._Signals, "_on_alarm", lambda *given: (alarms.append(1), alarm(*given)))
    with shutdown.ends(fit):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        if marked:  # as Lightning does, first the one and then the other
            fit.interrupted = True
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)  # sooner than it was set to
        begun = time.monotonic()
        while len(alarms) < 3 and time.monotonic() - begun < 60:
            time.sleep(0.05)
    assert len(alarms) >= 3 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
