"""The board's watcher: what it sees, that it ends, and that nothing gets out of it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from fastloop.evidence.gpu import sampler as module
from fastloop.evidence.gpu import series
from fastloop.evidence.gpu.sampler import Board, BoardSeen
from fastloop.evidence.gpu.series import MOST_ROWS
from fastloop.records.measurement import GPU_READINGS
from tests.commands.command_line import wait_for
from tests.evidence.gpu.fake_nvml import GIB, UUID, FakeNvml, NVMLError

OTHER = 4_000_001
THREAD = "fastloop-board"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A GPU that this process computes on alone, and a watcher whose seconds are fiftieths."""
    fake = FakeNvml()
    fake.processes = [(os.getpid(), GIB)]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(module, "PERIOD_S", 0.02)
    monkeypatch.setattr(module, "SHORTEST_ROW_S", 0.002)
    monkeypatch.setattr(series, "LEAST_S", 0.2)
    numbers = module.Gpu.numbers
    rows.clear()
    monkeypatch.setattr(module.Gpu, "numbers", lambda gpu: (rows.append(1), numbers(gpu))[1])
    return fake


rows: list[int] = []
"""As many as were read."""


def watched(seconds: float = 0.3, meanwhile: Callable[[], None] = lambda: None, uuid: str | None = UUID) -> Board:
    """A watcher that has read the rows of this time, however long they took."""
    board = Board(uuid)
    board.start()
    wait_for_rows(seconds / 2)
    meanwhile()
    wait_for_rows(seconds / 2)
    return board


def wait_for_rows(seconds: float) -> None:
    wanted = len(rows) + int(seconds / module.PERIOD_S)
    wait_for(lambda: len(rows) >= wanted or not threads())


def seen(seconds: float = 0.3, meanwhile: Callable[[], None] = lambda: None) -> BoardSeen:
    board = watched(seconds, meanwhile)
    found = board.stop()
    assert found is not None, board.why
    return found


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def test_everything_there_is(nvml: FakeNvml) -> None:
    found = seen()
    assert tuple(found.means) == GPU_READINGS
    assert found.means["throttle"] == []
    assert {key: value for key, value in found.means.items() if key != "throttle"} == pytest.approx(
        {
            "nvml_busy_pct": 97.0,
            "sm_active_pct": 88.0,
            "tensor_active_pct": 61.0,
            "dram_active_pct": 40.0,
            "watts": 400.0,
            "gr_active_pct": 95.0,
            "pcie_rx_gb_per_s": 2.0972,
            "pcie_tx_gb_per_s": 1.0486,
            "sm_clock_mhz": 1500.0,
            "sm_clock_max_mhz": 1980.0,
        }
    )
    assert found.seconds > 0.1 and found.state == ()
    assert len(found.timeline) > 3 and found.timeline[-1]["t_s"] == pytest.approx(found.seconds, abs=0.01)
    assert set(found.timeline[0]) == {"t_s", *GPU_READINGS} - {"sm_clock_max_mhz", "throttle"}


def test_the_thread_is_a_daemon_it_ends_and_leaves_nvml_as_it_was(nvml: FakeNvml) -> None:
    board = watched(0.1)
    (thread,) = threads()
    begun = time.monotonic()
    assert board.stop() is not None
    assert time.monotonic() - begun < module.STOP_LIMIT_S
    assert thread.daemon and threads() == [] and nvml.users == 0 and nvml.samples == 0
    assert nvml.threads == {THREAD}, "the training's own thread called NVML"


def test_starting_is_not_waited_for(nvml: FakeNvml) -> None:
    started = threading.Event()
    heard: list[bool] = []
    nvml.before_call = lambda name: heard.append(started.wait(20)) if name == "nvmlInit" else None
    board = Board(UUID)
    board.start()
    started.set()
    wait_for(lambda: heard)
    assert heard == [True]
    assert board.stop() is not None


def test_stop_is_heard_between_readings(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 60.0)
    board = Board(UUID)
    board.start()
    wait_for(lambda: nvml.calls.get("nvmlDeviceGetTotalEnergyConsumption"))
    time.sleep(0.05)
    begun = time.monotonic()
    found = board.stop()
    assert time.monotonic() - begun < 25
    assert found is not None and len(found.timeline) == 1
    assert found.means["sm_active_pct"] == 88.0
    assert found.means["watts"] is None and found.means["nvml_busy_pct"] is None, "they look back past the start"


