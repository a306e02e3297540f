"""The runs behind a comparison."""

from __future__ import annotations

from fastloop.report import trials
from tests.report.experiments import AB, JAPANESE


def test_every_run_has_a_row_in_the_order_they_ran() -> None:
    content = AB["six"]()
    rows = trials.runs(content).rows
    assert [row[1] for row in rows] == content["order"] and [row[0] for row in rows] == [*map(str, range(1, 29))]
    third = content["arms"][2]
    assert rows[2] == ("3", JAPANESE, "0", f"{third['samples_per_s'][0]:.0f}")
    assert {row[2:] for row in rows if row[1] == "broken"} == {("n/a", "no result")}
    assert trials.runs({}).note == "n/a: no run began."


def test_failures_name_cause_rank_and_last_step() -> None:
    failure = {"arm": "amp", "run": 2, "cause": "killed", "rank": 1, "last_step": 41, "tail": "x"}
    content = {"failures": [failure, {"arm": "b", "run": None, "cause": None, "rank": None, "last_step": 0}]}
    assert trials.failures(content) == ["amp, run 2: killed, rank 1, last step 41", "b: n/a, last step 0"]


def test_settings_that_differ() -> None:
    content = {"config_diff": {"amp": [["rungs.amp.enabled", False, True], ["a.b", "-", [1, "\u72ac"]], ["odd"]]}}
    assert trials.changed(content).rows == (("amp", "rungs.amp.enabled", "false", "true"),
                                            ("amp", "a.b", "-", '[1, "\u72ac"]'))  # fmt: skip
    assert "test the judge" in trials.changed({"config_diff": {"a": []}}).note


def test_the_middle_run() -> None:
    assert trials.middle({"samples_per_s": [1.0, None, 9.0, 2.0]}) == 2.0
    assert trials.middle({"samples_per_s": []}) is None and trials.middle({"samples_per_s": None}) is None
