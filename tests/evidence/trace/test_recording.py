"""The trace window on the CPU, and its calls to a device that is made up."""

from __future__ import annotations

import gc
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.trace_parts import read_parts
from fastloop.evidence.trace import kernel_account
from fastloop.evidence.trace import recording as module
from fastloop.evidence.trace.recording import NAME, TraceWindow

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    assert not torch.autograd._profiler_enabled(), "a profiler was left running"
    with profile(activities=[ProfilerActivity.CPU]):  # and the next one can start
        torch.zeros(1)


class Training:
    """A step of a small net in the phases that a watch marks."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.net = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.wait_s = wait_s

    def step(self, window: TraceWindow) -> None:
        window.push("data_wait")
        time.sleep(self.wait_s)
        batch = torch.ones(64, 128)
        window.pop()
        window.push("optimizer")
        window.push("forward")
        loss = self.net(batch).sum()
        window.pop()
        window.push("backward")
        loss.backward()
        window.pop()
        self.optimizer.step()
        self.optimizer.zero_grad()
        window.pop()

    def run(self, window: TraceWindow, steps: int | None = None) -> dict[str, Any]:
        window.begin()
        for _ in range(window.total_steps if steps is None else steps):
            self.step(window)
            window.step()
        return window.end()


def names(path: Path) -> list[str]:
    with gzip.open(path) as packed:
        events = json.load(packed)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_a_real_trace(tmp_path: Path) -> None:
    window = TraceWindow(CPU, tmp_path / "run", steps=3)
    assert window.total_steps == 6
    found = Training(wait_s=0.02).run(window)
    assert window.done and found["steps"] == 3
    assert [row.name for row in (tmp_path / "run").iterdir()] == [NAME], "no temporary files are left"
    assert found == kernel_account.read(tmp_path / "run" / NAME, 3) | {"asked_steps": 3, "cost_s": found["cost_s"]}
    families = found["families_ms"]
    assert families["gemm"] > 0 and families["optimizer"] > 0 and families["attention"] == 0
    assert 0 < found["busy_ms"] <= found["step_ms"] - 20, "waiting for data is no operator"
    assert {row["name"] for row in found["top"]} & {"aten::addmm", "aten::mm"}
    assert found["idle_ms"]["data"] is None, "the CPU is host and device at once"
    assert 0 < found["cost_s"] < 60
    parts = read_parts(tmp_path / "run" / NAME)["parts_ms"]
    assert parts["data_wait"] > 20 and min(parts["forward"], parts["backward"], parts["optimizer"]) > 0


def test_a_file_is_made_where_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between file systems nothing can be moved at once."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "another disk, which is not there"))
    assert Training().run(TraceWindow(CPU, tmp_path, steps=1))["steps"] == 1
    assert "skipped" in Training().run(TraceWindow(CPU, None, steps=1)), "or this test shows nothing"


def test_the_ranges_are_whole_steps_and_one_that_settles(tmp_path: Path) -> None:
    Training().run(TraceWindow(CPU, tmp_path, steps=2))
    steps = [name for name in names(tmp_path / NAME) if name.startswith(("ProfilerStep", "fastloop/step"))]
    assert sorted(steps) == ["ProfilerStep#0", "ProfilerStep#1", "fastloop/step/lead_in"]
    assert names(tmp_path / NAME).count("fastloop/backward") == 3


def test_without_a_directory_no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert Training().run(TraceWindow(CPU, None, steps=1))["steps"] == 1
    assert list(tmp_path.iterdir()) == []


def test_the_cost_leaves_out_what_the_steps_take_anyway(tmp_path: Path) -> None:
    training = Training(wait_s=0.1)
    window = TraceWindow(CPU, tmp_path, steps=3)
    began = time.perf_counter()
    found = training.run(window)
    assert found["cost_s"] < time.perf_counter() - began - 0.5, "the lead-in says what a step takes"


@pytest.mark.parametrize(("steps", "whole"), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 2)])
def test_a_training_that_ends_early(tmp_path: Path, steps: int, whole: int) -> None:
    window = TraceWindow(CPU, tmp_path, steps=3)
    window.begin()
    for _ in range(steps):
        Training().step(window)
        window.step()
    window.push("data_wait")  # and in the middle of a step
    found = window.end()
    assert found.get("steps", 0) == whole and found.get("asked_steps", 3) == 3
    if not whole:
        assert found == {"skipped": "the training ended before a traced step was complete"}
    assert (tmp_path / NAME).is_file() == bool(whole)


def test_never_begun() -> None:
    window = TraceWindow(CPU, None, steps=1)
    window.push("forward")
    window.pop()
    window.step()
    assert window.end() == {"skipped": "the training ended before a traced step was complete"}


def test_nothing_is_recorded_after_the_last_step(tmp_path: Path) -> None:
    window, training = TraceWindow(CPU, tmp_path, steps=1), Training()
    training.run(window, steps=0)
    again = TraceWindow(CPU, tmp_path, steps=1)
    again.begin()
    for _ in range(again.total_steps):
        training.step(again)
        again.step()
    assert again.done and not again.recording and not torch.autograd._profiler_enabled()
    again.push("late")
    training.step(again)
    again.step()
    assert again.end()["steps"] == 1 and "fastloop/late" not in names(tmp_path / NAME)


@pytest.mark.parametrize("reason", ["the Trainer has a PyTorchProfiler", None])
def test_somebody_else_s_profiler_is_left_alone(tmp_path: Path, reason: str | None) -> None:
    window = TraceWindow(CPU, tmp_path, steps=1, taken=reason)
    if reason is not None:
        assert Training().run(window) == {"skipped": reason}
    else:
        with profile(activities=[ProfilerActivity.CPU]) as theirs:
            found = Training().run(window)
            assert torch.autograd._profiler_enabled(), "theirs goes on"
        assert found == {"skipped": "a torch profiler is already running"}
        events = {event.key for event in theirs.key_averages()}
        assert "aten::addmm" in events and not any("fastloop/" in name for name in events)
        del theirs
        gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_crossing_ranges_are_cut_at_the_step(tmp_path: Path) -> None:
    """A phase that outlasts its step, as a validation would."""
    window = TraceWindow(CPU, tmp_path, steps=2)
    window.begin()
    window.pop()  # of what began before
    window.step()
    window.step()
    window.push("validation")
    for _ in range(3):
        torch.ones(8, 8).mm(torch.ones(8, 8))
        time.sleep(0.02)
        window.step()
    window.pop()
    window.end()
    assert names(tmp_path / NAME).count("fastloop/validation") == 3
    assert read_parts(tmp_path / NAME)["parts_ms"]["validation"] > 19


FAULTS = ("prepare_trace", "start_trace", "stop_trace", "export_chrome_trace")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_profiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    fired = []

    class Faulty(profile):
        def __getattribute__(self, name: str) -> Any:
            if name == fault:
                real = super().__getattribute__(name)

                def fails(*_: Any) -> None:
                    fired.append(name)
                    if name == "stop_trace" or len(fired) > 1:
                        real()
                    if len(fired) == 1:
                        raise RuntimeError("CUPTI\nis not there")

                return fails
            return super().__getattribute__(name)

    monkeypatch.setattr(module, "profile", Faulty)
    assert Training().run(TraceWindow(CPU, tmp_path, steps=1)) == {"skipped": "RuntimeError: CUPTI is not there"}
    assert fired and list(tmp_path.iterdir()) == []
    gc.collect()


def test_a_range_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "record_function", lambda name: None)
    assert "AttributeError" in Training().run(TraceWindow(CPU, tmp_path, steps=1))["skipped"]


def test_a_full_disk_keeps_the_account_honest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    assert "No space left" in Training().run(TraceWindow(CPU, tmp_path, steps=1))["skipped"]
    assert list(tmp_path.iterdir()) == []


class Device:
    """Notes what the window asks of CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.said: list[str] = []

        def says(what: str) -> Any:
            def call(*args: Any) -> None:
                self.said.append(" ".join([what, *(arg for arg in args if isinstance(arg, str))]))
                if what == fails:
                    raise RuntimeError(f"{what} failed")

            return call

        monkeypatch.setattr(torch.cuda.profiler, "start", says("start"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", says("stop"))
        monkeypatch.setattr(torch.cuda, "synchronize", says("synchronize"))
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", says("push"))
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", says("pop"))


@pytest.mark.parametrize("attached", [True, False], ids=["nsys", "a profiler of the user's"])
def test_nsight_gets_its_ranges_and_its_window(monkeypatch: pytest.MonkeyPatch, attached: bool) -> None:
    device = Device(monkeypatch)
    if attached:
        monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    window = TraceWindow(CUDA, None, steps=1, taken=None if attached else "taken")
    window.begin()
    window.step()
    window.push("forward")
    window.pop()
    assert device.said == [], "the lead-in is not in the window"
    for _ in range(3):
        window.step()
        window.push("backward")
        window.push("rung/prefetch")
        window.pop()
        window.pop()
    found = window.end()
    why = "Nsight Systems is attached (NSYS_PROFILING_SESSION_ID is set)" if attached else "taken"
    assert found == {"skipped": why}
    phases = ["push fastloop/backward", "push fastloop/rung/prefetch", "pop", "pop"]
    assert device.said == [
        "start",
        "push fastloop/step/lead_in",
        *phases,
        "pop",
        "push fastloop/step/0",
        *phases,
        "pop",
        "synchronize",
        "stop",
    ]


@pytest.mark.parametrize("fails", ["start", "stop", "push", "synchronize"])
def test_a_fault_of_cuda_still_stops_everything(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    device = Device(monkeypatch, fails)
    window = TraceWindow(CUDA, None, steps=1)
    monkeypatch.setattr(window, "_prepare", lambda: None)
    window.begin()
    for _ in range(4):
        window.step()
    assert window.end() == {"skipped": f"RuntimeError: {fails} failed"}
    assert device.said[-1] == "stop"
