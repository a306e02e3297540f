"""What a change would save: checked against pipelines whose truth is known."""

from __future__ import annotations

import pytest

from fastloop.judge.prediction import compute_ceilings_ms, compute_error_pct, drop_absurd, predict_ms, predict_saved_ms
from fastloop.records.climb import Costs


def truth(rest: float, loader: float, host: float, workers: int) -> float:
    """A step of a pipeline: loading beside it, or in the thread that also launches the rest."""
    return max(rest, loader) if workers else max(rest, loader + host)


def costs(rest: float, loader: float, host: float, workers: int = 0, **more: float) -> Costs:
    """As trials would have measured them."""
    return Costs(now_ms=truth(rest, loader, host, workers), replayed_ms=rest, loader_ms=loader, workers=workers, **more)


# -- one cost changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((130, 700, 40, 0), (130, 88, 40, 8), id="workers instead of a slow loader"),
        pytest.param((130, 700, 40, 0), (60, 700, 40, 0), id="a faster device behind a slow loader"),
        pytest.param((130, 88, 40, 8), (60, 88, 40, 8), id="a faster device until loading binds"),
        pytest.param((130, 40, 40, 8), (60, 40, 40, 8), id="a faster device that loading keeps up with"),
        pytest.param((60, 88, 40, 8), (60, 44, 40, 12), id="more workers"),
        pytest.param((1579, 5, 100, 0), (600, 5, 100, 0), id="a device that never waits"),
        pytest.param((300, 200, 300, 0), (200, 200, 200, 0), id="no device: one after the other"),
    ],
)
def test_a_pipeline_as_it_will_be(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    now, then = costs(*before), costs(*after)
    assert predict_saved_ms(now, then) == pytest.approx(truth(*before) - truth(*after), rel=0.01)


def test_the_share_of_a_part_would_have_said_something_else() -> None:
    """The negative control: loading is hidden behind the device, so nothing comes of halving it."""
    now = costs(130, 100, 40, 8)
    assert predict_saved_ms(now, now.but(loader_ms=50.0)) == 0
    assert predict_saved_ms(now, now.but(replayed_ms=65.0)) == pytest.approx(30), "half the device's time is 65 ms"


def test_what_the_parts_do_not_explain_stays_in_proportion() -> None:
    now = costs(100, 50, 40, 8).but(now_ms=120)
    assert predict_ms(now, now.but(replayed_ms=80)) == pytest.approx(96)
    assert predict_ms(now, now.but(replayed_ms=10)) == pytest.approx(60), "loading, too, takes longer in company"


def test_what_lies_outside_of_the_step_stays() -> None:
    now = costs(100, 10, 40, 8).but(now_ms=130, outside_ms=30, gap_ms=20)
    assert predict_ms(now, now.but(replayed_ms=50)) == pytest.approx(80)
    assert predict_saved_ms(now, now.but(outside_ms=10, gap_ms=0)) == pytest.approx(20)


def test_the_loader_is_read_off_the_step_where_nobody_asked_it() -> None:
    one_thread = Costs(now_ms=500, replayed_ms=300)
    assert predict_ms(one_thread, one_thread.but(replayed_ms=200)) == pytest.approx(400)
    beside = Costs(now_ms=500, replayed_ms=300, workers=4)
    assert predict_ms(beside, beside.but(replayed_ms=200)) == pytest.approx(500), "loading is all of the step"
    hidden = Costs(now_ms=300, replayed_ms=300, workers=4)
    assert predict_ms(hidden, hidden.but(replayed_ms=200)) == pytest.approx(200)


@pytest.mark.parametrize(
    ("now", "changes"),
    [
        (Costs(now_ms=100), {"replayed_ms": 50.0}),
        (Costs(now_ms=100, replayed_ms=90), {"replayed_ms": None}),
        (Costs(now_ms=100, replayed_ms=50), {"workers": 4}),
    ],
)
def test_what_is_unknown_is_not_predicted(now: Costs, changes: dict[str, float]) -> None:
    assert predict_saved_ms(now, now.but(**changes)) is None


def test_parts_that_take_longer_than_the_whole_are_not_known() -> None:
    near = Costs(now_ms=100, outside_ms=20, replayed_ms=83, resident_ms=86, alone_ms=70, mfu=0.3)
    assert drop_absurd(near) == near
    assert drop_absurd(near.but(resident_ms=90)) == near.but(resident_ms=None)
    assert drop_absurd(near.but(alone_ms=90)) == near.but(alone_ms=None)
    assert drop_absurd(near.but(replayed_ms=None, alone_ms=90)).alone_ms is None, "then the run is the measure"
    assert drop_absurd(near.but(replayed_ms=90)) == Costs(now_ms=100, outside_ms=20)


# -- ceilings ---------------------------------------------------------------------------------------------------------


def test_ceilings_of_a_start_that_waits_for_data() -> None:
    found = compute_ceilings_ms(costs(130, 700, 40).but(resident_ms=120))
    assert found == pytest.approx({"feed": 620, "compute": 40}, rel=1e-3)


def test_ceilings_of_a_start_that_computes() -> None:
    found = compute_ceilings_ms(costs(1579, 5, 100).but(resident_ms=1580, mfu=0.037))
    assert found["feed"] == 0 and found["compute"] == pytest.approx(1579 * (1 - 0.037))


def test_the_exchange_counts_as_far_as_it_shows() -> None:
    assert compute_ceilings_ms(costs(100, 50, 20, 8).but(alone_ms=80))["sync"] == pytest.approx(20)
    assert compute_ceilings_ms(costs(100, 95, 20, 8).but(alone_ms=80))["sync"] == pytest.approx(5), "then loading binds"
    assert "sync" not in compute_ceilings_ms(costs(100, 50, 20, 8))


def test_without_trials_only_computing_is_open() -> None:
    assert compute_ceilings_ms(Costs(now_ms=100, outside_ms=10)) == {"compute": 90}


# -- scores -----------------------------------------------------------------------------------------------------------


def test_predictions_are_scored_on_what_was_saved() -> None:
    assert compute_error_pct(44, 40) == pytest.approx(10) and compute_error_pct(0, -4) == 100
    assert (
        compute_error_pct(None, 40) is None and compute_error_pct(44, 0) is None and compute_error_pct(44, None) is None
    )
