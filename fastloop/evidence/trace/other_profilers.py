"""Detects other profilers of this process: two users of torch.profiler or of CUPTI interfere with each other."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

_ENVIRONMENT = (
    ("NSYS_PROFILING_SESSION_ID", "Nsight Systems"),
    ("NV_COMPUTE_PROFILER_", "Nsight Compute"),
    ("NV_SANITIZER_", "Compute Sanitizer"),
    ("NVPROF_ID", "nvprof"),
    ("NV_NSIGHT_", "an Nsight tool"),
    ("NV_TPS_", "an Nsight tool"),
    ("NVTX_INJECTION64_PATH", "a tool that takes NVTX ranges"),
    ("CUDA_INJECTION64_PATH", "a tool injected into CUDA"),
)
"""Variables, or their prefixes, that NVIDIA's tools set for what they launch. None is documented for this."""
_LIBRARIES = ("libToolsInjection64", "libcuda-injection", "TreeLauncherTargetInjection")
"""Libraries that those tools load into the process."""


def find_other_profiler(*, cuda: bool) -> str | None:
    """Another profiler of this process, as a reason not to trace; None if none is found.

    Args:
        cuda: also look for tools that watch the GPU.
    """
    return _find_torch_profiler() or (_find_nvidia_tool() if cuda else None)


def _find_torch_profiler() -> str | None:
    running = getattr(torch.autograd, "_profiler_enabled", None)
    if running is not None and running():
        return "a torch profiler is already running"
    # A profiler that waits in its schedule is not enabled yet, and would fail if ours is running.
    if not _has_profiler():
        return None
    gc.collect()  # it may be garbage
    return "your own torch.profiler.profile still exists and may start again" if _has_profiler() else None


def _has_profiler() -> bool:
    """Whether there is a torch.profiler object. Compares types, because asking for a class may run its code."""
    return any(issubclass(type(found), torch.profiler.profile) for found in gc.get_objects())


def _find_nvidia_tool() -> str | None:
    for name in sorted(os.environ):
        for start, tool in _ENVIRONMENT:
            if name.startswith(start):
                return f"{tool} is attached ({name} is set)"
    try:
        loaded = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return None
    found = next((library for library in _LIBRARIES if library in loaded), None)
    return f"an Nsight tool is attached ({found} is loaded)" if found else None
