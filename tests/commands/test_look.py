"""Predictions of single rungs on a machine that is made up, and the numbers that are tuned first."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.commands.candidates import Candidate, Known, Start
from fastloop.commands.look import Look, Scene, predicted, queued, tuned
from fastloop.commands.stack import Stack, patch
from fastloop.predict import Costs
from fastloop.stats import Pool
from tests.commands.made_up_lab import BATCH, MICRO, Machine, MadeUpLab

START = Start(on_cuda=True, micro_batch=MICRO, rank_batch=BATCH)
WORKERS = Candidate(rung="workers", key="workers", patches=(patch("workers"),), component="loader", tunes="workers")
AMP = Candidate(rung="amp", key="amp", patches=(patch("amp"),))


def scene(lab: MadeUpLab, stack: Stack | None = None, **changes: Any) -> Scene:
    """With the costs of the machine as its trials would measure them."""
    machine, stack = lab.machine, stack or {}
    costs = Costs(now_ms=machine.step_ms(stack, "as_it_is"), replayed_ms=machine.step_ms(stack, "replayed"),
                  resident_ms=machine.step_ms(stack, "resident"), loader_ms=machine.loader_ms(stack),
                  workers=machine.workers(stack))  # fmt: skip
    known = Known(start=START, costs=costs.but(**changes), stack=stack)
    return Scene(lab=lab, known=known, warmup=20, start_s=12.0, pool=Pool())


@pytest.mark.parametrize("candidate", [WORKERS, AMP], ids=lambda candidate: candidate.rung)
def test_one_trial_of_the_cost_that_changes(candidate: Candidate) -> None:
    lab = MadeUpLab(Machine(noise=0.0))
    here = scene(lab)
    look = predicted(here, candidate, "01-x")
    stack: Stack = {candidate.rung: {"enabled": True}}
    truth = lab.machine.step_ms({}, "as_it_is") - lab.machine.step_ms(stack, "as_it_is")
    assert look.ended is None and look.saved_ms == pytest.approx(truth, abs=1e-6)
    assert [ask.variation for _, ask in lab.asks.values()] == [candidate.component]
    assert look.parity_class == ("exact" if candidate is WORKERS else "approximate" if candidate is AMP else None)


def test_the_better_of_two_ways_wins() -> None:
    lab = MadeUpLab(Machine(noise=0.0, factors={"amp": 0.5, "fused": 0.8}))
    both = Candidate(rung="amp", key="x", patches=(patch("fused"), patch("amp")))
    assert predicted(scene(lab, {"workers": {"enabled": True}}), both, "01-x").patch == patch("amp")
    first = Candidate(rung="amp", key="x", patches=(patch("fused"), patch("amp")), every=False)
    lab.ran.clear()
    assert predicted(scene(lab), first, "02-x").patch == patch("fused")
    assert lab.ran == ["02-x/predict-1"], "the second is only for when the first does not run"


def test_what_does_not_fit_is_followed_by_what_may() -> None:
    lab = MadeUpLab(Machine(crashes={"batch": "out of memory"}))
    sizes = Candidate(rung="batch", key="batch", patches=(patch("batch"), patch("fused")), every=False)
    look = predicted(scene(lab), sizes, "01-x")
    assert look.ended is None and look.patch == patch("fused") and len(lab.ran) == 2
    nothing = Candidate(rung="batch", key="batch", patches=(patch("batch"),), every=False)
    assert predicted(scene(lab), nothing, "02-x").why == "out of memory"


@pytest.mark.parametrize(
    ("machine", "ended", "why"),
    [
        pytest.param(Machine(crashes={"amp": "exit code 1"}), "crashed", "exit code 1", id="crashed"),
        pytest.param(Machine(planned_off={"amp": "yours stands"}), "inactive", "yours stands", id="skipped"),
        pytest.param(Machine(classes={"amp": "changes-training"}), "class", "--allow", id="another training"),
    ],
)
def test_what_rules_a_rung_out_before_it_is_screened(machine: Machine, ended: str, why: str) -> None:
    look = predicted(scene(MadeUpLab(machine)), AMP, "01-amp")
    assert look.ended == ended and why in look.why


def test_a_gap_between_epochs_is_known_already() -> None:
    lab = MadeUpLab(Machine())
    gap = Candidate(rung="workers", key="x", patches=(patch("workers", persistent=True),), component="gap")
    look = predicted(scene(lab, outside_ms=50.0, gap_ms=30.0), gap, "01-x")
    assert look.saved_ms == pytest.approx(30) and lab.ran == []


# -- tuning -----------------------------------------------------------------------------------------------------------


def test_workers_are_counted_where_loading_binds() -> None:
    lab = MadeUpLab(Machine(noise=0.0, device_ms=50.0), best={"workers": 12})
    here = scene(lab)
    look = tuned(here, WORKERS, predicted(here, WORKERS, "01-workers"), "01-workers")
    assert look.tuned == {"rungs.workers.count": 12}
    assert look.patch == {"rungs": {"workers": {"enabled": True, "count": 12}}}
    assert look.then is not None and look.then.loader_ms == pytest.approx(700 / 12)
    assert lab.ran == ["01-workers/predict-1", "01-workers/tune", "01-workers/predict-tuned"]


def test_workers_are_not_counted_where_they_keep_up_anyway() -> None:
    lab = MadeUpLab(Machine(noise=0.0, device_ms=500.0), best={"workers": 12})
    here = scene(lab)
    look = tuned(here, WORKERS, predicted(here, WORKERS, "01-workers"), "01-workers")
    assert look.tuned is None and lab.ran == ["01-workers/predict-1"]


def test_counting_anew_needs_a_better_number() -> None:
    lab = MadeUpLab(Machine(noise=0.0, device_ms=50.0))
    again = Candidate(rung="workers", key="workers-count", patches=(), component="loader", tunes="workers")
    here = scene(lab, {"workers": {"enabled": True}})
    look = tuned(here, again, predicted(here, again, "03-x"), "03-x")
    assert look.ended == "small" and look.why == "made up"
    lab.best = {"workers": 12}
    lab.done.clear()
    look = tuned(here, again, predicted(here, again, "04-x"), "04-x")
    truth = lab.machine.step_ms(here.known.stack, "as_it_is") - lab.machine.step_ms(
        {"workers": {"count": 12}}, "as_it_is")  # fmt: skip
    assert look.saved_ms == pytest.approx(truth, abs=1e-6)


def test_what_is_ruled_out_is_not_tuned() -> None:
    lab = MadeUpLab(Machine(), best={"workers": 12})
    out = Look(patch=patch("workers"), ended="crashed", then=Costs(now_ms=1))
    assert tuned(scene(lab), WORKERS, out, "01-x") is out and lab.ran == []


def test_queues_count_workers_and_the_device() -> None:
    assert queued({}, 0) == 0 and queued({"workers": {}}, 8) == 16
    assert queued({"workers": {"prefetch_factor": 4}, "prefetch": {"depth": 3}}, 2) == 11
