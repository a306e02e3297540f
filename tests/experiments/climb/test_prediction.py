"""Predictions of single rungs on a machine that is made up, and the numbers that are tuned first."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.experiments.climb.candidates import Candidate, Position, Start, count_queued, make_patch
from fastloop.experiments.climb.interface import Result
from fastloop.experiments.climb.prediction import Context, Prediction, predict, tune_number
from fastloop.judge.statistics import Pool
from fastloop.records.card import Stack, Variant
from fastloop.records.climb import Costs
from tests.experiments.simulated_runner import BATCH, MICRO, START_S, Machine, SimulatedRunner

START = Start(on_cuda=True, cpus=12, micro_batch=MICRO, rank_batch=BATCH)
WORKERS = Candidate(
    rung="workers", key="workers", patches=(make_patch("workers"),), way=Variant(changes="loader", tune=True)
)
AMP = Candidate(rung="amp", key="amp", patches=(make_patch("amp"),))


def scene(runner: SimulatedRunner, stack: Stack | None = None, **changes: Any) -> Context:
    """With the costs of the machine as its trials would measure them."""
    machine, stack = runner.machine, stack or {}
    costs = Costs(
        now_ms=machine.step_ms(stack, "as_it_is"),
        replayed_ms=machine.step_ms(stack, "replayed"),
        resident_ms=machine.step_ms(stack, "resident"),
        loader_ms=machine.loader_ms(stack),
        workers=machine.workers(stack),
    )
    known = Position(start=START, costs=costs.but(**changes), stack=stack)
    return Context(runner=runner, known=known, warmup=20, start_s=12.0, pool=Pool())


@pytest.mark.parametrize("rung", ["amp", "pin"])
def test_one_trial_of_the_cost_that_changes(rung: str) -> None:
    runner = SimulatedRunner(Machine(noise=0.0))
    here = scene(runner)
    prediction = predict(here, Candidate(rung=rung, key=rung, patches=(make_patch(rung),)), "01-x")
    stack: Stack = {rung: {"enabled": True}}
    truth = runner.machine.step_ms({}, "as_it_is") - runner.machine.step_ms(stack, "as_it_is")
    assert prediction.ended is None and prediction.saved_ms == pytest.approx(truth, abs=1e-6)
    assert [ask.variation for _, ask in runner.asks.values()] == ["replayed"]
    assert prediction.parity_class == ("approximate" if rung == "amp" else "exact")


def test_a_trial_that_is_hopeless_ends_early_and_is_no_crash() -> None:
    runner = SimulatedRunner(Machine(noise=0.0, factors={"amp": 10.0}))
    prediction = predict(scene(runner), AMP, "01-x")
    assert prediction.ended == "small" and prediction.why == "too slow"
    assert (prediction.saved_ms or 0.0) < 0 and runner.seconds["01-x/predict-1"] == START_S


@pytest.mark.parametrize("rung", ["amp", "pin"])
def test_beside_workers_the_trial_has_them_beside_it_too(rung: str) -> None:
    """Twelve processes that load leave a training thread less than a trial on replayed batches would show."""
    runner, stack = SimulatedRunner(Machine(noise=0.0, crowding=1.4)), {"workers": {"enabled": True, "count": 12}}
    here = scene(runner, stack, replayed_ms=1.4 * 140)
    prediction = predict(here, Candidate(rung=rung, key=rung, patches=(make_patch(rung),)), "01-x")
    after: Stack = {**stack, rung: {"enabled": True}}
    truth = runner.machine.step_ms(stack, "as_it_is") - runner.machine.step_ms(after, "as_it_is")
    assert prediction.saved_ms == pytest.approx(truth, abs=1e-6)
    assert [ask.variation for _, ask in runner.asks.values()] == ["as_it_is"]
    replayed = runner.machine.step_ms(stack, "replayed") - runner.machine.step_ms(after, "replayed")
    assert abs(replayed - truth) > 0.2 * truth, "the control: without workers it would have saved less"


def test_the_better_of_two_ways_wins() -> None:
    runner = SimulatedRunner(Machine(noise=0.0, factors={"amp": 0.5, "fused": 0.8}))
    both = Candidate(rung="amp", key="x", patches=(make_patch("fused"), make_patch("amp")))
    assert predict(scene(runner, {"workers": {"enabled": True}}), both, "01-x").patch == make_patch("amp")
    first = Candidate(rung="amp", key="x", patches=(make_patch("fused"), make_patch("amp")), way=Variant(every=False))
    runner.ran.clear()
    assert predict(scene(runner), first, "02-x").patch == make_patch("fused")
    assert runner.ran == ["02-x/predict-1"], "the second is only for when the first does not run"


def test_what_does_not_fit_is_followed_by_what_may() -> None:
    runner = SimulatedRunner(Machine(crashes={"batch": "out of memory"}))
    sizes = Candidate(
        rung="batch", key="batch", patches=(make_patch("batch"), make_patch("fused")), way=Variant(every=False)
    )
    prediction = predict(scene(runner), sizes, "01-x")
    assert prediction.ended is None and prediction.patch == make_patch("fused") and len(runner.ran) == 2
    nothing = Candidate(rung="batch", key="batch", patches=(make_patch("batch"),), way=Variant(every=False))
    assert predict(scene(runner), nothing, "02-x").why == "out of memory"


@pytest.mark.parametrize(
    ("machine", "ended", "why"),
    [
        pytest.param(Machine(crashes={"amp": "exit code 1"}), "crashed", "exit code 1", id="crashed"),
        pytest.param(Machine(planned_off={"amp": "yours stands"}), "inactive", "yours stands", id="skipped"),
        pytest.param(Machine(classes={"amp": "changes-training"}), "class", "--allow", id="another training"),
    ],
)
def test_what_rules_a_rung_out_before_it_is_screened(machine: Machine, ended: str, why: str) -> None:
    prediction = predict(scene(SimulatedRunner(machine)), AMP, "01-amp")
    assert prediction.ended == ended and why in prediction.why


def test_a_gap_between_epochs_is_known_already() -> None:
    runner = SimulatedRunner(Machine())
    gap = Candidate(
        rung="workers", key="x", patches=(make_patch("workers", persistent=True),), way=Variant(changes="gap")
    )
    prediction = predict(scene(runner, outside_ms=50.0, gap_ms=30.0), gap, "01-x")
    assert prediction.saved_ms == pytest.approx(30) and runner.ran == []


# -- tuning -----------------------------------------------------------------------------------------------------------


DEEP = Candidate(rung="prefetch", key="prefetch", patches=(make_patch("prefetch"),), way=Variant(tune=True))


class _Copies(SimulatedRunner):
    """Copies of which two batches ahead hide half, and four hide all but a little."""

    def _train(self, at: str, stack: Stack, ask: Any) -> Result:
        depth = stack.get("prefetch", {}).get("depth", 2)
        self.machine.idle = {"prefetch": "made up"}
        self.machine.copy_ms = {2: 10.0, 4: 1.0}[int(depth)] if "prefetch" in stack else 20.0
        self.machine.idle = {} if "prefetch" not in stack else self.machine.idle
        return super()._train(at, stack, ask)


def feeding(runner: SimulatedRunner, **changes: Any) -> tuple[Context, Prediction]:
    here = scene(runner, {"workers": {"enabled": True, "count": 12}}, **changes)
    return here, predict(here, DEEP, "01-x")


def test_more_is_copied_ahead_where_copies_still_show() -> None:
    runner = _Copies(Machine(noise=0.0, copy_ms=20.0))
    here, prediction = feeding(runner)
    deep = tune_number(here, DEEP, prediction, "01-x")
    assert deep.patch == make_patch("prefetch", depth=4) and deep.tuned == {"rungs.prefetch.depth": 4}
    assert (prediction.saved_ms, deep.saved_ms) == (pytest.approx(10), pytest.approx(19))
    assert runner.ran == ["01-x/predict-1", "01-x/predict-deeper"], "no training for it"


def test_nothing_is_searched_where_the_default_hides_all_copies() -> None:
    runner = SimulatedRunner(Machine(noise=0.0, copy_ms=20.0))
    here, prediction = feeding(runner)
    assert tune_number(here, DEEP, prediction, "01-x") is prediction and runner.ran == ["01-x/predict-1"]


def test_nothing_is_searched_where_hiding_copies_would_gain_nothing() -> None:
    """What two batches ahead leave is 8 % of a step without loading; but loading is what the step takes."""
    runner = _Copies(Machine(noise=0.0, copy_ms=20.0))
    here, prediction = feeding(runner, now_ms=700.0, loader_ms=700.0)
    assert prediction.then is not None and prediction.then.replayed_ms == pytest.approx(140)
    assert tune_number(here, DEEP, prediction, "01-x") is prediction and runner.ran == ["01-x/predict-1"]


def test_four_ahead_are_not_taken_where_two_do_as_well() -> None:
    class Same(_Copies):
        def _train(self, at: str, stack: Stack, ask: Any) -> Result:
            ahead = {key: {"enabled": True} if key == "prefetch" else value for key, value in stack.items()}
            return super()._train(at, ahead, ask)

    runner = Same(Machine(noise=0.0, copy_ms=20.0))
    here, prediction = feeding(runner)
    kept = tune_number(here, DEEP, prediction, "01-x")
    assert kept.patch == prediction.patch and kept.tuned == {"rungs.prefetch.depth": 2}


def test_a_search_trains_nothing_that_is_known() -> None:
    runner = SimulatedRunner(Machine(noise=0.0, factors={"batch": 0.7}), best={"batch": 128})
    here = scene(runner, {"workers": {"enabled": True, "count": 12}})
    sizes = Candidate(
        rung="batch", key="batch", patches=(make_patch("batch", micro_batch=256),), way=Variant(every=False, tune=True)
    )
    tune_number(here, sizes, predict(here, sizes, "01-x"), "01-x")
    given = runner.given["01-x/tune"]
    assert (given.micro, given.window, given.beside) == (MICRO, BATCH // MICRO, True)
    assert given.ms == {MICRO: pytest.approx(140), BATCH: pytest.approx(0.7 * 130 + 10)}
    here = scene(runner, {"workers": {"enabled": True, "count": 12}}, loader_ms=120.0)
    tune_number(here, sizes, predict(here, sizes, "02-x"), "02-x")
    assert runner.given["02-x/tune"].ms == {MICRO: pytest.approx(140), BATCH: pytest.approx(120)}, (
        "loading is the limit"
    )


def test_what_is_ruled_out_is_not_tuned() -> None:
    runner = SimulatedRunner(Machine())
    out = Prediction(patch=make_patch("prefetch"), ended="crashed", then=Costs(now_ms=1))
    assert tune_number(scene(runner), DEEP, out, "01-x") is out and runner.ran == []


def test_queues_count_workers_and_the_device() -> None:
    assert count_queued({}, 0) == 0 and count_queued({"workers": {}}, 8) == 16
    assert count_queued({"workers": {"prefetch_factor": 4}, "prefetch": {"depth": 3}}, 2) == 11
