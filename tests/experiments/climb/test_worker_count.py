"""How many workers a climb takes, on machines that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.experiments.climb.candidates import Candidate, make_patch
from fastloop.experiments.climb.interface import Result
from fastloop.experiments.climb.prediction import Prediction, predict
from fastloop.experiments.climb.worker_count import add_workers, choose_worker_count
from fastloop.records.card import Stack, Variant
from tests.experiments.climb.test_prediction import AMP, WORKERS, scene
from tests.experiments.simulated_runner import Machine, SimulatedRunner

AGAIN = Candidate(rung="workers", key="workers-count", patches=(), way=Variant(changes="loader", tune=True))


def look(runner: SimulatedRunner, stack: Stack | None = None, **changes: Any) -> Prediction:
    return choose_worker_count(scene(runner, stack, **changes), WORKERS if stack is None else AGAIN, "01-workers")


def test_one_trial_tells_the_number_and_what_it_saves() -> None:
    runner = SimulatedRunner(Machine(noise=0.0))
    found = look(runner)
    assert runner.ran == ["01-workers/predict-1"], "nothing is trained for it"
    assert found.patch == make_patch("workers", count=8) and found.tuned == {"rungs.workers.count": 8}
    truth = runner.machine.step_ms({}, "as_it_is") - runner.machine.step_ms(found.patch["rungs"], "as_it_is")
    assert found.saved_ms == pytest.approx(truth, abs=1e-6) and found.then is not None
    assert found.then.loader_ms == pytest.approx(700 / 8) and found.then.workers == 8 and found.then.fill_read


def test_the_smallest_number_with_headroom_is_taken() -> None:
    for device_ms, count in ((240.0, 4), (260.0, 4), (500.0, 2), (1100.0, 1)):
        assert look(SimulatedRunner(Machine(noise=0.0, device_ms=device_ms, decode_ms=700))).tuned == {
            "rungs.workers.count": count
        }, device_ms


def test_counts_that_cannot_be_enough_are_not_asked() -> None:
    runner = SimulatedRunner(Machine(noise=0.0))
    look(runner)
    ((_, ask),) = runner.asks.values()
    assert ask.variation == "loader" and ask.counts == (4, 8, 12), "with 4 it takes 175 ms, and 140 would be too much"
    assert ask.enough_ms == pytest.approx(0.7 * 140 / 4), "others may make the rest faster yet"


def test_where_loading_stays_the_limit_the_two_best_are_trained_with() -> None:
    runner = _Crowded(Machine(noise=0.0, device_ms=30.0, host_ms=10.0))
    found = look(runner)
    assert runner.ran == ["01-workers/predict-1", "01-workers/count-8", "01-workers/count-12"]
    assert found.tuned == {"rungs.workers.count": 8}, "the trainings tell, not the loader alone"
    assert found.then is not None and [count for count, _ in found.then.loaders_ms] == [8], "and no rung takes 12 along"
    assert not any(ask.ledger for _, ask in runner.asks.values())


class _Crowded(SimulatedRunner):
    """Beside a training, twelve workers are in each other's way."""

    def _train(self, at: str, stack: Any, ask: Any) -> Result:
        self.machine.contention = 2.0 if stack.get("workers", {}).get("count") == 12 else 1.0
        return super()._train(at, stack, ask)


@pytest.mark.parametrize(
    ("changes", "ended", "why"),
    [
        ({"crashes": {"workers": "killed by SIGKILL"}}, "crashed", "killed by SIGKILL"),
        ({"planned_off": {"workers": "an iterable dataset"}}, "inactive", "an iterable dataset"),
    ],
    ids=["crashed", "inactive"],
)
def test_what_rules_workers_out(changes: Any, ended: str, why: str) -> None:
    runner = SimulatedRunner(Machine(**changes))
    found = look(runner)
    assert (found.ended, found.why) == (ended, why) and len(runner.ran) == 1


