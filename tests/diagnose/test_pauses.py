"""What single long steps may be most of is not called a cost of each step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.diagnose.attribution import attribute
from fastloop.records.measurement import Measurement
from tests.diagnose.scenes import findings, on_cpu, ranks


def paused(ms: float, seen: Measurement, steps: int = 1, median: float | None = None) -> Measurement:
    """The same measurement, of which single long steps make so much of the mean one."""
    return dataclasses.replace(
        seen,
        evidence={**seen.evidence, "pauses": {"ms_per_step": ms, "steps": steps}},
        step_ms={**seen.step_ms, "median": median},
    )


def pauses_ms(seen: Measurement) -> float:
    step = attribute(seen)
    assert step is not None
    return step.pauses_ms


def names(seen: Measurement) -> list[str]:
    return [finding.bottleneck for finding in findings(seen)]


@pytest.mark.parametrize("part", ["data_wait", "callbacks_logging", "host_other", "blocked_ms"])
def test_what_may_be_mostly_pause_is_not_named_and_has_no_rung(part: str) -> None:
    seen = on_cpu(**{part: 16.0})
    named = "host_other" if part == "blocked_ms" else part
    assert names(seen) == [named], "as it is, it is one"
    (finding,) = findings(paused(15.0, seen, median=25.0))
    assert finding.bottleneck == "none" and finding.title == "SINGLE PAUSES" and finding.patch is None
    assert finding.share_pct is None and finding.ceiling_gain_pct is None
    assert finding.why.startswith(
        "1 of 200 steps were so long that they add 15.0 of 40.0 ms a step (the median step takes 25.00 ms): they may"
        f" explain most of {named},"
    )


@pytest.mark.parametrize("pause", [0.0, 1.9, 7.9])
def test_what_is_a_cost_of_each_step_beside_pauses_is_named(pause: float) -> None:
    (finding,) = findings(paused(pause, on_cpu(data_wait=16.0)))
    (without,) = findings(on_cpu(data_wait=16.0))
    assert dataclasses.replace(finding, detail=()) == without and finding.bottleneck == "data_wait"
    assert any("were so long" in line for line in finding.detail) is (pause == 7.9), "5 % of the step is worth telling"


@pytest.mark.parametrize(
    ("pause", "title"), [(1.9, "NOTHING TO GAIN"), (2.1, "SINGLE PAUSES"), (36.9, "SINGLE PAUSES")]
)
def test_a_window_that_is_one_pause_is_not_called_nothing_to_gain(pause: float, title: str) -> None:
    """Seen: a busy pause of 3 s made the mean step 13 times the median one, and no part of it was worth naming."""
    (finding,) = findings(paused(pause, on_cpu()))
    assert finding.bottleneck == "none" and finding.title == title
    assert f"they add {pause} of 40.0 ms a step" in finding.why or title == "NOTHING TO GAIN"
    assert "most of" not in finding.why


@pytest.mark.parametrize(("median", "title"), [(20.5, "NOTHING TO GAIN"), (19.5, "NO BOTTLENECK FOUND")])
def test_many_long_steps_make_a_mean_that_is_no_steps_own(median: float, title: str) -> None:
    (finding,) = findings(dataclasses.replace(on_cpu(), step_ms={"mean": 40.0, "median": median}))
    assert finding.title == title
    assert ("the mean step is 2.1 times the median of 19.50 ms" in finding.why) is (median == 19.5)
    rare = on_cpu(validation=1.9)
    (finding,) = findings(dataclasses.replace(rare, step_ms={"mean": 40.0, "median": 19.5}))
    assert finding.title == "NOTHING TO GAIN", "validations are long, and known to come now and then"


def test_a_pause_that_is_in_no_part_hides_none() -> None:
    seen = paused(15.0, on_cpu(data_wait=16.0, unexplained=15.0), median=25.0)
    assert names(seen) == ["data_wait"], "all of the pause is unexplained"
    (finding,) = findings(paused(15.0, on_cpu(unexplained=15.0), median=10.0))
    assert finding.title == "SINGLE PAUSES" and "unexplained" not in finding.why and "2.5 times" not in finding.why
    (finding,) = findings(paused(15.0, on_cpu(unexplained=20.0), median=10.0))
    assert "12.5 % of the step is unexplained" in finding.why, "more than the pause was"


def test_beside_a_bottleneck_that_stays_the_pauses_are_a_detail() -> None:
    (finding,) = findings(paused(20.0, on_cpu(validation=8.0, data_wait=9.0)))
    assert finding.bottleneck == "validation"
    assert any(line.startswith("1 of 200 steps were so long") and "data_wait" in line for line in finding.detail)


@pytest.mark.parametrize(("pause", "name"), [(7.9, "data_wait"), (8.1, "none")])
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
EVEN = Measurement(
    steps=60, step_ms={"mean": 100.0}, world_size=2, ranks=SLOW, parts_ms={"forward": 20.0, "backward": 70.0}
)


def test_one_pause_makes_no_slow_rank_and_an_evenly_slow_one_is_named() -> None:
    assert names(EVEN) == ["straggler"] and names(paused(10.0, EVEN)) == ["straggler"]
    (finding,) = findings(paused(29.0, EVEN))
    assert finding.title == "SINGLE PAUSES" and "most of straggler" in finding.why


def test_garbage_on_another_rank_is_no_other_pause() -> None:
    collects = {**SLOW[1], "garbage_ms": 29.0}
    seen = paused(29.0, dataclasses.replace(EVEN, ranks=(SLOW[0], collects)))
    assert pauses_ms(seen) == 0.0


@pytest.mark.parametrize("broken", [{}, {"ms_per_step": None}, {"ms_per_step": "x", "steps": None}])
def test_what_the_evidence_lacks_hides_nothing(broken: dict[str, Any]) -> None:
    seen = on_cpu(data_wait=16.0, evidence={"pauses": broken})
    assert names(seen) == ["data_wait"]
