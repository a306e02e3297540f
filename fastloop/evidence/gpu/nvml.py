"""One GPU through NVML, found by its CUDA uuid, so that ``CUDA_VISIBLE_DEVICES`` does not matter.

Nothing here makes a CUDA call. Values that the driver refuses are None. The same thread must open, read and close a
``Gpu``.
Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastloop.evidence.gpu.gpm import Gpm
from fastloop.evidence.machine import Unreadable as Unreadable
from fastloop.evidence.machine import ask_driver, is_ours, start_nvml
from fastloop.evidence.machine import ask_nvml as _ask

LIMITS = {0x04: "sw_power_cap", 0x08: "hw_slowdown", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake"}
"""Reasons for lower clocks that count as a limit. An idle GPU and user-set clocks do not count (nvml.h)."""
_SM_CLOCK = 1


@dataclass(frozen=True, kw_only=True)
class Neighbors:
    """The other processes on a GPU."""

    processes: int | None = None
    """Number of processes that compute there and do not belong to this run; None if they cannot be counted."""
    pids: tuple[int, ...] = ()
    """Their process ids; empty if this process is one of those listed and cannot be identified."""
    held_bytes: int | None = None
    """Memory they hold."""
    memory_free_bytes: int | None = None
    memory_total_bytes: int | None = None


def find_uuid(device: torch.device) -> str | None:
    """The uuid of a CUDA device, ``GPU-...``; None for other devices or if torch does not report it.

    Under MIG, CUDA reports the slice's uuid, and the prefix is then wrong: ``Gpu.open`` tries both.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def read_driver() -> str | None:
    """The driver's version; None without NVML."""
    try:
        nvml = start_nvml()
    except Unreadable:
        return None
    version = ask_driver(nvml)
    _ask(lambda: nvml.nvmlShutdown())
    return version


class Gpu:
    """A GPU opened for reading."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        on_slice = _ask(lambda: bool(nvml.nvmlDeviceIsMigDeviceHandle(handle)))
        self.mig = bool(on_slice or _ask(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])))
        self._gpm: Gpm | None = None

    @classmethod
    def open(cls, uuid: str | None) -> Gpu:
        """Open the GPU with this uuid.

        Raises:
            Unreadable: no uuid, no nvidia-ml-py, no driver, no such GPU.
        """
        if uuid is None:
            raise Unreadable("the GPU's UUID is unknown")
        nvml = start_nvml()
        handle = _handle(nvml, uuid)
        if handle is None:
            _ask(lambda: nvml.nvmlShutdown())
            raise Unreadable(f"NVML knows no GPU {uuid}")
        return cls(nvml, handle)

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
        _ask(lambda: self._nvml.nvmlShutdown())  # NVML counts its users: others that have it open keep it

    def open_counters(self) -> bool:
        """Begin the GPM counters' first interval; False if there are none."""
        self._gpm = None if self.mig else Gpm.open(self._nvml, self._handle)
        return self._gpm is not None

    def numbers(self) -> dict[str, float | None]:
        """Current utilization, power and clock, and the counters' means since the last call."""
        nvml, handle = self._nvml, self._handle
        milliwatts = _ask(lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)))
        return {
            "nvml_busy_pct": _ask(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            "watts": None if milliwatts is None else milliwatts / 1e3,
            "sm_clock_mhz": _ask(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK))),
            **(self._gpm.read() if self._gpm else {}),
        }

    def sm_clock_max_mhz(self) -> float | None:
        return _ask(lambda: float(self._nvml.nvmlDeviceGetMaxClockInfo(self._handle, _SM_CLOCK)))

    def throttle(self) -> tuple[str, ...] | None:
        """The reasons that currently limit the clocks."""
        nvml, handle = self._nvml, self._handle
        bits = _ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
        if bits is None:  # the function's name before driver 535
            bits = _ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        return None if bits is None else tuple(name for bit, name in LIMITS.items() if bits & bit)

    def energy_mj(self) -> int | None:
        """Millijoules of the whole board since the driver was loaded (Volta and later)."""
        return None if self.mig else _ask(lambda: int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)))

    def find_neighbors(self) -> Neighbors:
        nvml, handle = self._nvml, self._handle
        memory = _ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        found = _ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        listed = None if found is None else [(int(each.pid), getattr(each, "usedGpuMemory", None)) for each in found]
        on_gpu = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        processes, pids, held = count_foreign(listed, os.getpid(), on_gpu)
        return Neighbors(
            processes=processes,
            pids=pids,
            held_bytes=held,
            memory_free_bytes=None if memory is None else int(memory.free),
            memory_total_bytes=None if memory is None else int(memory.total),
        )


def count_foreign(
    listed: Sequence[tuple[int, int | None]] | None, own: int, on_gpu: bool
) -> tuple[int | None, tuple[int, ...], int | None]:
    """The number of a GPU's processes that are not ours, their ids, and the memory they hold.

    If a process computes on the GPU but does not find its own id, the list has the host's ids, as in a container: one
    of those listed is the process itself. If the list is empty although this process is on the GPU, the driver
    withholds it.

    Args:
        listed: id and bytes of each process, as reported by NVML.
        own: the id of this process.
        on_gpu: this process has a CUDA context.
    """
    if listed is None or (on_gpu and not listed):
        return None, (), None
    if on_gpu and own not in [pid for pid, _ in listed]:
        return len(listed) - 1, (), None
    others = [(pid, held) for pid, held in listed if pid != own and not is_ours(pid, os.environ)]
    known = [held for _, held in others if held is not None]
    return len(others), tuple(pid for pid, _ in others), sum(known) if len(known) == len(others) else None


def _handle(nvml: Any, uuid: str) -> Any:
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    for name in dict.fromkeys((uuid, f"GPU-{bare}", f"MIG-{bare}")):
        if (handle := _ask(functools.partial(nvml.nvmlDeviceGetHandleByUUID, name))) is not None:
            return handle
    return None
