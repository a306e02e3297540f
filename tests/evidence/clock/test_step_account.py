"""The step, split: every stretch of a made-up machine's time line comes back under its own name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.clock.step_account import Account, Window
from fastloop.evidence.clock.step_clock import Clock
from tests.evidence.clock.test_step_clock import Machine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Step = Callable[[Machine, Clock], None]


def step(
    machine: Machine,
    clock: Clock,
    *,
    loader: float = 0.0,
    h2d: float = 0.0,
    launch: float = 1.0,
    work: tuple[float, float, float] = (10.0, 20.0, 4.0),
    hooks: float = 0.0,
    hook_kernels: float = 0.0,
    batches: int = 1,
) -> None:
    """One step: `work` is the device's in forward, backward and optimizer, each launched in `launch` ms."""
    for batch in range(batches):
        clock.note_batch_requested()
        machine.host += loader
        clock.note_batch_received()
        for phase, device_ms in (("h2d", h2d), ("", 0.0)):
            if phase and device_ms:
                clock.enter(phase)
                machine.launch(0.01, device_ms)
                clock.leave()
        clock.body()
        last = batch == batches - 1
        if last:
            clock.enter("optimizer")
        for phase, device_ms in zip(("forward", "backward"), work, strict=False):
            clock.enter(phase)
            machine.launch(launch, device_ms)
            clock.leave()
        if last:
            machine.launch(launch, work[2])
            clock.leave()
        clock.issued()
        if hooks or hook_kernels:
            clock.enter("callbacks_logging")
            machine.launch(hooks, hook_kernels)
            clock.leave()
        clock.batch_done(8, step_ends=last)


def parts(
    monkeypatch: pytest.MonkeyPatch, where: torch.device, steps: int = 80, extra: Step | None = None, **times: Any
) -> tuple[dict[str, float], Window]:
    """Milliseconds per step by part, with what the parts leave over as `rest`."""
    machine, clock = Machine(monkeypatch, most_ahead=200), Clock(where, warmup_steps=2, one_time=OneTime())
    for number in range(steps):
        step(machine, clock, **times)
        if extra is not None and number % 10 == 9:
            extra(machine, clock)
    window = clock.close()
    assert window is not None
    found = {phase: 1e3 * seconds for phase, seconds in window.parts_s.items()}
    found["rest"] = 1e3 * window.wall_s / window.steps - sum(found.values())
    return found, window


def roughly(**parts_ms: float) -> Any:
    return pytest.approx(parts_ms, abs=0.02)


def named(found: dict[str, float]) -> dict[str, float]:
    return {phase: ms for phase, ms in found.items() if abs(ms) > 0.02}


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({}, {"forward": 10, "backward": 20, "optimizer": 4}),  # device-bound: launching costs nothing
        ({"loader": 30}, {"forward": 10, "backward": 20, "optimizer": 4}),  # a loader that is hidden
        ({"loader": 60}, {"data_wait": 28, "forward": 11, "backward": 20, "optimizer": 4}),
        ({"hooks": 5}, {"forward": 10, "backward": 20, "optimizer": 4}),
        ({"hooks": 50}, {"callbacks_logging": 18, "forward": 11, "backward": 20, "optimizer": 4}),
        ({"hook_kernels": 7}, {"callbacks_logging": 7, "forward": 10, "backward": 20, "optimizer": 4}),  # an EMA, say
        ({"h2d": 6}, {"h2d": 6, "forward": 10, "backward": 20, "optimizer": 4}),
        ({"launch": 30}, {"forward": 36, "backward": 40, "optimizer": 14}),  # the device follows the host
        ({"batches": 4, "loader": 5}, {"forward": 40, "backward": 80, "optimizer": 4}),
    ],
)
def test_the_parts_on_a_device(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, Any], expected: dict[str, float]
) -> None:
    found, _ = parts(monkeypatch, CUDA, **times)
    total = sum(expected.values())
    for phase in set(expected) | set(named(found)):
        tolerance = 1.1 if times.get("loader") == 60 or times.get("hooks") == 50 else 0.3
        assert found.get(phase, 0.0) == pytest.approx(expected.get(phase, 0.0), abs=tolerance), phase
    assert sum(found.values()) == pytest.approx(total, rel=0.06)
    assert abs(found["rest"]) < 0.02 * total


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (
            {"loader": 30, "launch": 10, "hooks": 3},
            {"data_wait": 30, "forward": 10, "backward": 10, "optimizer": 10, "callbacks_logging": 3},
        ),
        ({"launch": 10, "batches": 3}, {"forward": 30, "backward": 30, "optimizer": 10}),
    ],
)
def test_the_parts_on_the_cpu_are_the_hosts(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, Any], expected: dict[str, float]
) -> None:
    found, window = parts(monkeypatch, CPU, work=(0.0, 0.0, 0.0), **times)
    assert named(found) == roughly(**expected)
    assert {phase: 1e3 * s for phase, s in window.host_s.items() if s > 1e-5} == roughly(**expected)


