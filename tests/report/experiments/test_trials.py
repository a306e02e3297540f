"""The runs behind a comparison."""

from __future__ import annotations

from fastloop.records.experiment import ArmResult
from fastloop.report.experiments import ab_report
from tests.report.made_experiments import AB, JAPANESE, result_of


def test_every_run_has_a_row_in_the_order_they_ran() -> None:
    content = AB["six"]()
    rows = ab_report.tabulate_runs(result_of(content)).rows
    assert [row[1] for row in rows] == content["order"] and [row[0] for row in rows] == [*map(str, range(1, 29))]
    third = content["arms"][2]
    assert rows[2] == ("3", JAPANESE, "0", f"{third['samples_per_s'][0]:.0f}")
    assert {row[2:] for row in rows if row[1] == "broken"} == {("n/a", "no result")}
    assert ab_report.tabulate_runs(result_of({})).note == "n/a: no run began."


def test_failures_name_cause_and_last_step() -> None:
    failure = {"arm": "amp", "run": "run-1", "cause": "killed", "last_step": 41, "tail": "x"}
    content = {"failures": [failure, {"arm": "b", "run": None, "cause": None, "last_step": 0}]}
    assert ab_report.list_failures(result_of(content)) == [
        "amp, run-1: killed, last step 41",
        "b: n/a, last step 0",
    ]


def test_settings_that_differ() -> None:
    content = {"config_diff": {"amp": [["rungs.amp.enabled", False, True], ["a.b", "-", [1, "\u72ac"]], ["odd"]]}}
    assert tuple(ab_report.tabulate_changes(result_of(content)).rows) == (
        ("amp", "rungs.amp.enabled", "false", "true"),
        ("amp", "a.b", "-", '[1, "\u72ac"]'),
    )
    assert "A/A test" in ab_report.tabulate_changes(result_of({"config_diff": {"a": []}})).note


def test_the_middle_run() -> None:
    assert ab_report.compute_median_rate(ArmResult(name="a", samples_per_s=(1.0, 9.0, 2.0))) == 2.0
    assert ab_report.compute_median_rate(ArmResult(name="a")) is None
