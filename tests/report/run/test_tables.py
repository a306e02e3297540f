"""The tables as plain texts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.records.measurement import PARTS, Measurement
from fastloop.records.plan import Verdict
from fastloop.records.run_files import Environment
from fastloop.report.drawing.document import Table
from fastloop.report.run import summary, tables
from tests.report import samples
from tests.report.run.test_summary import SEEN


def values(table: Table) -> dict[str, Any]:
    return {row[0]: row[1] if len(row) == 2 else row[1:] for row in table.rows}


@pytest.mark.parametrize("run", sorted(samples.RUNS))
def test_rows_are_as_long_as_the_head(run: str) -> None:
    seen, _, verdicts, _, _ = samples.RUNS[run]()
    for table in (
        tables.tabulate_step(seen),
        tables.tabulate_parts(seen),
        tables.tabulate_rungs(verdicts),
        tables.tabulate_environment(samples.ENVIRONMENT_RECORD),
    ):
        assert {len(row) for row in table.rows} <= {len(table.head)}
        assert all(column < len(table.head) for column in table.numeric)
        assert all(type(cell) is str for row in table.rows for cell in row)


def test_one_time_costs_have_a_table_where_they_were_measured() -> None:
    assert tuple(tables.tabulate_one_time(SEEN).rows) == (), "an older file"
    once = {"workers": 3.21, "compile": 41.0, "rehearsal": None, "new_cause": 0.1, "cache_fill": 0.0}
    table = tables.tabulate_one_time(dataclasses.replace(SEEN, one_time_s=once))
    assert tuple(table.rows) == (
        ("compile", "41 s"),
        ("workers", "3.2 s"),
        ("rehearsal", "n/a"),
        ("new cause", "0.1 s"),
    )
    assert "Not included in any figure of the step" in table.note
    again = {"compilation": {"ms_per_step": 60.0}}
    table = tables.tabulate_one_time(dataclasses.replace(SEEN, one_time_s=once, evidence=again))
    assert "took 60 ms of each" in table.note


def test_the_parts_tile_the_step_and_the_host_is_a_column_of_its_own() -> None:
    seen = samples.resnet50().seen
    table = tables.tabulate_parts(seen)
    found = values(table)
    assert list(summary.STYLES) == list(PARTS) and len(table.rows) == len(PARTS) + 1
    assert found["waiting for data"] == ("169.600", "85.9", "169.800")
    assert found["the step"] == ("197.500", "100.0", "-"), "host durations are never summed"
    assert "never added" in table.note


def test_unknown_parts_are_na_and_never_0() -> None:
    found = values(tables.tabulate_parts(Measurement()))
    assert set(found.values()) == {("n/a", "n/a", "n/a")} and "the step" not in found
    found = values(tables.tabulate_parts(dataclasses.replace(SEEN, parts_ms={"forward": 0.0, "h2d": float("nan")})))
    assert "sum of the known parts" in found and "the step" not in found, "parts are missing"
    assert found["forward"] == ("0.000", "0.0", "n/a") and found["copy to the device"] == ("n/a", "n/a", "n/a")


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(1.0, 4.0, "25.0"), (None, 4.0, "n/a"), (1.0, None, "n/a"), (1.0, 0.0, "n/a"), (1.0, float("nan"), "n/a")],
)
def test_shares(part: float | None, whole: float | None, text: str) -> None:
    assert tables.format_percent(part, whole) == text


def test_steps_that_nobody_watched_are_not_counted() -> None:
    assert values(tables.tabulate_step(Measurement(total_steps=None)))["steps in the window"] == "n/a"
    assert values(tables.tabulate_step(Measurement(total_steps=3)))["steps in the window"].startswith("0 of 3")


def test_what_adding_up_leaves_over_has_no_sign() -> None:
    seen = dataclasses.replace(SEEN, parts_ms={"forward": 10.0, "unexplained": -3e-15})
    assert values(tables.tabulate_parts(seen))["unexplained"][:2] == ("0.000", "0.0")


def test_rungs() -> None:
    table = tables.tabulate_rungs([Verdict(rung="amp", took=None, why="x")])
    assert tuple(table.rows) == (("amp", "unknown", "x", "exact"),) and table.note == ""
    assert tables.tabulate_rungs([]).note == "None is switched on."


def test_losses() -> None:
    assert tables.describe_losses(SEEN) == (
        "mean of the first fifth 2.0000, of the last fifth 1.0000 (2 points in measurement.json)",
    )
    thinned = dataclasses.replace(SEEN, loss=(1.0, float("nan")), loss_every=7)
    said, warning = tables.describe_losses(thinned)
    assert "one of every 7 steps" in said and warning == "1 of them are not finite numbers."
    assert tables.describe_losses(Measurement()) == ("n/a",)
    assert tables.describe_losses(Measurement(loss=(0.71,))) == ("0.7100 (1 point in measurement.json)",)


def test_the_environment() -> None:
    found = values(tables.tabulate_environment(samples.ENVIRONMENT_RECORD))
    assert found["GPUs"] == "NVIDIA H200" and found["CPU"] == "Some CPU" and found["driver"] == "580.159.04"
    assert found["commit"] == "0123abc, with changes" and found["torch"] == "2.11.0"
    assert values(tables.tabulate_environment(Environment())) == {
        "GPUs": "none",
        "CPUs usable": "n/a",
        "commit": "n/a",
        "float32 matrix products": "n/a",
    }


def test_long_names_lose_their_middle() -> None:
    name = "a" * 500 + "b" * 500
    assert len(tables.cut(name)) <= tables.NAME_LETTERS and tables.cut(name).startswith("aaa")
    assert tables.cut(name).endswith("bbb") and tables.cut("short") == "short"
