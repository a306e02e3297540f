"""Who else profiles this process."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fastloop.evidence.trace import other_profilers
from fastloop.evidence.trace.other_profilers import find_other_profiler

CPU = [ProfilerActivity.CPU]


def test_nobody() -> None:
    assert find_other_profiler(cuda=False) is None and find_other_profiler(cuda=True) is None


@pytest.mark.parametrize("kind", ["torch.profiler", "autograd"])
def test_a_running_profiler(kind: str) -> None:
    with profile(activities=CPU) if kind == "torch.profiler" else torch.autograd.profiler.profile():
        assert "already running" in str(find_other_profiler(cuda=False))
    assert not torch.autograd._profiler_enabled()


def test_one_that_waits_for_its_turn() -> None:
    """Not enabled yet, but it would fail when it finds ours."""
    waiting = profile(activities=CPU, schedule=schedule(wait=100, warmup=1, active=1))
    with waiting:
        assert not torch.autograd._profiler_enabled(), "or this test shows nothing"
        assert "may start again" in str(find_other_profiler(cuda=False))
    del waiting
    assert find_other_profiler(cuda=False) is None


def test_one_that_is_garbage_is_nobody() -> None:
    gc.disable()
    try:
        gone: Any = profile(activities=CPU)
        gone.itself = gone
        del gone
        assert other_profilers._has_profiler(), "or this test shows nothing"
        assert find_other_profiler(cuda=False) is None
    finally:
        gc.enable()


def test_looking_for_profilers_runs_nobody_s_code() -> None:
    class Lies:
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise AssertionError("asked for its class")

    lies = Lies()
    assert find_other_profiler(cuda=False) is None
    with pytest.raises(AssertionError):
        isinstance(lies, profile)


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("NSYS_PROFILING_SESSION_ID", "Nsight Systems"),
        ("NV_COMPUTE_PROFILER_PERFWORKS_DIR", "Nsight Compute"),
        ("CUDA_INJECTION64_PATH", "injected"),
        ("NVTX_INJECTION64_PATH", "NVTX"),
        ("NV_TPS_LAUNCH_TOKEN", "Nsight"),
        ("NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "Nsight"),
        ("NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN", "Sanitizer"),
    ],
)
def test_a_tool_of_nvidia_s(monkeypatch: pytest.MonkeyPatch, name: str, tool: str) -> None:
    monkeypatch.setenv(name, "1")
    reason = find_other_profiler(cuda=True)
    assert reason is not None and tool in reason and name in reason
    assert find_other_profiler(cuda=False) is None, "on the CPU they are in nobody's way"


@pytest.mark.parametrize(
    ("maps", "attached"),
    [
        ("7f00-7f01 r-xp 00000000 08:01 12 /opt/nvidia/nsight-systems/target/libToolsInjection64.so\n", True),
        ("7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcupti.so.13\n", False),
        (None, False),
    ],
)
def test_a_loaded_library(monkeypatch: pytest.MonkeyPatch, maps: str | None, attached: bool) -> None:
    def read(self: Path, **_: Any) -> str:
        if maps is None:
            raise PermissionError(self)
        return maps

    monkeypatch.setattr(Path, "read_text", read)
    assert ("is loaded" in str(find_other_profiler(cuda=True))) == attached
