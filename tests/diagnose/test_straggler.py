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