def test_host_times_are_a_second_column(monkeypatch: pytest.MonkeyPatch) -> None:
    _, window = parts(monkeypatch, CUDA, loader=30, launch=2)
    host = {phase: 1e3 * seconds for phase, seconds in window.host_s.items()}
    assert host["data_wait"] == pytest.approx(30, abs=0.1) and window.parts_s["data_wait"] == pytest.approx(0, abs=1e-4)
    assert host["forward"] + host["backward"] == pytest.approx(4, abs=0.1)


def validation(machine: Machine, clock: Clock) -> None:
    clock.rest("validation")
    for _ in range(5):
        machine.launch(1, 20 if clock.on_device else 0)
    clock.rest("host_other")


def checkpoint(machine: Machine, clock: Clock) -> None:
    clock.enter("checkpoint")
    machine.synchronize()
    machine.host += 70
    clock.leave()


def epoch_gap(machine: Machine, clock: Clock) -> None:
    clock.rest("epoch_gap")
    machine.host += 300


@pytest.mark.parametrize("where", [CPU, CUDA])
@pytest.mark.parametrize(
    ("extra", "name", "each"),
    [
        (validation, "validation", {"cuda": 100, "cpu": 5}),
        (checkpoint, "checkpoint", {"cuda": 70, "cpu": 70}),
        (epoch_gap, "epoch_gap", {"cuda": 100, "cpu": 300}),  # the device had work for 200 ms of it
    ],
)
def test_what_comes_now_and_then_is_spread_over_the_steps(
    monkeypatch: pytest.MonkeyPatch, where: torch.device, extra: Step, name: str, each: dict[str, float]
) -> None:
    work = (10.0, 20.0, 4.0) if where is CUDA else (0.0, 0.0, 0.0)
    found, window = parts(monkeypatch, where, steps=101, extra=extra, work=work)
    assert found[name] * window.steps / 10 == pytest.approx(each[where.type], rel=0.08)
    without, _ = parts(monkeypatch, where, steps=101, work=work)
    assert name not in without
    assert abs(found["rest"]) < 0.02 * sum(found.values())


@pytest.mark.parametrize("where", [CPU, CUDA])
def test_a_pause_in_a_step_without_marks_is_in_no_part(monkeypatch: pytest.MonkeyPatch, where: torch.device) -> None:
    machine, clock, paused = Machine(monkeypatch), Clock(where, warmup_steps=2, one_time=OneTime()), 0
    for number in range(120):
        pause = number > 40 and not clock.detailed and not paused
        paused += pause
        step(machine, clock, launch=1003.0 if pause else 3.0, work=(0.0, 0.0, 0.0))
    window = clock.close()
    assert window is not None and paused == 1
    found = {phase: 1e3 * seconds for phase, seconds in window.parts_s.items()}
    assert named(found) == roughly(forward=3, backward=3, optimizer=3)
    rest = 1e3 * window.wall_s / window.steps - sum(found.values())
    assert rest * window.steps == pytest.approx(3000, rel=0.01)


def test_the_first_batch_of_an_epoch_belongs_to_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=0, one_time=OneTime())
    for _ in range(5):
        for _ in range(4):
            step(machine, clock, loader=1)
        clock.rest("epoch_gap")
        machine.host += 10
        clock.note_batch_requested()
        machine.host += 40  # workers start
        clock.note_batch_received()
        machine.launch(3, 0)
        clock.issued()
        clock.batch_done(8, step_ends=True)
    window = clock.close()
    assert window is not None
    assert 1e3 * window.parts_s["epoch_gap"] * window.steps == pytest.approx(5 * 50, rel=0.01)
    assert 1e3 * window.parts_s["data_wait"] * window.steps == pytest.approx(19, abs=1.1)


def test_a_step_that_fetches_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """``training_step(dataloader_iter)``: the loader is called inside the forward."""
    machine, clock = Machine(monkeypatch), Clock(CPU, warmup_steps=0, one_time=OneTime())
    for _ in range(40):
        clock.body()
        clock.enter("forward")
        clock.note_batch_requested()
        machine.host += 12
        clock.note_batch_received()
        machine.host += 5
        clock.leave()
        clock.issued()
        clock.batch_done(8, step_ends=True)
    window = clock.close()
    assert window is not None
    assert {phase: round(1e3 * s, 6) for phase, s in window.parts_s.items() if s} == {"data_wait": 12, "forward": 5}


