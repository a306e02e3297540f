"""The ledger of one-time costs, and a clock that takes them out of its steps, on a made-up machine."""

from __future__ import annotations

import pytest
import torch

from fastloop.evidence.clock import one_time
from fastloop.evidence.clock.one_time import OneTime, Reader
from fastloop.evidence.clock.step_clock import LOT, Clock, Window
from tests.evidence.clock.test_step_clock import Machine, drive

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STEP_MS, LATE_MS, COST_MS = 50.0, 7.0, 10_000.0
"""A step of a batch that is waited for (10 ms) and computed (40 ms); a cost that begins so late in the computing."""


def test_causes_add_up_and_what_lies_inside_another_is_not_counted_twice() -> None:
    ledger = OneTime()
    ledger.add_span("compile", 12.0, 18.0)  # known before the rehearsal that it was a part of
    ledger.add_span("autotune", 15.0, 17.0)
    ledger.add_span("rehearsal", 10.0, 20.0)
    ledger.add_span("compile", 30.0, 31.5)
    assert ledger.sum_by_cause() == {"rehearsal": 4.0, "compile": 5.5, "autotune": 2.0}
    assert ledger.spent_s == 11.5
    assert OneTime().sum_by_cause() == {} and OneTime().spent_s == 0


def test_a_span_counts_also_where_its_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5.0, 7.5])
    monkeypatch.setattr(one_time, "now", lambda: next(times))
    ledger = OneTime()
    with pytest.raises(ZeroDivisionError), ledger.span("rehearsal"):
        _ = 1 / 0
    assert ledger.sum_by_cause() == {"rehearsal": 2.5}


def test_a_cost_that_counts_itself_lies_before_the_batch_it_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    spent, at = [0.5, 0.0], [10.0]
    monkeypatch.setattr(one_time, "now", lambda: at[0])
    ledger = OneTime()
    ledger.follow("cache_fill", lambda: (spent[0], spent[1]))
    ledger.note()
    assert ledger.spans == [] and ledger.sum_by_cause() == {"cache_fill": 0.0}, "nothing since it is followed"
    spent[:], at[0] = (2.5, 4.0), 20.0  # two seconds in the loop's way, four beside it
    ledger.note()
    ledger.note()
    assert ledger.spans == [("cache_fill", 18.0, 20.0)] and ledger.sum_by_cause() == {"cache_fill": 6.0}
    assert ledger.spent_s == 2.0, "what is beside the loop lies in no span"


def test_a_clock_takes_each_moment_once() -> None:
    ledger = OneTime()
    ledger.add_span("compile", 0.0, 4.0)
    reader = Reader(ledger)
    reader.skip()
    assert reader.take(0.0, 5.0) == (0.0, 0.0), "what was over before the clock began"
    ledger.add_span("compile", 12.0, 18.0)
    ledger.add_span("rehearsal", 10.0, 20.0)
    assert reader.take(5.0, 11.0) == (1.0, 0.0), "our own trials do not recur"
    ledger.add_span("compile", 19.0, 19.5)
    assert reader.take(11.0, 15.0) == (4.0, 3.0)
    assert reader.take(15.0, 30.0) == (5.0, 3.5)
    assert reader.take(30.0, 40.0) == (0.0, 0.0) and not reader._pending


def run(monkeypatch: pytest.MonkeyPatch, where: torch.device, place: str, *, tells: bool = True) -> Window:
    """Sixty steps, with a cost in one of the window."""
    machine, ledger = Machine(monkeypatch), OneTime()
    clock = Clock(where, warmup_steps=5, one_time=ledger)

    def cost() -> None:
        if tells:
            ledger.add_span("compile", machine.host / 1e3, (machine.host + COST_MS) / 1e3)
        machine.host += COST_MS

    for step in range(60):
        now = place if step == 30 else ""
        clock.note_batch_requested()
        machine.host += 10
        if now == "data_wait":
            cost()
        clock.note_batch_received()
        clock.body()
        clock.enter("forward")
        if now == "forward":
            machine.launch(LATE_MS, 0.0)
            cost()
        machine.launch(40 - LATE_MS * (now == "forward"), 0.0 if where is CPU else 20.0)
        clock.leave()
        clock.issued()
        clock.batch_done(8, step_ends=True)
        if step % 10 == 0:
            clock.rest("validation")
            machine.launch(100.0, 0.0)
            if now == "validation":
                cost()
            clock.rest("host_other")
        if now == "between":
            cost()
    window = clock.close()
    assert window is not None and window.steps == 54
    return window


