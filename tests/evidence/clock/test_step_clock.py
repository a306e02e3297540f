"""The clock's formulas, on a machine whose host and device times are made up."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from fastloop.evidence.clock import step_clock as module
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.clock.step_clock import KEPT_STEPS, LOT, Clock, Window

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Machine:
    """A host that launches, and a device that works the launches off in order. Times in ms; `most_ahead` as a driver's
    queue limits it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_ahead: float = 500.0) -> None:
        self.host, self.device, self.most_ahead = 1000.0, 0.0, most_ahead
        self.synchronisations = self.events = 0
        machine = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                machine.events += 1
                assert enable_timing

            def record(self, _stream: Any) -> None:
                self.reached = max(machine.host, machine.device)

            def query(self) -> bool:
                return self.reached <= machine.host

            def elapsed_time(self, later: Event) -> float:
                assert self.query() and later.query()
                return struct.unpack("f", struct.pack("f", later.reached - self.reached))[0]  # 32 bits, as CUDA's

        monkeypatch.setattr(module, "now", lambda: self.host / 1e3)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)

    def synchronize(self, _device: Any = None) -> None:
        self.synchronisations += 1
        self.host = max(self.host, self.device)

    def launch(self, host_ms: float, device_ms: float) -> None:
        self.host += host_ms
        self.device = max(self.device, self.host) + device_ms
        self.host = max(self.host, self.device - self.most_ahead)


def drive(
    clock: Clock,
    machine: Machine,
    steps: int,
    *,
    loader: float = 0.0,
    launch: float = 0.0,
    device: float = 0.0,
    batches: int = 1,
    samples: int | None = 8,
) -> None:
    for _ in range(steps):
        for batch in range(batches):
            clock.note_batch_requested()
            machine.host += loader
            clock.note_batch_received()
            machine.launch(launch, device)
            clock.issued()
            clock.batch_done(samples, step_ends=batch == batches - 1)


def measured(monkeypatch: pytest.MonkeyPatch, where: torch.device, steps: int = 60, **times: Any) -> Window:
    machine, clock = Machine(monkeypatch), Clock(where, warmup_steps=5, one_time=OneTime())
    drive(clock, machine, steps, **times)
    window = clock.close()
    assert window is not None
    return window