def test_a_loader_that_tells_nothing() -> None:
    class Silent(SimulatedRunner):
        def _train(self, at: str, stack: Any, ask: Any) -> Result:
            return Result(seconds=12.0)

    assert look(Silent(Machine())).why == "the loader could not be timed"


# -- once there are some ----------------------------------------------------------------------------------------------

KNOWN = tuple((count, 700 / count) for count in (2, 4, 8, 12))


def test_counting_anew_asks_no_loader_again() -> None:
    runner = SimulatedRunner(Machine(noise=0.0, device_ms=60.0))
    stack = {"workers": {"enabled": True, "count": 4}}
    found = look(runner, stack, loaders_ms=KNOWN)
    assert not any("predict" in at for at in runner.ran) and found.tuned == {"rungs.workers.count": 12}
    assert found.saved_ms == pytest.approx(700 / 4 - 70)
    same = look(
        SimulatedRunner(Machine(noise=0.0, device_ms=60.0)),
        {"workers": {"enabled": True, "count": 12}},
        loaders_ms=KNOWN,
    )
    assert same.ended == "small" and "it already has 12 workers" in same.why


def test_a_rung_that_loading_would_hold_up_takes_more_workers_along() -> None:
    runner = SimulatedRunner(Machine(noise=0.0, factors={"amp": 0.5}))
    here = scene(runner, {"workers": {"enabled": True, "count": 4}}, loaders_ms=KNOWN)
    alone = predict(here, AMP, "02-amp")
    assert alone.saved_ms == pytest.approx(0.0), "four workers take 175 ms, amp or not"
    both = add_workers(here, alone)
    assert both.patch == {"rungs": {"amp": {"enabled": True}, "workers": {"count": 12}}}
    assert both.tuned == {"rungs.workers.count": 12} and both.saved_ms == pytest.approx(700 / 4 - 75)
    truth = runner.machine.step_ms({**here.known.stack, "amp": {}, "workers": {"count": 12}}, "as_it_is")
    assert both.then is not None and both.then.loader_ms == pytest.approx(700 / 12) and truth == pytest.approx(75)


@pytest.mark.parametrize(
    ("stack", "loaders_ms"),
    [
        ({"workers": {"enabled": True, "count": 12}}, KNOWN),
        ({}, KNOWN),
        ({"workers": {"enabled": True}}, KNOWN),
        ({"workers": {"enabled": True, "count": 4}}, ()),
        ({"workers": {"enabled": True, "count": 4}}, ((8, 174.0),)),
    ],
    ids=["no more CPUs", "no workers", "not our number", "nothing is known", "more are no faster"],
)
def test_otherwise_a_rung_comes_alone(stack: Stack, loaders_ms: Any) -> None:
    runner = SimulatedRunner(Machine(noise=0.0, factors={"amp": 0.5}))
    here = scene(runner, stack, loaders_ms=loaders_ms)
    alone = predict(here, AMP, "02-amp")
    assert add_workers(here, alone) is alone


def test_a_patch_of_the_workers_is_left_as_it_is() -> None:
    runner = SimulatedRunner(Machine(noise=0.0))
    here = scene(runner, {"workers": {"enabled": True, "count": 4}}, loaders_ms=KNOWN, outside_ms=50.0, gap_ms=30.0)
    stay = Candidate(
        rung="workers", key="x", patches=(make_patch("workers", persistent=True),), way=Variant(changes="gap")
    )
    alone = predict(here, stay, "02-x")
    assert add_workers(here, alone) is alone and alone.patch == make_patch("workers", persistent=True)


def test_a_rung_that_loading_does_not_hold_up_comes_alone() -> None:
    runner = SimulatedRunner(Machine(noise=0.0, decode_ms=100.0, factors={"amp": 0.5}))
    here = scene(runner, {"workers": {"enabled": True, "count": 4}}, loaders_ms=((4, 25.0), (8, 12.5)))
    alone = predict(here, AMP, "02-amp")
    assert add_workers(here, alone) is alone
