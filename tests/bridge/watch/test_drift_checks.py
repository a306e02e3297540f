"""A step that gets slower long after the timed window, with hours that pass in no time."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.bridge.watch import window as stages
from fastloop.bridge.watch.drift_checks import DriftChecks
from fastloop.bridge.watch.window import Watch
from fastloop.evidence.clock.drift import CHECK_STEPS, EVERY_S, RECHECK_S
from fastloop.evidence.clock.one_time import OneTime
from tests.bridge.watch.made_up import CPU, Time, run, settings

pytestmark = pytest.mark.short


class Fit:
    """A watch whose window is over, and what its later looks say."""

    def __init__(self, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stages, "LONGEST_S", 2.0)
        self.time, self.warnings = time, []
        self.board: dict[str, Any] | None = {"sm_clock_mhz": 1980.0, "foreign_processes": frozenset()}
        self.watch = Watch(CPU, settings(), one_time=OneTime())
        self.watch.drift_checks = self.checks = DriftChecks(
            CPU, read_board=lambda: self.board, warn=self.warnings.append, switch=self.switch, one_time=OneTime()
        )
        self.switches = 0
        run(self.watch, time, 60)
        assert self.watch.clock.closed and self.watch.window is not None

    def switch(self, clock: Any) -> None:
        self.switches += 1
        self.watch.marks.clock = clock

    def look(self, pause_s: float = EVERY_S, **times: float) -> None:
        """Let time pass, and go on for as many steps as a look takes and some."""
        self.time.passes(pause_s)
        run(self.watch, self.time, CHECK_STEPS + 5, **times)


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Fit:
    return Fit(Time(monkeypatch), monkeypatch)


def test_a_slow_step_is_warned_of_once(fit: Fit) -> None:
    fit.look()
    assert fit.warnings == [] and fit.switches == 1
    fit.look(compute_s=0.06)  # 70 ms instead of 40
    assert fit.warnings == [], "one look alone proves nothing"
    fit.look(RECHECK_S, compute_s=0.06)
    assert len(fit.warnings) == 1 and "75 % slower" in fit.warnings[0] and "40 ms" in fit.warnings[0]
    for _ in range(5):
        fit.look(compute_s=0.06)
    assert len(fit.warnings) == 1
    fit.watch.close()
    entries = fit.checks.drift.entries
    assert [round(entry["change_pct"]) for entry in entries] == [0, 75, 75, 75, 75, 75, 75, 75]
    assert entries[0]["why"] is None is entries[1]["why"] and entries[2]["why"] == "cause unknown"
    assert entries[0]["step_ms"] == pytest.approx(40.0)


def test_a_steady_one_never(fit: Fit) -> None:
    for _ in range(10):
        fit.look()
    assert fit.warnings == [] and len(fit.checks.drift.entries) == 10


@pytest.mark.parametrize(
    ("board", "times", "why"),
    [
        (
            {"sm_clock_mhz": 990.0, "foreign_processes": frozenset()},
            {"compute_s": 0.06},
            "the SM clock is down by 50 %",
        ),
        (
            {"sm_clock_mhz": 1980.0, "foreign_processes": frozenset({7})},
            {"compute_s": 0.06},
            "new processes on the GPU: 7",
        ),
        (None, {"wait_s": 0.06}, "waiting for data is up by 50 ms"),
    ],
)
def test_what_changed_is_said(fit: Fit, board: Any, times: dict[str, float], why: str) -> None:
    fit.board = board
    fit.look(**times)
    fit.look(RECHECK_S, **times)
    assert len(fit.warnings) == 1 and why in fit.warnings[0]


def test_looks_are_short_and_far_between(fit: Fit) -> None:
    run(fit.watch, fit.time, 200)
    assert fit.switches == 0, "8 s have passed"
    fit.time.passes(EVERY_S)
    run(fit.watch, fit.time, 10)
    clock = fit.checks.clock
    assert clock is not None and clock.open
    run(fit.watch, fit.time, CHECK_STEPS)
    assert fit.checks.clock is None and clock.closed and not fit.watch.marks.is_marking(), "no marks until the next one"
    assert fit.checks.drift.entries[0]["step"] == fit.watch.clock.total_steps - 9
    run(fit.watch, fit.time, 200)
    assert fit.switches == 1


@pytest.mark.parametrize(("steps", "told"), [(10, 0), (CHECK_STEPS - 10, 1)])
def test_a_look_that_the_end_cuts_short(fit: Fit, steps: int, told: int) -> None:
    fit.time.passes(EVERY_S)
    run(fit.watch, fit.time, steps)
    assert fit.checks.clock is not None
    fit.watch.close()
    fit.watch.close()
    assert len(fit.checks.drift.entries) == told and fit.checks.clock is None


def test_validation_makes_no_step_slower(fit: Fit) -> None:
    def validates() -> None:
        with fit.watch.marks.profile("[LightningModule]N.on_validation_model_eval"):
            fit.time.passes(0.5)

    for pause_s in (EVERY_S, RECHECK_S):
        fit.time.passes(pause_s)
        for _ in range(6):
            run(fit.watch, fit.time, 9)
            run(fit.watch, fit.time, 1, between=validates)
    assert fit.warnings == [] and fit.checks.drift.entries[0]["change_pct"] == pytest.approx(0.0, abs=1.0)


def test_without_a_window_nothing_is_compared() -> None:
    checks = DriftChecks(CPU, read_board=lambda: None, warn=pytest.fail, switch=pytest.fail, one_time=OneTime())
    checks.reference(None, 0)
    checks.between_steps(10**6)
    checks.end(10**6)
    assert checks.drift.entries == () and checks.clock is None


def test_memory_is_looked_at_with_each_check_and_its_warning_is_passed_on(fit: Fit) -> None:
    said = iter([None, "memory grew", None, None])
    fit.checks._foresee_end = lambda: next(said)
    for count, taken in enumerate((2**30, 2**31, 2**32)):
        fit.board = {"memory_bytes": taken}
        assert len(fit.warnings) == max(0, count - 1)
        fit.look()
    assert fit.warnings == ["memory grew"] and next(said) is None
    assert [entry["memory_mib"] for entry in fit.checks.drift.entries] == [1024, 2048, 4096]
