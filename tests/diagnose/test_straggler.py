"""Which rank makes the others wait."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.diagnose.straggler import find_straggler
from fastloop.records.measurement import Measurement
from tests.diagnose.scenes import ranks


def seen(*parts: dict[str, Any], **changes: Any) -> Measurement:
    return Measurement(step_ms={"mean": 100.0}, world_size=len(parts), ranks=ranks(*parts), **changes)


@pytest.mark.parametrize(
    ("device", "excess", "named"),
    [
        ("cuda", 4.9, False),
        ("cuda", 5.1, True),
        ("cpu", 9.9, False),
        ("cpu", 10.1, True),
    ],
)
def test_from_a_share_of_the_step_on_which_is_larger_on_the_cpu(device: str, excess: float, named: bool) -> None:
    quick, slow = {"forward": 20.0, "backward": 70.0}, {"forward": 20.0 + excess, "backward": 70.0 - excess}
    found = find_straggler(seen(quick, slow, quick, device=device))
    assert (found is not None) is named
    if found is not None:
        assert found[:2] == (1, "node-0") and found.part == "forward"
        assert (found.part_ms, found.others_part_ms) == pytest.approx(
            (20 + excess, 20)
        ) and found.excess_ms == pytest.approx(excess)


def test_a_step_may_come_with_its_quantiles() -> None:
    quick, slow = {"data_wait": 1.0, "backward": 80.0}, {"data_wait": 41.0, "backward": 40.0}
    told = tuple({**rank, "step_ms": {"mean": 100.0, "median": 90.0}} for rank in ranks(quick, slow))
    found = find_straggler(dataclasses.replace(seen(quick, slow), ranks=told))
    assert found is not None and found.rank == 1 and found.excess_ms == pytest.approx(40) and found.part == "data_wait"


@pytest.mark.parametrize(
    "parts",
    [
        (),
        ({"backward": 80.0},),
        ({"backward": 80.0}, {"backward": None}),
        ({"backward": 80.0}, {}),
        ({"backward": 80.0}, {"backward": 80.0}),
        ({"backward": 80.0}, {"backward": 78.0}),
    ],
)
def test_no_straggler_to_tell(parts: tuple[dict[str, Any], ...]) -> None:
    assert find_straggler(seen(*parts)) is None


@pytest.mark.parametrize(("part", "named"), [("callbacks_logging", False), ("checkpoint", False), ("forward", True)])
def test_what_rank_0_does_for_all_is_not_slowness(part: str, named: bool) -> None:
    alone, other = {part: 40.0, "backward": 40.0}, {part: 0.0, "backward": 80.0}
    assert (find_straggler(seen(alone, other)) is not None) is named
    assert find_straggler(seen(other, alone)) is not None, "on another rank it is"


def test_no_step_no_straggler() -> None:
    found = seen({"forward": 1.0, "backward": 80.0}, {"forward": 41.0, "backward": 40.0})
    assert find_straggler(found) is not None
    assert find_straggler(dataclasses.replace(found, step_ms={"mean": None})) is None


def test_a_pass_of_the_garbage_collector_makes_no_straggler() -> None:
    """One of 0.2 s in 20 steps on rank 1: rank 0 waits for it in its backward."""
    collects = {"forward": 20.0, "backward": 60.0, "host_other": 11.0}
    waits = {"forward": 20.0, "backward": 70.0, "host_other": 1.0}
    assert find_straggler(seen(waits, collects, device="cuda")) is None


EVEN = (
    {"forward": 29.2, "backward": 25.0, "optimizer": 3.2, "host_other": 8.1, "data_wait": 2.0},
    {"forward": 25.9, "backward": 20.5, "optimizer": 4.2, "host_other": 15.0, "data_wait": 2.0},
)


def test_two_equal_ranks_nobody_is_named() -> None:
    """Seen: rank 1 waits longer where Lightning asks all ranks whether one was told to end, and was called slow."""
    for device in ("cpu", "cuda"):
        assert (
            find_straggler(seen(*EVEN, device=device)) is None
            and find_straggler(seen(*EVEN[::-1], device=device)) is None
        )
    slow = {**EVEN[1], "forward": 45.9, "backward": 0.5}
    found = find_straggler(seen(EVEN[0], slow))
    assert found is not None and (found.rank, found.part) == (1, "forward"), "the control"


@pytest.mark.parametrize(("gap", "named"), [(13.0, False), (14.0, True)])
def test_a_wait_is_blamed_on_a_part_that_covers_it(gap: float, named: bool) -> None:
    """20 ms: of them `gap` in the forward, the rest here and there."""
    rest = dict.fromkeys(("data_wait", "h2d", "optimizer", "callbacks_logging"), 1.0 + (20 - gap) / 4)
    quick = {"forward": 20.0, "backward": 70.0, **dict.fromkeys(rest, 1.0)}
    assert (find_straggler(seen(quick, {"forward": 20.0 + gap, "backward": 50.0, **rest})) is not None) is named


def test_beside_garbage_a_straggler_is_one_for_its_own_reason() -> None:
    slow = {"forward": 40.0, "backward": 40.0, "host_other": 11.0}
    waits = {"forward": 20.0, "backward": 70.0, "host_other": 1.0}
    found = find_straggler(seen(waits, slow))
    assert found is not None and (found.rank, found.part) == (1, "forward")
    assert found.excess_ms == pytest.approx(20), "30 less the 10 of the collector"


def test_a_wait_that_only_one_ranks_trace_told_apart_names_nobody() -> None:
    told = {"forward": 20.0, "backward": 0.0, "comm_exposed": 70.0}
    plain = {"forward": 20.0, "backward": 69.0, "comm_exposed": 1.0}
    assert find_straggler(seen(plain, told)) is None and find_straggler(seen(told, plain)) is None
    slow = {"forward": 60.0, "backward": 5.0, "comm_exposed": 25.0}
    found = find_straggler(seen(slow, told))
    assert found is not None and found.rank == 0 and found.part == "forward"