def test_a_batch_that_is_fetched_ahead_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch of a loader without a length begins with two: the second comes when the loop has the first."""
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=2, one_time=OneTime())
    for number in range(60):
        for _ in range(2 if number % 10 == 9 else 1):
            clock.note_batch_requested()
            machine.host += 20
            clock.note_batch_received()
        clock.body()
        machine.launch(2, 0)
        clock.issued()
        clock.batch_done(8, step_ends=True)
    window = clock.close()
    assert window is not None and window.steps == 57
    assert 1e3 * window.parts_s["data_wait"] * window.steps == pytest.approx(57 * 20 + 6 * 20)
    assert window.parts_s["data_wait"] + window.parts_s["host_other"] == pytest.approx(window.wall_s / window.steps)


def per_step(window: Window) -> tuple[float, float]:
    """Step time and data wait, in ms."""
    return 1e3 * window.wall_s / window.steps, 1e3 * window.parts_s["data_wait"]


@pytest.mark.parametrize(
    ("times", "step", "wait"),
    [
        (
            {"device": 40, "loader": 30, "launch": 5},
            40,
            0,
        ),  # the parts add up to 75; the step is 40, a free loader gains 0
        ({"device": 40, "loader": 30}, 40, 0),
        ({"device": 40, "loader": 60}, 60, 20),
        ({"device": 40, "loader": 60, "launch": 5}, 65, 20),  # idle for 25, of which 5 for want of a launch
        ({"device": 40, "loader": 0, "launch": 50}, 50, 0),  # launch-bound: idle, but not for want of data
        ({"device": 0, "loader": 30, "launch": 5}, 35, 30),
        ({"device": 10, "loader": 30, "batches": 4}, 120, 80),  # micro-batches: each waits, the step is all of them
        ({"device": 40, "loader": 30, "batches": 4}, 160, 0),
    ],
)
def test_the_step_and_the_wait_on_a_device(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, Any], step: float, wait: float
) -> None:
    window = measured(monkeypatch, CUDA, **times)
    assert per_step(window) == (pytest.approx(step, abs=1e-3), pytest.approx(wait, abs=1e-3))
    assert window.samples == 8 * window.batches == 8 * times.get("batches", 1) * window.steps
    assert sum(window.step_s) == pytest.approx(window.wall_s)


@pytest.mark.parametrize(
    ("times", "step", "wait"),
    [
        ({"loader": 30, "launch": 40}, 70, 30),  # one clock: what the host waits, nobody computes
        ({"loader": 0, "launch": 40}, 40, 0),
        ({"loader": 30, "launch": 10, "batches": 3}, 120, 90),
    ],
)
def test_the_step_and_the_wait_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, Any], step: float, wait: float
) -> None:
    window = measured(monkeypatch, CPU, **times)
    assert per_step(window) == (pytest.approx(step), pytest.approx(wait))
    assert window.lead_s is None


@pytest.mark.parametrize(
    ("times", "lead"),
    [
        ({"device": 40, "loader": 60}, 0.0),  # starved: the device has nothing left when the batch comes
        ({"device": 40, "loader": 5, "launch": 50}, 35.0),
        ({"device": 1, "loader": 0.5, "launch": 50}, 0.5),  # bound by launches: nearly none
        ({"device": 40, "loader": 1, "launch": 1}, 499.0),  # the device is the limit: as far as the driver allows
    ],
)
def test_the_lead(monkeypatch: pytest.MonkeyPatch, times: dict[str, Any], lead: float) -> None:
    window = measured(monkeypatch, CUDA, steps=100, **times)
    assert window.lead_s is not None and 1e3 * window.lead_s == pytest.approx(lead, rel=0.05, abs=1e-3)


def test_synchronizations_only_around_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), Clock(CUDA, warmup_steps=5, one_time=OneTime())
    drive(clock, machine, 5, device=40)
    assert machine.synchronisations == 0 and machine.events == 0
    drive(clock, machine, 50, device=40)
    assert machine.synchronisations == 1
    clock.close()
    assert machine.synchronisations == 2


@pytest.mark.parametrize(
    ("warmup", "queued", "batches", "opens_after"),
    [
        (0, 0, 1, 0),
        (5, 0, 1, 5),
        (5, 3, 1, 5),
        (5, 24, 1, 24),
        (5, 24, 4, 6),
        (5, 25, 4, 7),
        (20, 16, 2, 20),
    ],
)
def test_warm_up_and_queued_batches_pass_first(
    monkeypatch: pytest.MonkeyPatch, warmup: int, queued: int, batches: int, opens_after: int
) -> None:
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=warmup, queued_batches=queued, one_time=OneTime())
    while not clock.open and clock.total_steps < 100:
        steps = clock.total_steps
        drive(clock, machine, 1, loader=1, launch=1, batches=batches)
    assert steps == opens_after


def test_no_window_without_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=5, one_time=OneTime())
    assert clock.close() is None
    drive(clock, machine, 5, loader=1, launch=1)
    assert not clock.open and clock.close() is None
    clock.note_batch_requested()
    assert clock.open and clock.close() is None  # open, but nothing to say
    assert clock.close() is None


@pytest.mark.parametrize("where", [CPU, CUDA])
def test_a_partial_last_step_counts_in_nothing(monkeypatch: pytest.MonkeyPatch, where: torch.device) -> None:
    def window(partial: bool) -> Window:
        machine, clock = Machine(monkeypatch), Clock(where, warmup_steps=2, one_time=OneTime())
        drive(clock, machine, 20, loader=30, launch=5, device=10, batches=2)
        clock.note_batch_requested()
        machine.host += 30
        clock.note_batch_received()
        if partial:  # the rest of this step never comes, after a long wait for its second batch
            machine.launch(5, 10)
            clock.issued()
            clock.batch_done(8, step_ends=False)
            clock.note_batch_requested()
            machine.host += 5000
            clock.note_batch_received()
        found = clock.close()
        assert found is not None
        return found

    whole, partial = window(False), window(True)
    assert partial == whole
    assert partial.samples == 16 * partial.steps and partial.batches == 2 * partial.steps


def test_a_pause_is_in_the_wall_time_but_no_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=0, one_time=OneTime())
    drive(clock, machine, 10, loader=1, launch=9)
    machine.host += 500  # validation
    drive(clock, machine, 11, loader=1, launch=9)
    window = clock.close()
    assert window is not None and window.steps == 20
    assert window.wall_s == pytest.approx(0.7) and window.parts_s["data_wait"] * window.steps == pytest.approx(0.020)
    assert max(window.step_s) == pytest.approx(0.510)


@pytest.mark.parametrize("where", [CPU, CUDA])
def test_memory_stays_bounded_over_many_steps(monkeypatch: pytest.MonkeyPatch, where: torch.device) -> None:
    machine, clock = Machine(monkeypatch, most_ahead=80), Clock(where, warmup_steps=0, one_time=OneTime())
    drive(clock, machine, 100_000, loader=1, launch=1, device=0 if where is CPU else 4)
    assert len(clock._marks) < 200 and len(clock._spare) < 100 and machine.events < 200
    window = clock.close()
    assert window is not None and window.steps > 99_990
    assert len(window.step_s) == len(window.step_samples) == KEPT_STEPS
    assert window.wall_s == pytest.approx(window.steps * (0.002 if where is CPU else 0.004), rel=1e-6)


def test_the_kept_steps_are_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=0, one_time=OneTime())
    drive(clock, machine, KEPT_STEPS, launch=1)
    drive(clock, machine, KEPT_STEPS + 1, launch=2)
    window = clock.close()
    assert window is not None
    assert min(window.step_s) == pytest.approx(max(window.step_s)) == pytest.approx(0.002)


def test_a_loader_that_ends_or_fails_leaves_the_clock_right(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), Clock(CUDA, warmup_steps=0, one_time=OneTime())
    drive(clock, machine, 10, loader=60, device=40)
    clock.note_batch_requested()
    machine.host += 3  # StopIteration: no batch came of it, and the next epoch's first call follows
    clock.note_batch_received()
    drive(clock, machine, 10, loader=60, device=40)
    window = clock.close()
    assert window is not None
    assert window.samples == 8 * window.batches == 8 * window.steps
    assert sum(window.step_samples) == window.samples


def test_unknown_sample_counts_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, CPU, launch=1, samples=None).samples == 0


# -- passes of the garbage collector ----------------------------------------------------------------------------------

PLACES = ("hooks", "wait", "forward", "between")


def collecting(
    clock: Clock, machine: Machine, where: str, *, every: int = 1, hooks: float = 0.0, device: float = 0.0
) -> None:
    """40 steps of 10 ms of waiting and 20 of forward, with a pass of 100 ms in some of them."""
    for step in range(40):

        def passes(here: str, at: int = step) -> None:
            if here == where and at % every == 0:
                machine.host += 100
                clock.collected_s += 0.1

        machine.host += hooks
        clock.hooks_s += hooks / 1e3
        passes("hooks")
        clock.note_batch_requested()
        passes("wait")
        machine.host += 10
        clock.note_batch_received()
        passes("between")
        clock.enter("forward")
        passes("forward")
        machine.launch(20, device)
        clock.leave()
        clock.issued()
        clock.batch_done(8, step_ends=True)


@pytest.mark.parametrize("hooks", [0.0, 5.0])
@pytest.mark.parametrize("where", PLACES)
def test_a_pass_of_the_garbage_collector_is_the_loops_wherever_it_comes(
    where: str, hooks: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=0, one_time=OneTime())
    collecting(clock, machine, where, hooks=hooks)
    window = clock.close()
    assert window is not None and window.steps == 39 and window.detailed_steps < 30
    assert 1e3 * window.wall_s / window.steps == pytest.approx(130 + hooks), "it is in the step"
    parts = {part: 1e3 * seconds for part, seconds in window.parts_s.items()}
    expected = {"data_wait": 10, "forward": 20, "host_other": 100}
    assert {part: parts[part] for part in expected} == pytest.approx(expected, abs=1e-6)
    assert parts.get("callbacks_logging", 0.0) == pytest.approx(hooks, abs=1e-6)
    assert 1e3 * window.garbage_s == pytest.approx(100) and 1e3 * window.host_s["data_wait"] == pytest.approx(10)


def test_without_a_pass_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=0, one_time=OneTime())
    collecting(clock, machine, "nowhere")
    window = clock.close()
    assert window is not None and window.garbage_s == 0.0 and window.parts_s["host_other"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("device", "lost"), [(0.0, 100.0), (25.0, 100.0), (400.0, 0.0)])
@pytest.mark.parametrize("where", ["wait", "forward"])
def test_a_device_with_work_left_loses_less(
    where: str, device: float, lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25 ms of work are left when the pass comes to the wait, none when it comes to the forward."""
    machine, clock = Machine(monkeypatch), Clock(CUDA, warmup_steps=0, one_time=OneTime())
    collecting(clock, machine, where, device=device)
    window = clock.close()
    assert window is not None
    lost = lost - (device if device == 25 and where == "wait" else 15 if device == 25 else 0)
    assert 1e3 * window.garbage_s == pytest.approx(lost, abs=1e-3)
    total = sum(window.parts_s.values())
    assert total == pytest.approx(window.wall_s / window.steps), "no millisecond has two owners"


