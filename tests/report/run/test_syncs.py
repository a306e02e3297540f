"""The line about what waits for the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.records.measurement import Measurement
from fastloop.records.plan import Plan
from fastloop.report.run import caveats, summary
from tests.report import samples


def found(*places: dict[str, Any], hunted: int | None = None, device: str = "cpu") -> list[str]:
    evidence = {} if hunted is None else {"syncs": {"hunted_steps": hunted}}
    return caveats.describe_syncs(Measurement(syncs=places, evidence=evidence, device=device))


@pytest.mark.parametrize(
    ("device", "ms", "said"),
    [
        ("cpu", None, "train.py:8 .item(), no cost on the CPU"),
        ("cuda", None, "train.py:8 .item(), 2 a step"),
        ("cuda", 0.8774, "train.py:8 .item(), 0.877 ms a step"),
        ("cuda", 12.0, "train.py:8 .item(), 12 ms a step"),
    ],
)
def test_a_place_is_said_with_what_it_costs(device: str, ms: float | None, said: str) -> None:
    place = {"where": "train.py:8", "what": ".item()", "per_step": 2.0, "ms_per_step": ms}
    assert found(place, device=device) == [said]


def test_the_first_three_are_named_and_the_others_counted() -> None:
    places = [{"where": f"a.py:{line}", "what": ".item()"} for line in range(1, 6)]
    (line,) = found(*places[:3], hunted=5)
    assert line.count(".item()") == 3 and "more" not in line
    (line,) = found(*places, hunted=5)
    assert "a.py:1 " in line and "a.py:4 " not in line and line.endswith("; 2 more in the report")
    assert found({}, device="cuda") == ["n/a n/a"]


def test_that_there_are_none_is_said_only_where_all_were_looked_for() -> None:
    assert found() == []
    assert found(hunted=5) == ["none found, in 5 steps"]
    assert found(hunted=0) == ["n/a: training ended before the search"]


def test_the_line_is_among_those_that_a_person_reads_first() -> None:
    seen, findings, verdicts, plan, _ = samples.gpt2()
    assert "SYNC     gpt2.py:88 Tensor.item(), 0.9 ms a step" in summary.write_lines(seen, plan, verdicts, findings)
    hunted = dataclasses.replace(samples.cpu().seen, evidence={"syncs": {"hunted_steps": 5}})
    assert "SYNC     none found, in 5 steps" in summary.write_lines(hunted, Plan(), (), ())
    assert "SYNC" not in "".join(summary.write_lines(samples.cpu().seen, Plan(), (), ()))
