"""The counters of Hopper and later GPUs through NVML's GPM: how busy the units were, not just that a kernel ran.

They need no root, no profiler session and no CUDA call, and each reading is the exact mean since the previous one.
Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmEnums.html (metrics 20 and 21 are in MiB/s).
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

_GB_PER_MIB = 2**20 / 1e9
_MOST_PCT = 101.0
"""Rounding can exceed 100 slightly; a glitch of the counters is far above."""

METRICS: dict[int, tuple[str, float, float]] = {
    1: ("gr_active_pct", 1.0, _MOST_PCT),
    2: ("sm_active_pct", 1.0, _MOST_PCT),
    5: ("tensor_active_pct", 1.0, _MOST_PCT),
    10: ("dram_active_pct", 1.0, _MOST_PCT),
    20: ("pcie_tx_gb_per_s", _GB_PER_MIB, math.inf),
    21: ("pcie_rx_gb_per_s", _GB_PER_MIB, math.inf),
}
"""NVML's number of a metric: our key, the factor to our unit, and the largest plausible value (in NVML's unit)."""


class Gpm:
    """Two sample buffers of one GPU, used alternately. Not thread-safe."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._buffers: list[Any] = []
        self._primed = False

    @classmethod
    def open(cls, nvml: Any, handle: Any) -> Gpm | None:
        """Open the counters; None if GPU, driver, permissions or this release of nvidia-ml-py do not allow it."""
        gpm = cls(nvml, handle)
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return None
            gpm._buffers = [nvml.nvmlGpmSampleAlloc()]
            gpm._buffers.append(nvml.nvmlGpmSampleAlloc())
            nvml.nvmlGpmSampleGet(handle, gpm._buffers[0])
        except Exception:  # an NVML error, or a missing function
            gpm.close()
            return None
        gpm._primed = True
        return gpm

    def read(self) -> dict[str, float | None]:
        """Means since the last call (or since ``open``), each None if unavailable. Calls less than 0.1 s apart are too
        close for the counters."""
        nothing: dict[str, float | None] = {key: None for key, _, _ in METRICS.values()}
        before, after = self._buffers
        # After a failed reading the next one would cover a longer time than the caller assumes.
        primed, self._primed = self._primed, False
        try:
            self._nvml.nvmlGpmSampleGet(self._handle, after)
            self._buffers, self._primed = [after, before], True
            return self._read_metrics(before, after) if primed else nothing
        except Exception:
            return nothing

    def close(self) -> None:
        while self._buffers:
            with contextlib.suppress(Exception):
                self._nvml.nvmlGpmSampleFree(self._buffers.pop())

    def _read_metrics(self, before: Any, after: Any) -> dict[str, float | None]:
        asked = self._nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = self._nvml.NVML_GPM_METRICS_GET_VERSION, len(METRICS)
        asked.sample1, asked.sample2 = before, after
        for slot, metric in zip(asked.metrics, METRICS, strict=False):
            slot.metricId = metric
        self._nvml.nvmlGpmMetricsGet(asked)
        found: dict[str, float | None] = {}
        for slot, (key, factor, most) in zip(asked.metrics, METRICS.values(), strict=False):
            good = slot.nvmlReturn == 0 and math.isfinite(slot.value) and 0 <= slot.value <= most
            found[key] = slot.value * factor if good else None
        return found