def test_energy_is_the_counters(nvml: FakeNvml) -> None:
    board = Board(UUID)
    board.start()
    wait_for_rows(0.6)
    found = board.stop()
    assert found is not None and found.joule is not None
    truth = nvml.watts * found.seconds
    assert found.joule == pytest.approx(truth, rel=0.3)


def test_what_comes_after_the_last_step_does_not_count(nvml: FakeNvml) -> None:
    """A gpt2 compiled anew after its last step, until it was stopped: its GPU seemed to have idled 43 % of the time."""
    for notes in (True, False):
        board = Board(UUID)
        board.start()
        wait_for_rows(0.3)
        if notes:
            board.note_step()
        wait_for_rows(0.1)
        nvml.busy, before = 0, len(rows)
        wait_for_rows(0.3)
        assert len(rows) > before
        seen = board.stop()
        assert seen is not None
        busy = seen.means["nvml_busy_pct"]
        assert (busy == 97) if notes else (0 < busy < 97), "the control"
        nvml.busy = 97


def test_no_energy_below_the_shortest_window(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(0.4).joule is not None
    monkeypatch.setattr(series, "LEAST_S", 10.0)
    found = seen(0.4)
    assert found.joule is None and found.means["watts"] == 400.0


def test_a_counter_that_begins_anew_gives_no_energy(nvml: FakeNvml) -> None:
    found = seen(0.5, lambda: setattr(nvml, "began", time.perf_counter()))
    assert found.joule is None and found.means["sm_active_pct"] == 88.0


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("nvmlDeviceGetUtilizationRates", {"nvml_busy_pct"}),
        ("nvmlDeviceGetPowerUsage", {"watts"}),
        ("nvmlDeviceGetMaxClockInfo", {"sm_clock_max_mhz"}),
        ("nvmlDeviceGetTotalEnergyConsumption", set()),
        ("nvmlDeviceGetComputeRunningProcesses", set()),
        ("nvmlGpmQueryDeviceSupport", {key for key in GPU_READINGS if "active" in key or "pcie" in key}),
        ("nvmlGpmSampleGet", {key for key in GPU_READINGS if "active" in key or "pcie" in key}),
    ],
)
@pytest.mark.parametrize("how", ["refuse", "lack"])
def test_a_failing_question_costs_its_own_answer(nvml: FakeNvml, name: str, gone: set[str], how: str) -> None:
    getattr(nvml, how)(name)
    found = seen(0.4)
    assert {key for key, value in found.means.items() if value is None} == gone
    assert (found.joule is None) == (name == "nvmlDeviceGetTotalEnergyConsumption")


def test_a_question_that_fails_half_way(nvml: FakeNvml) -> None:
    found = seen(0.3, lambda: nvml.refuse("nvmlDeviceGetPowerUsage", "nvmlGpmSampleGet"))
    assert found.means["watts"] == 400.0 and found.means["sm_active_pct"] == 88.0
    assert found.timeline[0]["watts"] == 400.0 and found.timeline[-1]["watts"] is None


def test_old_gpus_have_no_counters(nvml: FakeNvml) -> None:
    nvml.gpm_support = 0
    found = seen()
    assert found.means["sm_active_pct"] is None and found.means["nvml_busy_pct"] == 97.0


def test_under_mig_nothing_of_the_board_is_given(nvml: FakeNvml) -> None:
    nvml.mig = 1
    board = Board(UUID)
    board.start()
    wait_for(lambda: nvml.calls.get("nvmlDeviceGetMigMode"))
    time.sleep(0.3)
    found = board.stop()
    assert found is not None and set(found.means.values()) == {None} and found.timeline == () and found.joule is None
    assert "MIG" in found.state[0] and found.seconds > 0
    assert threads() == [] and nvml.users == 0


@pytest.mark.parametrize("when", ["before", "later"])
def test_others_on_the_gpu_are_named_and_cost_the_energy(nvml: FakeNvml, when: str) -> None:
    crowd = [*nvml.processes, (OTHER, 12 * GIB), (OTHER + 1, 2 * GIB)]
    if when == "before":
        nvml.processes = crowd
    found = seen(0.4, lambda: setattr(nvml, "processes", crowd))
    (sentence,) = found.state
    assert found.joule is None and found.means["watts"] == 400.0
    assert sentence.startswith("2 other processes") and f"pids {OTHER}, {OTHER + 1}" in sentence
    assert "holding 14.0 GiB; 30.0 of 80.0 GiB free" in sentence


