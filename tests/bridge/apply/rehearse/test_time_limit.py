"""A limit that is heard where Python runs or waits, and that ends the process where nothing is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fastloop import FastLoop
from fastloop.bridge.apply.rehearse.time_limit import TimeLimit, announced, find_limit, limited
from fastloop.errors import let_through

WORDS = {"cause": "the rehearsal of amp", "do": "write rungs.amp.enabled: false"}


@pytest.mark.usefixtures("no_alarm")
def test_work_in_time_is_left_alone() -> None:
    with limited(30, **WORDS):
        assert 1 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert not [each for each in threading.enumerate() if isinstance(each, threading.Timer) and each.is_alive()]


@pytest.mark.usefixtures("no_alarm")
def test_waiting_for_a_lock_ends() -> None:
    lock = threading.Lock()
    lock.acquire()
    with pytest.raises(TimeLimit, match=r"longer than 0\.2 s"), limited(0.2, **WORDS):
        lock.acquire()


@pytest.mark.usefixtures("no_alarm")
def test_the_users_own_alarm_rings_on_time() -> None:
    """It came when the rehearsal was over, 33 s late after a compile. The limit goes on, and so does its interval."""
    heard: list[float] = []
    signal.signal(signal.SIGALRM, handler := lambda *_: heard.append(time.monotonic()))
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.4)
    with pytest.raises(TimeLimit), limited(1.2, **WORDS):
        wait_busily(60)
    assert heard[0] - began < 1.2 and signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[1] == pytest.approx(0.4)


def end(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the time that was booked is over")


@pytest.mark.usefixtures("no_alarm")
def test_what_the_users_alarm_raises_passes_through() -> None:
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(TimeoutError) as raised, limited(30, **WORDS):
        wait_busily(60)
    with pytest.raises(TimeoutError):
        let_through(raised.value)


@pytest.mark.usefixtures("quick_starts")
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
    assert "got the rehearsal of amp, which has hung" in ended.stderr and "rungs.amp.enabled: false" in ended.stderr
    assert "time.sleep" in ended.stderr or "line 6 in <module>" in ended.stderr, "and where"


class Leaving:
    """Takes a while to leave, in Python code."""

    def __init__(self) -> None:
        self.has_left = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        wait_busily(0.3)
        self.has_left = True


class Ignored:
    """Python ignores exceptions in ``__del__``."""

    def __del__(self) -> None:
        wait_busily(0.3)


def wait_busily(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass


def leave(mode: Leaving) -> None:
    with pytest.raises(TimeLimit), limited(0.1, **WORDS):
        with mode:
            pass
        wait_busily(60)


@pytest.mark.usefixtures("no_alarm")
@pytest.mark.parametrize("starts_thread", [False, True])
def test_a_context_that_is_being_left_is_left(monkeypatch: pytest.MonkeyPatch, starts_thread: bool) -> None:
    """Interrupted while it was left, torch stayed in whatever mode it was about to end."""

    def run(mode: Leaving) -> bool:
        if starts_thread:
            thread = threading.Thread(target=leave, args=(mode,))
            thread.start()
            thread.join()
        else:
            leave(mode)
        return mode.has_left

    assert run(Leaving())
    monkeypatch.setattr("fastloop.bridge.apply.rehearse.time_limit._WHOLE", frozenset())
    assert not run(Leaving()), "control"


@pytest.mark.usefixtures("no_alarm")
def test_an_exception_that_was_ignored_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps it
    monkeypatch.setattr("fastloop.bridge.apply.rehearse.time_limit._WHOLE", frozenset())
    with pytest.raises(TimeLimit), limited(0.1, **WORDS):
        Ignored()
        wait_busily(60)


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


class Preempted(L.LightningModule):
    """Gets a signal when its module runs for the second time, which then takes long; counts the steps."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number
        self.net, self.runs, self.steps = torch.nn.Linear(4, 1), 0, 0
        self.net.register_forward_hook(self.run)

    def run(self, *_: Any) -> None:
        self.runs += 1
        if self.runs == 2:
            os.kill(os.getpid(), self.number)
            time.sleep(5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Preempted, rungs: dict[str, Any]) -> None:
    weights: list[torch.Tensor] = []
    notes = L.pytorch.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: weights.append(module.net.weight.detach().clone())
    )
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    loop = FastLoop({"rungs": rungs}, quiet=True)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[notes, loop], **quiet)  # type: ignore[arg-type]
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 4)), 2))
    finally:
        assert torch.equal(module.net.weight, weights[-1])


@pytest.mark.parametrize("rehearses", [True, False], ids=["in a rehearsal", "control"])
def test_sigterm_ends_a_rehearsal_at_once(rehearses: bool) -> None:
    """Lightning looks for it after a batch, and a rehearsal may take a minute. What it changed is put back."""
    torch.manual_seed(0)
    module, before = Preempted(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        fit(module, {"amp": {"enabled": rehearses}})
    assert module.steps == (1 if rehearses else 2)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("no_alarm")
def test_an_alarm_that_raises_ends_the_training_from_within_a_rehearsal() -> None:
    """It was taken for the time limit, and then for a fault of the rung."""
    signal.signal(signal.SIGALRM, end)
    torch.manual_seed(0)
    module = Preempted(signal.SIGALRM)
    with pytest.raises(TimeoutError, match="booked"):
        fit(module, {"amp": {"enabled": True}})
    assert module.steps == 1 and signal.getsignal(signal.SIGALRM) is end


@pytest.mark.usefixtures("no_alarm")
def test_what_puts_things_back_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer than the time after which the limit looks again."""
    monkeypatch.setattr("fastloop.bridge.apply.rehearse.time_limit.AGAIN_S", 0.1)
    done: list[str] = []

    def work() -> None:
        try:
            wait_busily(60)
        finally:
            wait_busily(0.5)
            done.append("put back")

    with pytest.raises(TimeLimit), limited(0.1, **WORDS):
        work()
    assert done == ["put back"]


@pytest.mark.usefixtures("quick_starts")
def test_a_limit_that_comes_as_the_work_ends_ends_no_process() -> None:
    code = (
        "import signal, time\n"
        "from fastloop.bridge.apply.rehearse.time_limit import TimeLimit, _alarm\n"
        "came, deadline, handler = 0, time.monotonic() + 3, signal.getsignal(signal.SIGALRM)\n"
        "while time.monotonic() < deadline:\n"
        "    end = time.monotonic() + 0.002\n"
        "    try:\n"
        "        with _alarm(0.002):\n"
        "            while time.monotonic() < end:\n"
        "                pass\n"
        "    except TimeLimit:\n"
        "        came += 1\n"
        "assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL)[0] == 0\n"
        "print('came' if came else 'never')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, "came\n"), ended.stderr


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    def raise_itself(error: Exception) -> None:
        raise error from error

    own = ValueError("own")
    with pytest.raises(ValueError, match="own"):
        raise_itself(own)
    assert own.__cause__ is own and find_limit(own) is None
    limit = TimeLimit()
    own.__context__, own.__cause__ = limit, None
    assert find_limit(own) is limit
