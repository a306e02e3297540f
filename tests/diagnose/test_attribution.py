"""Every millisecond has one owner."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.diagnose.attribution import Attribution, Inside, attribute
from fastloop.records.measurement import Measurement
from tests.diagnose.scenes import (
    cifar10_launches,
    gpt2_naive,
    gpt2_tuned,
    on_cpu,
    ranks,
    resnet50_naive,
    scene,
    with_trace,
)


def attributed(seen: Measurement) -> Attribution:
    step = attribute(seen)
    assert step is not None
    return step


def inside(seen: Measurement) -> Inside | None:
    return attributed(seen).inside


def device_limits(seen: Measurement) -> bool:
    step = attribute(seen)
    return step is not None and step.is_limit


def drained(seen: Measurement) -> bool | None:
    return attributed(seen).drained


LINE = {"where": "a.py:1", "per_step": 1.0, "ms_per_step": 1.0}


@pytest.mark.parametrize(
    "seen",
    [
        gpt2_naive(),
        gpt2_tuned(world_size=2, ceilings={"replayed": 520.8, "no_exchange": 600.0}),
        cifar10_launches(),
        on_cpu(),
        cifar10_launches(syncs=(LINE,), blocked_ms=2.0, host_ms={"backward": 1.0}),
        cifar10_launches(gpu={}),
        with_trace(cifar10_launches(), 3.0, {"launch": 2.0, "sync": 1.0, "other": 3.0}, {}),
        resnet50_naive(),
    ],
    ids=["busy", "exchange", "launches", "cpu", "sync and sleep", "bound", "trace", "starved"],
)
def test_the_owners_add_up_to_the_compute_phases(seen: Measurement) -> None:
    split = inside(seen)
    assert split is not None
    exchange, slow = attributed(seen).exchange, attributed(seen).slow_elsewhere
    owned = [
        0.0 if exchange is None else exchange.ms,
        0.0 if slow is None else slow.excess_ms,
        split.sync or 0.0,
        split.blocked or 0.0,
        split.launch or 0.0,
        split.unseen,
        split.busy,
    ]
    assert sum(owned) == pytest.approx(attributed(seen).sum_ms("forward", "backward", "optimizer")) and min(owned) >= 0


def test_sleep_comes_before_launches_and_after_synchronizations() -> None:
    seen = scene(10.0, trail=0.0, gpu={"gr_active_pct": 40.0}, syncs=(LINE,), blocked_ms=5.0, host_ms={"backward": 3.0})
    split = inside(seen)
    assert split is not None and split.source == "counters"
    assert (split.sync, split.blocked, split.launch, split.busy) == pytest.approx((1.0, 2.0, 3.0, 4.0))


UNTIMED = {"where": "a.py:1", "per_step": 20.0}


@pytest.mark.parametrize(
    ("change", "sync", "launch"),
    [
        ({}, 0.9, 5.4),
        ({"syncs": ()}, 0.0, 6.3),
        ({"syncs": ({**UNTIMED, "ms_per_step": 2.0},)}, 2.0, 4.3),
        ({"gpu": {"gr_active_pct": 60.0}}, 2.9, 0.0),
        ({"gpu": {}}, 7.2, 0.0),
    ],
    ids=["planted", "no lines", "timed", "busy", "no counter"],
)
def test_a_host_waits_no_longer_than_the_device_works(change: dict[str, Any], sync: float, launch: float) -> None:
    """20 `.item()` in a step of many small kernels on an H200: 7.4 ms with them, 6.0 and 7.1 without; a kernel ran for
    12 % of the time. All of its idle time was called theirs before."""
    seen = scene(7.4, trail=0.03, **{"gpu": {"gr_active_pct": 12.4}, "syncs": (UNTIMED,), "h2d": 0.2, **change})
    split = inside(seen)
    assert split is not None and (split.sync, split.launch) == pytest.approx((sync, launch), abs=0.15)


def test_a_traced_wait_is_no_longer_either() -> None:
    seen = with_trace(scene(10.0, trail=0.0, syncs=(UNTIMED,)), 1.0, {"sync": 8.0, "launch": 1.0}, {})
    split = inside(seen)
    assert split is not None and (split.sync, split.launch) == pytest.approx((1.0, 8.0))


def test_a_traced_sleep_is_taken_from_what_the_trace_could_not_place() -> None:
    seen = with_trace(
        scene(10.0, trail=0.0, blocked_ms=3.0, host_ms={"backward": 0.0}), 5.0, {"launch": 3.0, "other": 2.0}, {}
    )
    split = inside(seen)
    assert split is not None and (split.blocked, split.launch) == pytest.approx((3.0, 2.0))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"trail": 0.19}, True),
        ({"trail": 0.21}, False),
        ({"trail": None, "lead_ms": 0.1}, True),
        ({"trail": None, "lead_ms": None}, None),
        ({"trail": 9.0, "lead_ms": 0.1}, False),
    ],
)
def test_a_queue_is_empty_below_two_tenths(change: dict[str, Any], expected: bool | None) -> None:
    assert drained(cifar10_launches(step=2.0, **change)) is expected


def test_or_below_five_per_cent_of_a_batch() -> None:
    assert drained(scene(100.0, trail=4.9)) and not drained(scene(100.0, trail=5.1))
    four = {"micro_batch": 8, "global_batch": 64, "world_size": 2}
    assert drained(scene(100.0, trail=1.2, **four)) and not drained(scene(100.0, trail=1.3, **four))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (gpt2_naive(), True),
        (gpt2_tuned(), True),
        (gpt2_naive(trail=0.0), True),
        (gpt2_naive(trail=0.0, gpu={"gr_active_pct": 89.0}), False),
        (gpt2_naive(device="cpu"), False),
        (resnet50_naive(), False),
        (cifar10_launches(), False),
        (gpt2_tuned(callbacks_logging=12.0), True),
        (gpt2_tuned(callbacks_logging=12.5), False),
        (gpt2_tuned(validation=60.0), True),
        (Measurement(), False),
    ],
    ids=range(11),
)
def test_when_the_device_is_the_limit(seen: Measurement, expected: bool) -> None:
    assert device_limits(seen) is expected


@pytest.mark.parametrize(
    ("change", "unseen"),
    [
        ({"gr_active_pct": 34.0}, 66.0),
        ({"nvml_busy_pct": 37.0}, 63.0),
        ({"gr_active_pct": 95.1}, 0.0),
        ({"gr_active_pct": 94.9}, 5.1),
        ({}, 0.0),
    ],
)
def test_a_device_works_no_longer_than_its_counters_saw_it(change: dict[str, float], unseen: float) -> None:
    """A queue that is full in most steps: the median work left says nothing of the few in which the device was idle."""
    seen = scene(100.0, trail=50.0, gpu=change)
    split = inside(seen)
    assert split is not None and split.unseen == pytest.approx(unseen) and split.busy == pytest.approx(100 - unseen)
    assert device_limits(seen) is (unseen < 10)
    traced = inside(with_trace(seen, 99.0, {"other": 1.0}, {}))
    assert traced is not None and traced.unseen == pytest.approx(unseen), "the traced steps are others"


@pytest.mark.parametrize(
    ("active", "unexplained", "expected"),
    [
        (95.0, 15.0, True),
        (85.0, 15.0, False),
        (None, 15.0, False),
        (None, 9.0, True),
    ],
)
def test_the_limit_is_no_device_that_a_part_of_the_step_says_nothing_of(
    active: float | None, unexplained: float, expected: bool
) -> None:
    gpu = {} if active is None else {"gr_active_pct": active}
    assert device_limits(scene(100.0, trail=50.0, unexplained=unexplained, gpu=gpu)) is expected


def test_nvml_is_not_held_against_a_starved_device() -> None:
    starved = {"data_wait": 40.0, "trail": 50.0}
    split = inside(scene(100.0, gpu={"nvml_busy_pct": 4.0}, **starved))
    assert split is not None and split.unseen == 0.0
    split = inside(scene(100.0, gpu={"gr_active_pct": 4.0}, **starved))
    assert split is not None and split.unseen == pytest.approx(56)


@pytest.mark.parametrize(("active", "expected"), [(89.0, False), (91.0, True), (None, False)])
def test_without_a_look_at_the_queue_its_activity_decides(active: float | None, expected: bool) -> None:
    assert device_limits(scene(100.0, gpu={"gr_active_pct": active} if active else {})) is expected


def test_a_part_is_no_longer_than_the_step_and_unknown_stays_unknown() -> None:
    seen = Measurement(step_ms={"mean": 10.0}, parts_ms={"data_wait": 12.0, "h2d": None, "forward": -1.0})
    step = attributed(seen)
    assert step.parts_ms == {"data_wait": 10.0}
    assert step.sum_ms("h2d", "forward") is None and step.inside is None and step.device_ms is None


@pytest.mark.parametrize(
    "seen", [Measurement(), Measurement(step_ms={"mean": 10.0}), Measurement(parts_ms={"h2d": 1.0})]
)
def test_nothing_is_attributed_of_no_step(seen: Measurement) -> None:
    assert attribute(seen) is None


def test_a_part_is_without_what_is_the_stragglers_where_this_rank_is_the_slow_one() -> None:
    quick, slow = {"forward": 10.0, "backward": 60.0}, {"forward": 30.0, "backward": 40.0}
    seen = scene(100.0, world_size=2, forward=30.0, backward=60.0)
    here, elsewhere = (dataclasses.replace(seen, ranks=ranks(*both)) for both in ((slow, quick), (quick, slow)))
    assert attributed(here).parts_ms["forward"] == pytest.approx(10) and attributed(here).slow_elsewhere is None
    assert attributed(elsewhere).parts_ms["forward"] == 30.0 and attributed(elsewhere).slow_here is None
    split = inside(elsewhere)
    whole = attributed(elsewhere).sum_ms("forward", "backward", "optimizer")
    assert split is not None and whole is not None and whole - split.busy == pytest.approx(20)


def test_the_exchange_of_one_rank_is_none() -> None:
    assert attributed(gpt2_tuned(comm_exposed=20.0)).exchange is None
    assert attributed(gpt2_tuned(comm_exposed=20.0, world_size=2)).exchange == (20.0, "marks")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"global_batch": 64}, 24.0),
        ({"samples_per_s": 640.0}, 24.0),
        ({"global_batch": 128}, 48.0),
        ({"global_batch": 1000}, 100.0),
        ({"ceilings": {"replayed": 1000.0, "no_exchange": 900.0}, "global_batch": 64}, 0),
    ],
    ids=["samples", "by the rate", "twice the samples", "the whole step", "slower without"],
)
def test_two_trials_tell_the_exchange_in_milliseconds(changes: dict[str, Any], expected: float) -> None:
    seen = scene(**{"step": 100.0, "world_size": 2, "ceilings": {"replayed": 1000.0, "no_exchange": 1600.0}, **changes})
    assert attributed(seen).exchange == (pytest.approx(expected), "trials")


@pytest.mark.parametrize(
    "ceilings",
    [
        {},
        {"replayed": 1000.0},
        {"no_exchange": 1600.0},
        {"resident": 1000.0, "no_exchange": 1600.0},
    ],
    ids=str,
)
def test_one_trial_tells_nothing_of_the_exchange(ceilings: dict[str, float]) -> None:
    seen = gpt2_tuned(comm_exposed=20.0, world_size=2, ceilings=ceilings)
    assert attributed(seen).exchange == (20.0, "marks")
    assert attributed(dataclasses.replace(seen, parts_ms={**seen.parts_ms, "comm_exposed": None})).exchange is None


@pytest.mark.parametrize(
    ("part", "slow_rank", "trials", "trace"),
    [
        ("forward", 1, 20.0, 20.0),
        ("data_wait", 1, 0.0, 20.0),
        ("forward", 0, 0.0, 0.0),
    ],
)
def test_a_slow_ranks_data_is_in_no_trial(part: str, slow_rank: int, trials: float, trace: float) -> None:
    quick, slow = {part: 10.0, "backward": 60.0}, {part: 30.0, "backward": 40.0}
    both = (slow, quick) if slow_rank == 0 else (quick, slow)
    seen = dataclasses.replace(scene(100.0, world_size=2), ranks=ranks(*both))
    tried = dataclasses.replace(seen, global_batch=64, ceilings={"replayed": 1000.0, "no_exchange": 1600.0})
    assert attributed(tried).exchange == (pytest.approx(24.0 - trials), "trials")
    traced = with_trace(seen, 60.0, {}, {}, comm_exposed_ms=24.0)
    assert attributed(traced).exchange == (pytest.approx(24.0 - trace), "trace")
