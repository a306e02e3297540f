"""Predictions of single rungs on a machine that is made up, and the numbers that are tuned first."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.commands.candidates import Candidate, Known, Start
from fastloop.commands.lab import Seen
from fastloop.commands.look import Look, Scene, predicted, queued, tuned
from fastloop.commands.stack import Stack, patch
from fastloop.predict import Costs
from fastloop.stats import Pool
from tests.commands.made_up_lab import BATCH, MICRO, Machine, MadeUpLab

START = Start(on_cuda=True, cpus=12, micro_batch=MICRO, rank_batch=BATCH)
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


@pytest.mark.parametrize("rung", ["amp", "pin"])
def test_one_trial_of_the_cost_that_changes(rung: str) -> None:
    lab = MadeUpLab(Machine(noise=0.0))
    here = scene(lab)
    look = predicted(here, Candidate(rung=rung, key=rung, patches=(patch(rung),)), "01-x")
    stack: Stack = {rung: {"enabled": True}}
    truth = lab.machine.step_ms({}, "as_it_is") - lab.machine.step_ms(stack, "as_it_is")
    assert look.ended is None and look.saved_ms == pytest.approx(truth, abs=1e-6)
    assert [ask.variation for _, ask in lab.asks.values()] == ["replayed"]
    assert look.parity_class == ("approximate" if rung == "amp" else "exact")


@pytest.mark.parametrize("rung", ["amp", "pin"])
def test_beside_workers_the_trial_has_them_beside_it_too(rung: str) -> None:
    """Twelve processes that load leave a training thread less than a trial on replayed batches would show."""
    lab, stack = MadeUpLab(Machine(noise=0.0, crowding=1.4)), {"workers": {"enabled": True, "count": 12}}
    here = scene(lab, stack, replayed_ms=1.4 * 140)
    look = predicted(here, Candidate(rung=rung, key=rung, patches=(patch(rung),)), "01-x")
    after: Stack = {**stack, rung: {"enabled": True}}
    truth = lab.machine.step_ms(stack, "as_it_is") - lab.machine.step_ms(after, "as_it_is")
    assert look.saved_ms == pytest.approx(truth, abs=1e-6)
    assert [ask.variation for _, ask in lab.asks.values()] == ["as_it_is"]
    replayed = lab.machine.step_ms(stack, "replayed") - lab.machine.step_ms(after, "replayed")
    assert abs(replayed - truth) > 0.2 * truth, "the control: without workers it would have saved less"


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


DEEP = Candidate(rung="prefetch", key="prefetch", patches=(patch("prefetch"),), tunes="prefetch")


class _Copies(MadeUpLab):
    """Copies of which two batches ahead hide half, and four hide all but a little."""

    def _train(self, at: str, stack: Stack, ask: Any) -> Seen:
        depth = stack.get("prefetch", {}).get("depth", 2)
        self.machine.idle = {"prefetch": "made up"}
        self.machine.copy_ms = {2: 10.0, 4: 1.0}[int(depth)] if "prefetch" in stack else 20.0
        self.machine.idle = {} if "prefetch" not in stack else self.machine.idle
        return super()._train(at, stack, ask)


def feeding(lab: MadeUpLab, **changes: Any) -> tuple[Scene, Look]:
    here = scene(lab, {"workers": {"enabled": True, "count": 12}}, **changes)
    return here, predicted(here, DEEP, "01-x")


def test_more_is_copied_ahead_where_copies_still_show() -> None:
    lab = _Copies(Machine(noise=0.0, copy_ms=20.0))
    here, look = feeding(lab)
    deep = tuned(here, DEEP, look, "01-x")
    assert deep.patch == patch("prefetch", depth=4) and deep.tuned == {"rungs.prefetch.depth": 4}
    assert (look.saved_ms, deep.saved_ms) == (pytest.approx(10), pytest.approx(19))
    assert lab.ran == ["01-x/predict-1", "01-x/predict-deeper"], "no training for it"


def test_nothing_is_searched_where_the_default_hides_all_copies() -> None:
    lab = MadeUpLab(Machine(noise=0.0, copy_ms=20.0))
    here, look = feeding(lab)
    assert tuned(here, DEEP, look, "01-x") is look and lab.ran == ["01-x/predict-1"]


def test_nothing_is_searched_where_hiding_copies_would_gain_nothing() -> None:
    """What two batches ahead leave is 8 % of a step without loading; but loading is what the step takes."""
    lab = _Copies(Machine(noise=0.0, copy_ms=20.0))
    here, look = feeding(lab, now_ms=700.0, loader_ms=700.0)
    assert look.then is not None and look.then.replayed_ms == pytest.approx(140)
    assert tuned(here, DEEP, look, "01-x") is look and lab.ran == ["01-x/predict-1"]


def test_four_ahead_are_not_taken_where_two_do_as_well() -> None:
    class Same(_Copies):
        def _train(self, at: str, stack: Stack, ask: Any) -> Seen:
            ahead = {key: {"enabled": True} if key == "prefetch" else value for key, value in stack.items()}
            return super()._train(at, ahead, ask)

    lab = Same(Machine(noise=0.0, copy_ms=20.0))
    here, look = feeding(lab)
    kept = tuned(here, DEEP, look, "01-x")
    assert kept.patch == look.patch and kept.tuned == {"rungs.prefetch.depth": 2}


def test_a_search_trains_nothing_that_is_known() -> None:
    lab = MadeUpLab(Machine(noise=0.0, factors={"batch": 0.7}), best={"batch": 128})
    here = scene(lab, {"workers": {"enabled": True, "count": 12}})
    sizes = Candidate(rung="batch", key="batch", patches=(patch("batch", micro_batch=256),), every=False,
                      tunes="batch")  # fmt: skip
    tuned(here, sizes, predicted(here, sizes, "01-x"), "01-x")
    given = lab.given["01-x/tune"]
    assert (given.micro, given.window, given.beside) == (MICRO, BATCH // MICRO, True)
    assert given.ms == {MICRO: pytest.approx(140), BATCH: pytest.approx(0.7 * 130 + 10)}
    here = scene(lab, {"workers": {"enabled": True, "count": 12}}, loader_ms=120.0)
    tuned(here, sizes, predicted(here, sizes, "02-x"), "02-x")
    assert lab.given["02-x/tune"].ms == {MICRO: pytest.approx(140), BATCH: pytest.approx(120)}, "loading is the limit"


def test_what_is_ruled_out_is_not_tuned() -> None:
    lab = MadeUpLab(Machine())
    out = Look(patch=patch("prefetch"), ended="crashed", then=Costs(now_ms=1))
    assert tuned(scene(lab), DEEP, out, "01-x") is out and lab.ran == []


def test_queues_count_workers_and_the_device() -> None:
    assert queued({}, 0) == 0 and queued({"workers": {}}, 8) == 16
    assert queued({"workers": {"prefetch_factor": 4}, "prefetch": {"depth": 3}}, 2) == 11
