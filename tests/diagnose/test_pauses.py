"""What single long steps may be most of is not called a cost of each step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.diagnose import findings
from fastloop.diagnose.pauses import pauses_ms
from fastloop.measurement import Measurement
from tests.diagnose.scenes import on_cpu, ranks


def paused(ms: float, seen: Measurement, steps: int = 1, median: float | None = None) -> Measurement:
    """The same measurement, of which single long steps make so much of the mean one."""
    return dataclasses.replace(seen, evidence={**seen.evidence, "pauses": {"ms_per_step": ms, "steps": steps}},
                               step_ms={**seen.step_ms, "median": median})  # fmt: skip


def names(seen: Measurement) -> list[str]:
    return [finding.bottleneck for finding in findings(seen)]


@pytest.mark.parametrize("part", ["data_wait", "callbacks_logging", "host_other", "blocked_ms"])
def test_what_may_be_mostly_pause_is_not_named_and_has_no_rung(part: str) -> None:
    seen = on_cpu(**{part: 16.0})
    named = "host_other" if part == "blocked_ms" else part
    assert names(seen) == [named], "as it is, it is one"
    (finding,) = findings(paused(15.0, seen, median=25.0))
    assert finding.bottleneck == "pauses" and finding.title == "SINGLE PAUSES" and finding.patch is None
    assert finding.share_pct == pytest.approx(37.5) and finding.ceiling_gain_pct is None
    assert finding.why.startswith("1 of 200 steps took so long that this makes 15.0 of 40.0 ms a step, where the median"
                                  f" step takes 25.00 ms: that may be most of {named},")  # fmt: skip


@pytest.mark.parametrize("pause", [0.0, 5.0, 7.9])
def test_what_is_a_cost_of_each_step_beside_pauses_is_named(pause: float) -> None:
    seen = paused(pause, on_cpu(data_wait=16.0))
    assert findings(seen) == findings(on_cpu(data_wait=16.0, evidence=seen.evidence))
    assert names(seen) == ["data_wait"]


@pytest.mark.parametrize(("pause", "name"), [(7.9, "data_wait"), (8.1, "pauses")])
def test_half_of_it_is_most_of_it(pause: float, name: str) -> None:
    assert names(paused(pause, on_cpu(data_wait=16.0))) == [name]


@pytest.mark.parametrize("part", ["validation", "checkpoint", "epoch_gap"])
def test_what_is_rare_by_design_is_no_pause(part: str) -> None:
    seen = paused(16.0, on_cpu(**{part: 16.0, "data_wait": 8.0}))
    assert pauses_ms(seen) == 0.0 and names(seen) == [part, "data_wait"]


def test_a_pass_of_the_garbage_collector_is_named_as_that() -> None:
    seen = on_cpu(host_other=10.4, evidence={"garbage_collection": {"ms_per_step": 10.0, "passes": 1}})
    (finding,) = findings(paused(10.0, seen))
    assert finding.bottleneck == "host_other" and "garbage collection took 10.0 of 40.0" in finding.why


SLOW = ranks({"forward": 20.0, "backward": 70.0}, {"forward": 50.0, "backward": 40.0})
EVEN = Measurement(steps=60, step_ms={"mean": 100.0}, world_size=2, ranks=SLOW,
                   parts_ms={"forward": 20.0, "backward": 70.0})  # fmt: skip


def test_one_pause_makes_no_slow_rank_and_an_evenly_slow_one_is_named() -> None:
    assert names(EVEN) == ["straggler"] and names(paused(10.0, EVEN)) == ["straggler"]
    (finding,) = findings(paused(29.0, EVEN))
    assert finding.bottleneck == "pauses" and "most of straggler" in finding.why


def test_garbage_on_another_rank_is_no_other_pause() -> None:
    collects = {**SLOW[1], "garbage_ms": 29.0}
    seen = paused(29.0, dataclasses.replace(EVEN, ranks=(SLOW[0], collects)))
    assert pauses_ms(seen) == 0.0


@pytest.mark.parametrize("broken", [{}, {"ms_per_step": None}, {"ms_per_step": "x", "steps": None}])
def test_what_the_evidence_lacks_hides_nothing(broken: dict[str, Any]) -> None:
    seen = on_cpu(data_wait=16.0, evidence={"pauses": broken})
    assert names(seen) == ["data_wait"]
