"""The trace window on a CUDA device, on steps whose account is known. Skipped without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.planted import cycles_per_ms
from benchmarks.trace_parts import read_parts
from fastloop.evidence.trace.recording import NAME, TraceWindow

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(150),
    pytest.mark.alone,
]

DEVICE = torch.device("cuda")
Step = Callable[[TraceWindow], None]


def traced(step: Step, directory: Path | None = None, steps: int = 5) -> dict[str, Any]:
    for _ in range(3):  # libraries load, the allocator fills
        step(TraceWindow(DEVICE, None, 1))
    torch.cuda.synchronize()
    window = TraceWindow(DEVICE, directory, steps)
    window.begin()
    for _ in range(window.total_steps):
        step(window)
        window.step()
    found = window.end()
    assert "skipped" not in found, found
    assert found["steps"] == steps
    assert found["busy_ms"] + sum(found["idle_ms"].values()) == pytest.approx(found["step_ms"])
    return found


def within(window: TraceWindow, phase: str, work: Callable[[], Any]) -> None:
    window.push(phase)
    work()
    window.pop()


@pytest.fixture(scope="module")
def square() -> torch.Tensor:
    return torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)


def test_waiting_for_data(square: torch.Tensor) -> None:
    def step(window: TraceWindow) -> None:
        within(window, "data_wait", lambda: time.sleep(0.020))
        within(window, "forward", lambda: (square @ square, torch.cuda.synchronize()))

    found = traced(step)
    assert found["idle_ms"]["data"] == pytest.approx(20, abs=2)
    assert found["families_ms"]["gemm"] == pytest.approx(found["busy_ms"], rel=0.05)


def test_a_wait_behind_a_busy_device_is_no_idle_time() -> None:
    cycles = int(20 * cycles_per_ms())

    def step(window: TraceWindow) -> None:
        within(window, "data_wait", lambda: time.sleep(0.005))
        within(window, "forward", lambda: torch.cuda._sleep(cycles))

    found = traced(step)
    assert found["step_ms"] == pytest.approx(20, rel=0.05)
    assert found["idle_ms"]["data"] < 0.3


@pytest.mark.parametrize("how", ["synchronize", "item"])
def test_waiting_for_the_device(square: torch.Tensor, how: str) -> None:
    small = square[:1024, :1024].contiguous()

    def step(window: TraceWindow, waits: bool = True) -> None:
        window.push("forward")
        for _ in range(50):
            out = small @ small
            if waits:
                torch.cuda.synchronize() if how == "synchronize" else out[0, 0].item()
        window.pop()

    found, without = traced(step), traced(lambda window: step(window, waits=False))
    assert found["idle_ms"]["sync"] > 0.2
    assert without["idle_ms"]["sync"] < 0.05


def test_many_small_kernels_are_launching() -> None:
    x = torch.zeros(16, device=DEVICE)

    def step(window: TraceWindow) -> None:
        within(window, "forward", lambda: [x.add_(1) for _ in range(1000)])

    found = traced(step)
    assert found["launches"] == pytest.approx(1000, abs=5)
    assert found["idle_ms"]["launch"] > 0.5 * found["step_ms"]
    assert found["families_ms"]["elementwise"] == pytest.approx(found["busy_ms"], rel=0.02)


def test_families_as_events_time_them(square: torch.Tensor) -> None:
    long, cycles = torch.zeros(2**27, device=DEVICE), int(3 * cycles_per_ms())
    pairs: list[list[Any]] = []

    def step(window: TraceWindow) -> None:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda._sleep(cycles)  # the host gets ahead, so that no launch is in the events' way
        events[0].record()
        within(window, "forward", lambda: [square @ square for _ in range(20)])
        events[1].record()
        within(window, "backward", lambda: [long.mul_(1.0) for _ in range(10)])
        events[2].record()
        pairs.append(events)

    found = traced(step)
    torch.cuda.synchronize()
    timed = pairs[-5:]
    gemm = sum(events[0].elapsed_time(events[1]) for events in timed) / 5
    elementwise = sum(events[1].elapsed_time(events[2]) for events in timed) / 5
    assert found["families_ms"]["gemm"] == pytest.approx(gemm, rel=0.1)
    assert found["families_ms"]["elementwise"] == pytest.approx(elementwise, rel=0.1)


def test_an_optimizer_s_small_kernels() -> None:
    layer = torch.nn.Linear(2048, 2048, device=DEVICE)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False, fused=False)
    x = torch.randn(512, 2048, device=DEVICE)

    def step(window: TraceWindow) -> None:
        window.push("forward")
        loss = layer(x).square().mean()
        window.pop()
        within(window, "backward", loss.backward)
        within(window, "optimizer", lambda: (optimizer.step(), optimizer.zero_grad()))

    families = traced(step)["families_ms"]
    assert families["optimizer"] > 0 and families["elementwise"] > 0 and families["gemm"] > 0


def test_copies_from_pinned_memory_run_beside_kernels() -> None:
    side, cycles = torch.cuda.Stream(), int(5 * cycles_per_ms())
    host = torch.zeros(2**24, pin_memory=True)
    target = torch.zeros(2**24, device=DEVICE)

    def step(window: TraceWindow) -> None:
        window.push("forward")
        torch.cuda._sleep(cycles)
        with torch.cuda.stream(side):
            target.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        window.pop()

    found = traced(step)
    assert found["families_ms"]["copy"] > 0.3
    assert found["busy_ms"] < found["families_ms"]["copy"] + found["families_ms"]["other"] - 0.2, "not added up"


def test_a_graph_s_kernels_are_one_launch(square: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    square @ square
    with torch.cuda.graph(graph):
        for _ in range(5):
            square @ square

    found = traced(lambda window: within(window, "forward", graph.replay))
    assert found["families_ms"]["gemm"] > 0.8 * found["busy_ms"]
    assert found["launches"] < 3 and found["top"][0]["count"] >= 4


def test_parts_as_chained_events_read_them(tmp_path: Path, square: torch.Tensor) -> None:
    cycles, marks = int(cycles_per_ms()), list[list[Any]]()

    def step(window: TraceWindow) -> None:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        phases: dict[str, Callable[[], Any]] = {
            "data_wait": lambda: time.sleep(0.012),
            "forward": lambda: [square @ square for _ in range(10)],
            "backward": lambda: torch.cuda._sleep(3 * cycles),
            "optimizer": lambda: torch.cuda._sleep(2 * cycles),
        }
        events[0].record()
        for event, (phase, work) in zip(events[1:], phases.items(), strict=True):
            within(window, phase, work)
            event.record()
        marks.append(events)

    traced(step, tmp_path)
    torch.cuda.synchronize()
    found = read_parts(tmp_path / NAME, steps=5)
    slack = max(0.02 * found["step_ms"], 0.3)
    for number, phase in enumerate(("data_wait", "forward", "backward", "optimizer")):
        events_ms = sum(events[number].elapsed_time(events[number + 1]) for events in marks[-5:]) / 5
        assert found["parts_ms"][phase] == pytest.approx(events_ms, abs=slack), phase
    assert sum(found["parts_ms"].values()) + found["between_ms"] == pytest.approx(found["step_ms"])


def test_one_after_the_other_and_nothing_left(square: torch.Tensor, tmp_path: Path) -> None:
    def step(window: TraceWindow) -> None:
        within(window, "forward", lambda: square @ square)

    first, second = traced(step, tmp_path), traced(step, tmp_path)
    assert first["families_ms"]["gemm"] == pytest.approx(second["families_ms"]["gemm"], rel=0.3)
    assert not torch.autograd._profiler_enabled()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as theirs:
        square @ square
        torch.cuda.synchronize()
    assert any("mm" in event.key for event in theirs.key_averages())


def test_beside_a_user_s_profiler_only_nsight_is_served(square: torch.Tensor, tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as theirs:
        window = TraceWindow(DEVICE, tmp_path, 1)
        window.begin()
        for _ in range(window.total_steps):
            within(window, "forward", lambda: square @ square)
            window.step()
        assert window.end() == {"skipped": "a torch profiler is already running"}
        torch.cuda.synchronize()
    assert list(tmp_path.iterdir()) == []
    assert any("mm" in event.key for event in theirs.key_averages())