def test_validation_keeps_its_own_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=0, one_time=OneTime())
    collecting(clock, machine, "nowhere")
    clock.rest("validation")
    machine.host += 390
    clock.collected_s += 0.39
    clock.rest("host_other")
    collecting(clock, machine, "nowhere")
    window = clock.close()
    assert window is not None and window.garbage_s == 0.0
    assert 1e3 * window.parts_s["validation"] * window.steps == pytest.approx(390)


# -- where no device is to be asked -----------------------------------------------------------------------------------


def test_marks_are_settled_in_lots_and_whenever_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock, watched = (
        Machine(monkeypatch),
        Clock(CPU, warmup_steps=0, one_time=OneTime()),
        Clock(CPU, warmup_steps=0, one_time=OneTime()),
    )
    held = []
    for step in range(200):
        for each in (clock, watched):
            drive(each, machine, 1, loader=3, launch=7)
        assert watched.account.steps == step, "the step in which the window opens is none of it"
        held.append(len(clock._waiting))
    assert LOT <= max(held) <= LOT + 8 and min(held[100:]) < 8
    seldom, always = clock.close(), watched.close()
    assert seldom is not None and always is not None and seldom.steps == always.steps == 199
    assert seldom.parts_s == pytest.approx(always.parts_s) and seldom.wall_s == pytest.approx(always.wall_s)


def test_the_processor_is_asked_where_a_phase_of_the_work_begins_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=0, one_time=OneTime())
    off_s, asked = 0.0, 0

    def reading() -> float:
        nonlocal asked
        asked += 1
        return off_s

    monkeypatch.setattr(module, "read_off_cpu_s", reading)
    for _ in range(7):  # all in detail
        clock.note_batch_requested()
        off_s += 0.5  # waiting for data
        clock.note_batch_received()
        for phase in ("optimizer", "forward"):
            clock.enter(phase)
            machine.launch(5, 0)
            off_s += 0.002
        clock.leave()
        clock.enter("callbacks_logging")
        machine.launch(5, 0)
        off_s += 0.25  # a hook is none of it
        clock.leave()
        machine.launch(5, 0)
        off_s += 0.003
        clock.leave()
        clock.issued()
        clock.batch_done(8, step_ends=True)
    window = clock.close()
    assert window is not None and window.steps == 6 and asked == 7 * 6
    assert window.blocked_s == pytest.approx(0.007) and window.forward_blocked_s == pytest.approx(0.002)
