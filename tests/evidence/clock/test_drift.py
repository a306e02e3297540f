"""When later looks at the step say that it got slower, and when they only wander."""

from __future__ import annotations

import json
import random
import statistics
import tracemalloc
from typing import Any

import pytest

from fastloop.evidence.clock.drift import EVERY_S, MOST_CHECKS, RECHECK_S, Drift, StepCheck

pytestmark = pytest.mark.short

MINUTE = 60.0
AT_START: dict[str, Any] = {"data_wait_ms": 2.0, "sm_clock_mhz": 1980.0, "foreign_processes": ["pid 7"]}


def begun(**figures: Any) -> Drift:
    drift = Drift()
    assert drift.add(1000.0, StepCheck(step=250, step_ms=100.0, **{**AT_START, **figures})) is None
    return drift


def looks(drift: Drift, *step_ms: float, **figures: Any) -> list[str | None]:
    """One look after the other, each when it is due."""
    said, now = [], 1000.0
    for count, ms in enumerate(step_ms, start=1):
        while not drift.due(now):
            now += MINUTE
        said.append(drift.add(now, StepCheck(step=250 + 1000 * count, step_ms=ms, **{**AT_START, **figures})))
    return said


def test_looks_are_due_every_quarter_of_an_hour_after_a_reference() -> None:
    drift = Drift()
    assert not drift.due(1e9), "there is nothing to compare with yet"
    drift.add(1000.0, StepCheck(step=250, step_ms=100.0))
    assert (drift.due(1000.0 + EVERY_S - 1), drift.due(1000.0 + EVERY_S)) == (False, True)
    drift.add(1000.0 + EVERY_S, StepCheck(step=9000, step_ms=101.0))
    assert (drift.due(1000.0 + EVERY_S + RECHECK_S), drift.due(1000.0 + 2 * EVERY_S)) == (False, True)


def test_a_slow_look_is_checked_soon_and_warned_of_when_it_lasts() -> None:
    drift = begun()
    at = 1000.0 + EVERY_S
    assert drift.add(at, StepCheck(step=9000, step_ms=115.0, **AT_START)) is None
    assert (drift.due(at + RECHECK_S - 1), drift.due(at + RECHECK_S)) == (False, True)
    said = drift.add(at + RECHECK_S, StepCheck(step=9600, step_ms=120.0, **AT_START))
    assert said is not None and said.startswith(
        "the step has become 20 % slower than at the start: 120 ms instead of 100 ms"
    )
    assert "16 minutes later" in said and said.endswith("cause unknown")
    assert not drift.due(at + 2 * RECHECK_S), "once proven, looks keep their usual pace"


def test_one_warning_however_long_it_lasts() -> None:
    said = looks(begun(), 120, 120, 130, 90, 140, 140, 100, 150, 150)
    assert [text is not None for text in said] == [False, True] + 7 * [False]


def test_a_single_slow_look_is_a_hiccup() -> None:
    drift = begun()
    assert looks(drift, 150, 100, 109.9, 150, 100, 109.9) == [None] * 6
    assert {entry["why"] for entry in drift.entries} == {None}
    assert looks(begun(), 111, 111)[1] is not None, "two in a row would have been told"


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"sm_clock_mhz": 1485.0}, "the SM clock is down by 25 % (1980 to 1485 MHz)"),
        ({"data_wait_ms": 21.0}, "waiting for data is up by 19 ms"),
        ({"foreign_processes": ["pid 7", "pid 44", "pid 31"]}, "new processes on the GPU: pid 31, pid 44"),
        (
            {"sm_clock_mhz": 1485.0, "data_wait_ms": 10.0, "foreign_processes": {"pid 8"}},
            "the SM clock is down by 25 % (1980 to 1485 MHz); waiting for data is up by 8 ms; "
            "new processes on the GPU: pid 8",
        ),
        ({"sm_clock_mhz": 1960.0, "data_wait_ms": 4.0, "foreign_processes": []}, "cause unknown"),
        (dict.fromkeys(AT_START), "cause unknown"),
    ],
    ids=["clock", "data", "neighbours", "all three", "too little of each", "nothing readable"],
)
def test_what_changed_is_named(now: dict[str, Any], named: str) -> None:
    drift = begun()
    said = looks(drift, 120, 120, **now)[1]
    assert said is not None and said.endswith(f"later: {named}")
    assert [entry["why"] for entry in drift.entries] == [None, named]


def test_what_was_not_known_at_the_start_is_no_change() -> None:
    said = looks(begun(**dict.fromkeys(AT_START)), 120, 120, data_wait_ms=50.0, foreign_processes=["pid 9"])[1]
    assert said is not None and said.endswith("cause unknown")


def test_entries_are_plain_and_count_from_the_first_window() -> None:
    drift = begun()
    looks(drift, 95, 104)
    assert json.loads(json.dumps(drift.entries)) == [
        {"at_s": 900.0, "step": 1250, "step_ms": 95, "change_pct": pytest.approx(-5), "why": None, "memory_mib": None},
        {"at_s": 1800.0, "step": 2250, "step_ms": 104, "change_pct": pytest.approx(4), "why": None, "memory_mib": None},
    ]


def wandering(spread: bool, looks_taken: int, slower_from: int | None = None) -> list[int]:
    """Looks that warned, each a fresh fit of uneven steps (their spread is as large as their mean)."""
    draw, warned = random.Random(0), []
    for fit in range(looks_taken // 100):
        drift, now = Drift(), 0.0
        for look in range(100):
            factor = 2.0 if slower_from is not None and look >= slower_from else 1.0
            steps = [factor * draw.expovariate(0.01) for _ in range(50 if look else 300)]
            std = statistics.stdev(steps) if spread else None
            now += EVERY_S
            if drift.add(now, StepCheck(step=look, step_ms=statistics.fmean(steps), steps=len(steps), step_std_ms=std)):
                warned.append(100 * fit + look)
    return warned


def test_uneven_steps_that_wander_are_not_drift() -> None:
    assert wandering(spread=True, looks_taken=2000) == []
    assert wandering(spread=False, looks_taken=2000) != [], "the spread decides, or the test has no teeth"


def test_uneven_steps_that_got_slower_are_found_all_the_same() -> None:
    warned = wandering(spread=True, looks_taken=2000, slower_from=20)
    assert len(warned) == 20 and all(at % 100 >= 21 for at in warned)


@pytest.mark.parametrize("step_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_a_window_that_measured_nothing_is_no_reference_and_no_look(step_ms: float) -> None:
    drift = Drift()
    assert drift.add(0.0, StepCheck(step=10, step_ms=step_ms)) is None and not drift.due(1e9)
    drift.add(1.0, StepCheck(step=20, step_ms=100.0))
    assert drift.add(1000.0, StepCheck(step=30, step_ms=step_ms)) is None and drift.entries == ()


def test_memory_stays_flat_and_the_warning_is_kept() -> None:
    drift = begun()
    looks(drift, 100, 120, 121, 100)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for count in range(20_000):
        drift.add(1e5 + EVERY_S * count, StepCheck(step=count, step_ms=100.0))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(drift.entries) <= MOST_CHECKS + 1 and grown < 600 * MOST_CHECKS
    assert [entry["step_ms"] for entry in drift.entries if entry["why"]] == [121]
    ages = [entry["at_s"] for entry in drift.entries]
    assert ages == sorted(ages) and ages[-1] > 0.98 * EVERY_S * 20_000, "thinned, not cut off"
