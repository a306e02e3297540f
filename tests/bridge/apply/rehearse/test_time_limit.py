"""A limit that is heard where Python runs or waits, and that ends the process where nothing is heard."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from fastloop.bridge.apply.rehearse.time_limit import TimeLimit, announced, limited

WORDS = {"cause": "the rehearsal of amp", "do": "write rungs.amp.enabled: false"}


def test_work_in_time_is_left_alone() -> None:
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    with limited(30, **WORDS):
        assert 1 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30
    assert signal.getsignal(signal.SIGALRM) is handler
    assert timer - 20 < signal.getitimer(signal.ITIMER_REAL)[0] <= timer, "pytest's own, or none"
    assert not [each for each in threading.enumerate() if isinstance(each, threading.Timer) and each.is_alive()]


def test_waiting_for_a_lock_ends() -> None:
    lock = threading.Lock()
    lock.acquire()
    with pytest.raises(TimeLimit, match=r"longer than 0\.2 s"), limited(0.2, **WORDS):
        lock.acquire()


def test_the_users_own_alarm_still_comes() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        with limited(30, **WORDS):
            time.sleep(0.1)
        assert not heard
        deadline = time.monotonic() + 60
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
        assert heard == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_does_not_hear_is_ended_with_its_cause() -> None:
    code = (
        "import signal, time\n"
        "from fastloop.bridge.apply.rehearse import time_limit\n"
        "time_limit.GRACE_S = 0.5\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "with time_limit.limited(0.2, cause='the rehearsal of amp', do='write rungs.amp.enabled: false'):\n"
        "    time.sleep(120)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    assert "got the rehearsal of amp that has hung" in ended.stderr and "rungs.amp.enabled: false" in ended.stderr
    assert "time.sleep" in ended.stderr or "line 6 in <module>" in ended.stderr, "and where"


def test_what_takes_long_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastloop.bridge.apply.rehearse.time_limit.SILENT_S", 0.05)
    said: list[str] = []
    with announced("trying amp", said.append):
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said == ["trying amp (0 s so far)"]
    said.clear()
    monkeypatch.setattr("fastloop.bridge.apply.rehearse.time_limit.SILENT_S", 60.0)
    with announced("trying amp", said.append):
        pass
    assert not said
