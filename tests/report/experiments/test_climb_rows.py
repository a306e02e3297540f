"""A climb's attempts as rates."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.records.climb import ClimbFile
from fastloop.records.store import decode
from fastloop.report.experiments import climb_rows
from tests.report.made_experiments import CLIMBS, climb, rung


def opened(content: dict[str, Any]) -> ClimbFile:
    """As a report reads it from its file."""
    found = decode(content, ClimbFile)
    assert found is not None
    return found


def test_milliseconds_become_rates_of_the_same_samples() -> None:
    workers, pin, *_ = climb_rows.list_steps(opened(CLIMBS["climbed"]()))
    assert workers.kept and workers.name == "workers" and workers.rate == pytest.approx(256_000 / 183)
    assert workers.predicted == pytest.approx(256_000 / 153) and workers.saved_ms == 560
    assert workers.ends == pytest.approx((256_000 / 187, 256_000 / 179)), "more saved is a higher rate"
    assert pin.predicted == pytest.approx(256_000 / 177)


def test_what_is_not_known_is_none() -> None:
    content = climb([rung("amp", 700.0, None, kept=False)], 743.0)
    (step,) = climb_rows.list_steps(opened(content))
    assert (step.rate, step.predicted, step.ends, step.saved_ms, step.kept) == (None, None, None, None, False)
    assert climb_rows.list_steps(opened({})) == [] and climb_rows.count_samples_per_step(opened({})) is None
    (nothing,) = climb_rows.list_steps(opened({"rungs": [{"rung": "amp", "step_ms_after": 3.0}]}))
    assert nothing.rate is None, "milliseconds alone make no rate"


@pytest.mark.parametrize("saved", [743.0, 800.0])
def test_a_prediction_that_leaves_no_step_is_no_rate(saved: float) -> None:
    (step,) = climb_rows.list_steps(opened(climb([rung("amp", 743.0, 10.0, predicted=saved)], 733.0)))
    assert step.predicted is None and step.rate is not None


def test_without_a_naive_start_the_top_gives_the_samples() -> None:
    content = climb([], 100.0) | {"naive": {"samples_per_s": None, "step_ms": 200.0}}
    start = opened(content)
    assert climb_rows.compute_rate(start, start.naive) == pytest.approx(1280.0)
    assert climb_rows.compute_rate(start, start.top) == pytest.approx(2560.0)


def test_ceilings_are_sorted_and_those_not_measured_left_out() -> None:
    content = {"ceilings_samples_per_s": {"replayed": 20.0, "resident": 10.0, "no_exchange": None, "other": 3.0}}
    assert climb_rows.list_ceilings(opened(content)) == [("resident batch", 10.0), ("replayed batches", 20.0)]


def test_how_far_off_the_predictions_were() -> None:
    rows = [rung("a", 9, 1.0, prediction_error_pct=error) for error in (-30.0, 10.0, None, 20.0)]
    assert (
        climb_rows.compute_median_error_pct(opened({"rungs": rows})) == 20.0
        and climb_rows.compute_median_error_pct(opened({"rungs": [{}]})) is None
    )


def test_the_table_holds_figures_parity_and_outcome() -> None:
    table = climb_rows.make_table(opened(CLIMBS["climbed"]()))
    assert table.rows[0] == (
        "workers (compute)",
        "743 to 183",
        "590",
        "560",
        "556 to 564",
        "+5",
        "exact, passed",
        "kept: looks faster, ledger and gradient hold",
    )
    assert table.rows[3][1:6] == ("167 to n/a", "30", "n/a", "n/a", "n/a")
    assert table.rows[3][7].startswith("rolled back: no graph was compiled")
    assert table.rows[6][6] == "approximate, FAILED" and "optimistic" in table.note
    assert climb_rows.make_table(opened({})).note == "n/a: no rung was tried."