@pytest.mark.parametrize("place", ["forward", "validation", "between", "data_wait"])
@pytest.mark.parametrize("where", [CPU, CUDA])
def test_a_cost_that_comes_once_is_in_no_part_of_a_step(
    monkeypatch: pytest.MonkeyPatch, where: torch.device, place: str
) -> None:
    plain, window = run(monkeypatch, where, ""), run(monkeypatch, where, place)
    assert sum(plain.once_s) == 0 and window.steps_with_once == 1
    lead_ms = 20.0 if where is CUDA else 0.0  # the device had at most so much work left meanwhile
    assert window.once_total_s == sum(window.once_s) == pytest.approx(COST_MS / 1e3, abs=lead_ms / 1e3 + 1e-6)
    assert window.wall_s == pytest.approx(plain.wall_s, abs=2 * lead_ms / 1e3 + 1e-3)
    assert sum(window.step_s) == pytest.approx(window.wall_s)
    assert sum(window.parts_s.values()) == pytest.approx(window.wall_s / window.steps, rel=0.02)
    for part, seconds in plain.parts_s.items():
        assert window.parts_s[part] == pytest.approx(seconds, abs=1e-3), part
    if where is CPU:
        assert window.host_s == pytest.approx(plain.host_s, abs=1e-3)
    control = run(monkeypatch, where, place, tells=False)
    assert control.wall_s > plain.wall_s + 0.9 * COST_MS / 1e3, "or there was nothing to take out"


def test_costs_that_come_again_and_again_go_back_into_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    window, gross = run(monkeypatch, CPU, "forward"), run(monkeypatch, CPU, "forward", tells=False)
    back = window.put_back()
    assert back.wall_s == pytest.approx(gross.wall_s) and sum(back.step_s) == pytest.approx(gross.wall_s)
    assert back.parts_s["host_other"] - window.parts_s["host_other"] == pytest.approx(COST_MS / 1e3 / 54)
    assert sum(back.parts_s.values()) == pytest.approx(back.wall_s / back.steps, rel=0.02)
    assert back.steps_with_once == 0 and window.steps_with_once == 1


def test_time_off_the_processor_in_a_cost_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compile waits for its own processes; that was read as a host asleep in the forward."""
    off = {"s": 0.0}
    monkeypatch.setattr("fastloop.evidence.clock.step_clock.read_off_cpu_s", lambda: off["s"])
    machine, ledger = Machine(monkeypatch), OneTime()
    clock = Clock(CPU, warmup_steps=1, one_time=ledger)
    for step in range(30):
        clock.note_batch_requested()
        clock.note_batch_received()
        clock.body()
        clock.enter("forward")
        if step == 5:  # in detail
            ledger.add_span("compile", machine.host / 1e3, (machine.host + COST_MS) / 1e3)
            machine.host += COST_MS
            off["s"] += COST_MS / 1e3
        machine.host += 10
        off["s"] += 0.004
        clock.leave()
        clock.issued()
        clock.batch_done(8, step_ends=True)
    window = clock.close()
    assert window is not None and window.once_total_s == pytest.approx(COST_MS / 1e3), "the cost lay in the window"
    assert window.blocked_s == pytest.approx(0.004, rel=0.2)


def test_marks_that_are_settled_in_lots_know_their_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, ledger = Machine(monkeypatch), OneTime()
    clock = Clock(CPU, warmup_steps=1, one_time=ledger)
    drive(clock, machine, 3, launch=10)
    before = len(clock._waiting)
    assert 0 < before < LOT, "not settled yet"
    ledger.add_span("compile", machine.host / 1e3, machine.host / 1e3 + 5)
    machine.host += 5000
    drive(clock, machine, 40, launch=10)
    window = clock.close()
    assert window is not None and window.wall_s / window.steps == pytest.approx(0.01)
    assert window.once_total_s == pytest.approx(5.0)