def test_one_who_left_before_the_end_is_not_forgotten(nvml: FakeNvml) -> None:
    alone = list(nvml.processes)
    nvml.processes = [*alone, (OTHER, GIB)]
    found = seen(0.4, lambda: setattr(nvml, "processes", alone))
    assert found.joule is None and found.state[0].startswith("another process")


def test_a_withheld_list_is_said_beside_the_energy(nvml: FakeNvml) -> None:
    nvml.processes = []
    found = seen(0.4)
    assert found.joule is not None and "cannot be listed" in found.state[0]


def test_throttling_is_named_with_its_share(nvml: FakeNvml) -> None:
    found = seen(0.4, lambda: setattr(nvml, "reasons", 0x4 | 0x1))
    assert found.means["throttle"] == ["sw_power_cap"]
    (sentence,) = found.state
    assert "sw_power_cap" in sentence and "1,500 of 1,980 MHz" in sentence
    share = int(sentence.partition("sw_power_cap ")[2].partition(" %")[0])
    assert 0 < share < 100


def test_no_throttle_reading_is_not_no_throttling(nvml: FakeNvml) -> None:
    nvml.refuse("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    assert seen().means["throttle"] is None


@pytest.mark.parametrize("trouble", ["no uuid", "no package", "no driver", "no such gpu", "no thread"])
def test_without_a_gpu_to_read_there_is_a_reason(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    if trouble == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    if trouble == "no driver":
        nvml.refuse("nvmlInit")
    if trouble == "no thread":
        monkeypatch.setattr(module._Sampler, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start")))
    board = watched(0.05, uuid={"no uuid": None, "no such gpu": "GPU-x"}.get(trouble, UUID))
    assert board.stop() is None
    expected = {
        "no uuid": "UUID",
        "no package": "imported",
        "no driver": "does not start",
        "no such gpu": "GPU-x",
        "no thread": "can't start",
    }
    assert board.why is not None and expected[trouble] in board.why
    assert threads() == []


def test_whatever_breaks_stays_inside(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    monkeypatch.setattr(module.Gpu, "numbers", lambda _: 1 / 0)
    board = watched(0.1)
    assert board.stop() is None
    assert board.why is not None and "ZeroDivisionError" in board.why
    assert failures == [] and threads() == [] and nvml.users == 0


def test_a_driver_that_hangs_is_left_behind(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_LIMIT_S", 0.2)
    release, stuck = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        if name == "nvmlDeviceGetPowerUsage":
            stuck.set()
            release.wait(20)

    nvml.before_call = hang
    board = Board(UUID)
    board.start()
    assert stuck.wait(50)
    begun = time.monotonic()
    assert board.stop() is None
    assert time.monotonic() - begun < 15 and board.why == "NVML did not answer within 0.2 s"
    (thread,) = threads()
    release.set()
    thread.join(50)
    assert not thread.is_alive() and nvml.users == 0, "it ends by itself once NVML answers"


def test_start_twice_watches_once_and_stop_twice_gives_once(nvml: FakeNvml) -> None:
    board = watched(0.1)
    board.start()
    assert len(threads()) == 1
    assert board.stop() is not None and board.stop() is None
    board.start()
    wait_for_rows(0.1)
    again = board.stop()
    assert again is not None and again.means["sm_active_pct"] == 88.0 and board.why is None


def test_stop_without_start() -> None:
    board = Board(UUID)
    assert board.stop() is None and board.why == "it was not started"


def test_rows_stay_bounded(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastloop.evidence.gpu.series.MOST_ROWS", 10)
    found = seen(0.8)
    assert 2 < len(found.timeline) <= 10 < MOST_ROWS
    assert nvml.calls["nvmlDeviceGetPowerUsage"] > 12, "the control: more was read than is kept"


def test_a_forked_child_has_neither_thread_nor_window_and_finds_nvml_unlocked(nvml: FakeNvml) -> None:
    library = threading.Lock()

    def locked(name: str) -> None:
        with library:
            time.sleep(0.004)

    nvml.before_call = locked
    board = watched(0.1)
    codes = []
    for _ in range(5):
        child = os.fork()
        if child == 0:
            free = library.acquire(timeout=20)
            begun = time.monotonic()
            quiet = board.stop() is None and time.monotonic() - begun < 10
            os._exit(0 if free and quiet and not threads() else 3)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert codes == [0] * 5
    assert board.stop() is not None, "the parent's window is untouched"


def test_the_fake_can_refuse(nvml: FakeNvml) -> None:
    nvml.refuse("nvmlDeviceGetPowerUsage")
    with pytest.raises(NVMLError):
        nvml.nvmlDeviceGetPowerUsage("handle")
