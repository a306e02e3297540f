"""Which rank makes the others wait."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.diagnose.straggler import straggler
from fastloop.measurement import Measurement
from tests.diagnose.scenes import ranks


def seen(*parts: dict[str, Any], **changes: Any) -> Measurement:
    return Measurement(step_ms={"mean": 100.0}, world_size=len(parts), ranks=ranks(*parts), **changes)


@pytest.mark.parametrize(("excess", "named"), [(4.9, False), (5.1, True)])
def test_from_five_per_cent_of_the_step_on(excess: float, named: bool) -> None:
    quick, slow = {"forward": 20.0, "backward": 70.0}, {"forward": 20.0 + excess, "backward": 70.0 - excess}
    found = straggler(seen(quick, slow, quick))
    assert (found is not None) is named
    if found is not None:
        assert found[:2] == (1, "node-0") and found.part == "forward"
        assert (found.part_ms, found.others_part_ms) == pytest.approx((20 + excess, 20)) and found.excess_ms == \
            pytest.approx(excess)  # fmt: skip


def test_a_step_may_come_with_its_quantiles() -> None:
    quick, slow = {"data_wait": 1.0, "backward": 80.0}, {"data_wait": 41.0, "backward": 40.0}
    told = tuple({**rank, "step_ms": {"mean": 100.0, "median": 90.0}} for rank in ranks(quick, slow))
    found = straggler(dataclasses.replace(seen(quick, slow), ranks=told))
    assert found is not None and found.rank == 1 and found.excess_ms == pytest.approx(40) and found.part == "data_wait"


@pytest.mark.parametrize("parts", [
    (), ({"backward": 80.0},), ({"backward": 80.0}, {"backward": None}), ({"backward": 80.0}, {}),
    ({"backward": 80.0}, {"backward": 80.0}), ({"backward": 80.0}, {"backward": 78.0}),
])  # fmt: skip
def test_no_straggler_to_tell(parts: tuple[dict[str, Any], ...]) -> None:
    assert straggler(seen(*parts)) is None


@pytest.mark.parametrize(("part", "named"), [("callbacks_logging", False), ("checkpoint", False), ("forward", True)])
def test_what_rank_0_does_for_all_is_not_slowness(part: str, named: bool) -> None:
    alone, other = {part: 40.0, "backward": 40.0}, {part: 0.0, "backward": 80.0}
    assert (straggler(seen(alone, other)) is not None) is named
    assert straggler(seen(other, alone)) is not None, "on another rank it is"


def test_no_step_no_straggler() -> None:
    found = seen({"forward": 1.0, "backward": 80.0}, {"forward": 41.0, "backward": 40.0})
    assert straggler(found) is not None
    assert straggler(dataclasses.replace(found, step_ms={"mean": None})) is None


@pytest.mark.parametrize(("garbage", "named"), [(10.0, False), (None, True), (0.0, True)])
def test_a_pass_of_the_garbage_collector_makes_no_straggler(garbage: float | None, named: bool) -> None:
    """One of 0.2 s in 20 steps on rank 1: rank 0 waits for it in its backward."""
    collects = {"forward": 20.0, "backward": 60.0, "host_other": 11.0}
    waits = {"forward": 20.0, "backward": 70.0, "host_other": 1.0}
    made = seen(waits, collects)
    rank_1 = {**made.ranks[1], "garbage_ms": garbage}
    found = straggler(dataclasses.replace(made, ranks=(made.ranks[0], rank_1)))
    assert (found is not None) is named and (found is None or (found.rank, found.part) == (1, "host_other"))


def test_beside_garbage_a_straggler_is_one_for_its_own_reason() -> None:
    slow = {"forward": 40.0, "backward": 40.0, "host_other": 11.0}
    waits = {"forward": 20.0, "backward": 70.0, "host_other": 1.0}
    made = seen(waits, slow)
    found = straggler(dataclasses.replace(made, ranks=(made.ranks[0], {**made.ranks[1], "garbage_ms": 10.0})))
    assert found is not None and (found.rank, found.part) == (1, "forward")
    assert found.excess_ms == pytest.approx(20), "30 less the 10 of the collector"


def test_a_wait_that_only_one_ranks_trace_told_apart_names_nobody() -> None:
    told = {"forward": 20.0, "backward": 0.0, "comm_exposed": 70.0}
    plain = {"forward": 20.0, "backward": 69.0, "comm_exposed": 1.0}
    assert straggler(seen(plain, told)) is None and straggler(seen(told, plain)) is None
    slow = {"forward": 60.0, "backward": 5.0, "comm_exposed": 25.0}
    found = straggler(seen(slow, told))
    assert found is not None and found.rank == 0 and found.part == "forward"
