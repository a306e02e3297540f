"""A pynvml with one GPU, whose every answer a test may set, refuse or take away."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

UUID = "GPU-11111111-2222-3333-4444-555555555555"
GIB = 2**30


class NVMLError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """Stands in for the module. Settings are attributes; what was done to it is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.NVMLError = NVMLError
        self.NVML_GPM_METRICS_GET_VERSION = 1
        self.known = {UUID: "handle"}
        self.busy, self.watts, self.clock = 97, 400.0, 1500
        self.reasons = 0x1 | 0x2
        self.processes: list[Any] = []
        self.mig = 0
        self.gpm_support = 1
        self.gpm = {1: 95.0, 2: 88.0, 5: 61.0, 10: 40.0, 20: 1000.0, 21: 2000.0}
        self.gpm_return = dict.fromkeys(self.gpm, 0)
        self.energy_period_s = 0.02
        self.began = time.perf_counter()
        self.users = self.samples = 0
        self.threads: set[str] = set()
        self.calls: dict[str, int] = {}
        self.before_call: Callable[[str], None] = lambda name: None
        for name in dir(type(self)):
            if name.startswith("_nvml"):
                setattr(self, name[1:], self._watched(name[1:], getattr(self, name)))

    def refuse(self, *names: str) -> None:
        for name in names:
            setattr(self, name, self._watched(name, self._refused))

    def lack(self, *names: str) -> None:
        for name in names:
            delattr(self, name)

    def joule(self) -> float:
        """What the counter would say without steps."""
        return self.watts * (time.perf_counter() - self.began)

    def _watched(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self.threads.add(threading.current_thread().name)
            self.calls[name] = self.calls.get(name, 0) + 1
            self.before_call(name)
            return answer(*arguments)

        return ask

    def _refused(self, *_: Any) -> Any:
        raise NVMLError("Insufficient Permissions")

    def _nvmlInit(self) -> None:
        self.users += 1

    def _nvmlShutdown(self) -> None:
        self.users -= 1

    def _nvmlSystemGetDriverVersion(self) -> str:
        return "580.65"

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.known:
            raise NVMLError("Not Found")
        return self.known[uuid]

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self.known.values())[index]

    def _nvmlDeviceIsMigDeviceHandle(self, handle: str) -> int:
        return int(handle == "slice")

    def _nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [self.mig, self.mig]

    def _nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=self.busy, memory=1)

    def _nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return int(self.watts * 1e3)

    def _nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: self.clock}[kind]

    def _nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return {1: 1980}[kind]

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        seconds = math.floor((time.perf_counter() - self.began) / self.energy_period_s) * self.energy_period_s
        return int(self.watts * seconds * 1e3)

    def _nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=80 * GIB, free=30 * GIB, used=50 * GIB)

    def _nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.processes]

    def _nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=self.gpm_support)

    def _nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return SimpleNamespace(at=None)

    def _nvmlGpmSampleFree(self, sample: Any) -> None:
        self.samples -= 1

    def _nvmlGpmSampleGet(self, handle: str, sample: Any) -> Any:
        sample.at = time.perf_counter()
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        slots = [SimpleNamespace(metricId=0, nvmlReturn=999, value=math.nan) for _ in range(98)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=slots)

    def _nvmlGpmMetricsGet(self, asked: Any) -> Any:
        if not (asked.version == 1 and asked.sample1.at is not None and asked.sample1.at <= asked.sample2.at):
            raise NVMLError("Invalid Argument")
        for slot in asked.metrics[: asked.numMetrics]:
            slot.nvmlReturn, slot.value = self.gpm_return[slot.metricId], self.gpm[slot.metricId]
        return asked