def test_an_event_a_batch_and_the_phases_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch, most_ahead=80), Clock(CUDA, warmup_steps=0, one_time=OneTime())
    recorded, kinds = [0], []
    record = type(clock)._record_event

    def counted(self: Clock) -> Any:
        recorded[0] += 1
        return record(self)

    monkeypatch.setattr(Clock, "_record_event", counted)
    for _ in range(2000):
        before = recorded[0]
        step(machine, clock)
        kinds.append(recorded[0] - before)
    assert min(kinds[20:]) == 1 and min(set(kinds[20:]) - {1}) >= 9, "either the one event, or those of all phases"
    share = sum(kind > 1 for kind in kinds[20:]) / len(kinds[20:])
    assert 0.02 < share < 0.05
    places = [number for number, kind in enumerate(kinds) if kind > 1][12:]
    gaps = [later - place for place, later in itertools.pairwise(places)]
    assert len(set(gaps)) > 5, "drawn, so that nothing periodic in a training is always or never seen"


def test_drawing_the_steps_in_detail_uses_nobodys_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    states = (random.getstate(), torch.random.get_rng_state())
    parts(monkeypatch, CPU)
    assert random.getstate() == states[0] and torch.equal(torch.random.get_rng_state(), states[1])


@pytest.mark.parametrize("rate", [1 - 3e-4, 1 + 3e-4])
def test_two_clocks_that_do_not_agree(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """A device clock off by 300 ppm, ten times worse than real ones, must not turn into waiting for data."""
    machine = Machine(monkeypatch)
    event: Any = torch.cuda.Event
    elapsed = event.elapsed_time
    monkeypatch.setattr(event, "elapsed_time", lambda self, later: elapsed(self, later) * rate)
    clock = Clock(CUDA, warmup_steps=2, one_time=OneTime())
    for _ in range(3000):
        step(machine, clock, loader=60)
    window = clock.close()
    assert window is not None
    assert 1e3 * window.parts_s["data_wait"] == pytest.approx(28.0, abs=0.6)
    assert window.lead_s == pytest.approx(0.0, abs=2e-3)


def test_no_window_without_a_whole_step_and_no_parts_without_detail() -> None:
    account = Account()
    assert account.window(on_device=True) is None
    account.step_ends(1.0, 1, 8, False)
    assert account.window(on_device=True) is None
    account.stretch("data_wait", False, False, 0.2, 0.2, 0.2)
    account.stretch("forward", True, False, 0.8, 0.0, 0.1)
    account.step_ends(2.0, 1, 8, False)
    window = account.window(on_device=True)
    assert window is not None and window.parts_s == {"data_wait": 0.2} and window.blocked_s is None


@pytest.mark.parametrize("where", [CPU, CUDA])
def test_hooks_without_marks_are_told_from_the_loop_by_the_hosts_time(
    monkeypatch: pytest.MonkeyPatch, where: torch.device
) -> None:
    """Every fifth step a hook takes 40 ms; steps in detail come at random, so some of these are and some are not."""
    machine, clock = Machine(monkeypatch), Clock(where, warmup_steps=0, one_time=OneTime())
    for number in range(1001):
        clock.note_batch_requested()
        machine.host += 2
        clock.note_batch_received()
        machine.launch(5, 0)
        clock.issued()
        hook_ms = 40 if number % 5 == 0 else 0
        if clock.detailed:
            clock.enter("callbacks_logging")
            machine.host += hook_ms
            clock.leave()
        else:
            machine.host += hook_ms
            clock.hooks_s += hook_ms / 1e3
        machine.host += 1
        clock.batch_done(8, step_ends=True)
    window = clock.close()
    assert window is not None and window.steps == 1000
    found = {phase: 1e3 * seconds for phase, seconds in window.parts_s.items()}
    assert found["callbacks_logging"] == pytest.approx(8.0, rel=0.01)
    assert found["data_wait"] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("detail_s", [0.1, 0.2])
def test_a_window_says_how_long_work_is_against_that_of_steps_in_detail(detail_s: float) -> None:
    account = Account()
    account.step_ends(0.0, 1, 4, False)
    for step, detailed in enumerate((True, False, False, False), start=1):
        account.stretch("forward", True, detailed, 0.1, 0.0, detail_s if detailed else 0.1)
        account.step_ends(0.1 * step, 1, 4, detailed)
    window = account.window(on_device=False)
    assert window is not None and window.of_detailed == pytest.approx((detail_s + 0.3) / 4 / detail_s)
