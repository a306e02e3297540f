"""A GPU through NVML: which one, what it says, who else is on it."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from fastloop.evidence.gpu import nvml as module
from fastloop.evidence.gpu.nvml import Gpu, Unreadable, count_foreign, find_uuid, read_driver
from tests.evidence.gpu.fake_nvml import GIB, UUID, FakeNvml

BARE = UUID.removeprefix("GPU-")
OTHER = 4_000_001
"""Above any number a process here can have."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def on_gpu(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: there)


@pytest.mark.parametrize("uuid", [UUID, BARE], ids=["GPU-", "bare"])
def test_found_by_uuid_or_index(nvml: FakeNvml, uuid: str) -> None:
    gpu = Gpu.open(uuid)
    assert gpu.numbers() == {"nvml_busy_pct": 97.0, "watts": 400.0, "sm_clock_mhz": 1500.0}
    assert gpu.sm_clock_max_mhz() == 1980 and not gpu.mig
    gpu.close()
    assert nvml.users == 0


def test_the_visible_devices_play_no_part(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.known = {"GPU-another": "another", UUID: "handle"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpu = Gpu.open(UUID)
    assert gpu._handle == "handle"
    gpu.close()


def test_no_reading_without_uuid_package_driver_or_gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unreadable, match="UUID"):
        Gpu.open(None)
    with pytest.raises(Unreadable, match="no GPU GPU-x"):
        Gpu.open("GPU-x")
    assert nvml.users == 0, "NVML was left open"
    nvml.refuse("nvmlInit")
    with pytest.raises(Unreadable, match="does not start"):
        Gpu.open(UUID)
    assert read_driver() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(Unreadable, match="cannot be imported"):
        Gpu.open(UUID)
    assert read_driver() is None


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("nvmlDeviceGetUtilizationRates", "nvml_busy_pct"),
        ("nvmlDeviceGetPowerUsage", "watts"),
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz"),
    ],
)
def test_what_is_refused_is_none_and_the_rest_stays(nvml: FakeNvml, name: str, key: str) -> None:
    nvml.refuse(name)
    numbers = Gpu.open(UUID).numbers()
    assert {each for each, value in numbers.items() if value is None} == {key}
    nvml.lack(name)
    assert Gpu.open(UUID).numbers() == numbers


def test_only_limits_are_throttling(nvml: FakeNvml) -> None:
    gpu = Gpu.open(UUID)
    assert gpu.throttle() == (), "idle and application clocks are no limit"
    nvml.reasons = 0x1FF
    assert gpu.throttle() == ("sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
    nvml.lack("nvmlDeviceGetCurrentClocksEventReasons")
    assert gpu.throttle() == ("sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
    nvml.refuse("nvmlDeviceGetCurrentClocksThrottleReasons")
    assert gpu.throttle() is None


@pytest.mark.parametrize("kind", ["partitioned board", "slice"])
def test_under_mig_there_is_no_energy_and_no_counter(nvml: FakeNvml, kind: str) -> None:
    nvml.known, nvml.mig = ({UUID: "handle"}, 1) if kind != "slice" else ({f"MIG-{BARE}": "slice"}, 0)
    gpu = Gpu.open(UUID)
    assert gpu.mig and gpu.energy_mj() is None and not gpu.open_counters()
    assert nvml.samples == 0
    nvml.known, nvml.mig = {UUID: "handle"}, 0
    control = Gpu.open(UUID)
    assert not control.mig and control.energy_mj() is not None and control.open_counters()
    control.close()
    assert nvml.samples == 0


def test_others_are_told_from_this_run(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, True)
    nvml.processes = [(os.getpid(), 5 * GIB), (OTHER, 7 * GIB), (OTHER + 1, 1 * GIB)]
    with closing(Gpu.open(UUID)) as gpu:
        found = gpu.find_neighbors()
    assert (found.processes, found.pids, found.held_bytes) == (2, (OTHER, OTHER + 1), 8 * GIB)
    assert (found.memory_free_bytes, found.memory_total_bytes) == (30 * GIB, 80 * GIB)
    nvml.processes = [(os.getpid(), 5 * GIB)]
    with closing(Gpu.open(UUID)) as gpu:
        alone = gpu.find_neighbors()
    assert (alone.processes, alone.pids, alone.held_bytes) == (0, (), 0)
    assert nvml.users == 0


def test_in_a_container_one_of_the_host_numbers_is_ours() -> None:
    own = os.getpid()
    assert count_foreign([(OTHER, 5)], own, True) == (0, (), None)
    assert count_foreign([(OTHER, 5), (OTHER + 1, 5)], own, True) == (1, (), None)
    assert count_foreign([(OTHER, 5)], own, False) == (1, (OTHER,), 5), "not on the GPU yet: it is somebody else"


def test_a_list_that_is_withheld_counts_nobody() -> None:
    assert count_foreign([], os.getpid(), True) == (None, (), None)
    assert count_foreign(None, os.getpid(), True) == (None, (), None)
    assert count_foreign([], os.getpid(), False) == (0, (), 0)


def test_ranks_of_this_run_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_ours", lambda pid, _: pid == OTHER)
    assert count_foreign([(os.getpid(), 1), (OTHER, 1), (OTHER + 1, None)], os.getpid(), True) == (
        1,
        (OTHER + 1,),
        None,
    )


def test_uuid_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_uuid(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=BARE))
    assert find_uuid(torch.device("cuda", 0)) == UUID
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    assert find_uuid(torch.device("cuda", 0)) is None


def test_driver_version(nvml: FakeNvml) -> None:
    assert read_driver() == "580.65" and nvml.users == 0


def test_the_real_package_has_the_functions_that_are_faked() -> None:
    real = pytest.importorskip("pynvml")
    faked = [name for name in vars(FakeNvml()) if name.startswith("nvml")]
    assert len(faked) > 15 and [name for name in faked if not hasattr(real, name)] == []
