"""How many workers a climb takes, on machines that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.commands.candidates import Candidate
from fastloop.commands.crew import counted, fed
from fastloop.commands.lab import Seen
from fastloop.commands.look import Look, predicted
from fastloop.commands.stack import Stack, patch
from tests.commands.made_up_lab import Machine, MadeUpLab
from tests.commands.test_look import AMP, WORKERS, scene

AGAIN = Candidate(rung="workers", key="workers-count", patches=(), component="loader", tunes="workers")


def look(lab: MadeUpLab, stack: Stack | None = None, **changes: Any) -> Look:
    return counted(scene(lab, stack, **changes), WORKERS if stack is None else AGAIN, "01-workers")


def test_one_trial_tells_the_number_and_what_it_saves() -> None:
    lab = MadeUpLab(Machine(noise=0.0))
    found = look(lab)
    assert lab.ran == ["01-workers/predict-1"], "nothing is trained for it"
    assert found.patch == patch("workers", count=8) and found.tuned == {"rungs.workers.count": 8}
    truth = lab.machine.step_ms({}, "as_it_is") - lab.machine.step_ms(found.patch["rungs"], "as_it_is")
    assert found.saved_ms == pytest.approx(truth, abs=1e-6) and found.then is not None
    assert found.then.loader_ms == pytest.approx(700 / 8) and found.then.workers == 8 and found.then.fill_read


def test_the_smallest_number_with_headroom_is_taken() -> None:
    for device_ms, count in ((240.0, 4), (260.0, 4), (500.0, 2), (1100.0, 1)):
        assert look(MadeUpLab(Machine(noise=0.0, device_ms=device_ms, decode_ms=700))).tuned \
            == {"rungs.workers.count": count}, device_ms  # fmt: skip


def test_counts_that_cannot_be_enough_are_not_asked() -> None:
    lab = MadeUpLab(Machine(noise=0.0))
    look(lab)
    ((_, ask),) = lab.asks.values()
    assert ask.variation == "loader" and ask.counts == (4, 8, 12), "with 4 it takes 175 ms, and 140 would be too much"
    assert ask.enough_ms == pytest.approx(0.7 * 140 / 4), "others may make the rest faster yet"


def test_where_loading_stays_the_limit_the_two_best_are_trained_with() -> None:
    lab = _Crowded(Machine(noise=0.0, device_ms=30.0, host_ms=10.0))
    found = look(lab)
    assert lab.ran == ["01-workers/predict-1", "01-workers/count-8", "01-workers/count-12"]
    assert found.tuned == {"rungs.workers.count": 8}, "the trainings tell, not the loader alone"
    assert found.then is not None and [count for count, _ in found.then.loaders_ms] == [8], "and no rung takes 12 along"
    assert not any(ask.ledger for _, ask in lab.asks.values())


class _Crowded(MadeUpLab):
    """Beside a training, twelve workers are in each other's way."""

    def _train(self, at: str, stack: Any, ask: Any) -> Seen:
        self.machine.contention = 2.0 if stack.get("workers", {}).get("count") == 12 else 1.0
        return super()._train(at, stack, ask)


@pytest.mark.parametrize(
    ("changes", "ended", "why"),
    [({"crashes": {"workers": "killed by SIGKILL"}}, "crashed", "killed by SIGKILL"),
     ({"planned_off": {"workers": "an iterable dataset"}}, "inactive", "an iterable dataset")],
    ids=["crashed", "inactive"],
)  # fmt: skip
def test_what_rules_workers_out(changes: Any, ended: str, why: str) -> None:
    lab = MadeUpLab(Machine(**changes))
    found = look(lab)
    assert (found.ended, found.why) == (ended, why) and len(lab.ran) == 1


def test_a_loader_that_tells_nothing() -> None:
    class Silent(MadeUpLab):
        def _train(self, at: str, stack: Any, ask: Any) -> Seen:
            return Seen(seconds=12.0)

    assert look(Silent(Machine())).why == "the loader does not tell what it takes"


# -- once there are some ----------------------------------------------------------------------------------------------

KNOWN = tuple((count, 700 / count) for count in (2, 4, 8, 12))


def test_counting_anew_asks_no_loader_again() -> None:
    lab = MadeUpLab(Machine(noise=0.0, device_ms=60.0))
    stack = {"workers": {"enabled": True, "count": 4}}
    found = look(lab, stack, loaders_ms=KNOWN)
    assert not any("predict" in at for at in lab.ran) and found.tuned == {"rungs.workers.count": 12}
    assert found.saved_ms == pytest.approx(700 / 4 - 70)
    same = look(MadeUpLab(Machine(noise=0.0, device_ms=60.0)), {"workers": {"enabled": True, "count": 12}},
                loaders_ms=KNOWN)  # fmt: skip
    assert same.ended == "small" and "12 workers are the number already" in same.why


def test_a_rung_that_loading_would_hold_up_takes_more_workers_along() -> None:
    lab = MadeUpLab(Machine(noise=0.0, factors={"amp": 0.5}))
    here = scene(lab, {"workers": {"enabled": True, "count": 4}}, loaders_ms=KNOWN)
    alone = predicted(here, AMP, "02-amp")
    assert alone.saved_ms == pytest.approx(0.0), "four workers take 175 ms, amp or not"
    both = fed(here, alone)
    assert both.patch == {"rungs": {"amp": {"enabled": True}, "workers": {"count": 12}}}
    assert both.tuned == {"rungs.workers.count": 12} and both.saved_ms == pytest.approx(700 / 4 - 75)
    truth = lab.machine.step_ms({**here.known.stack, "amp": {}, "workers": {"count": 12}}, "as_it_is")
    assert both.then is not None and both.then.loader_ms == pytest.approx(700 / 12) and truth == pytest.approx(75)


@pytest.mark.parametrize(
    ("stack", "loaders_ms"),
    [({"workers": {"enabled": True, "count": 12}}, KNOWN), ({}, KNOWN), ({"workers": {"enabled": True}}, KNOWN),
     ({"workers": {"enabled": True, "count": 4}}, ()), ({"workers": {"enabled": True, "count": 4}}, ((8, 174.0),))],
    ids=["no more CPUs", "no workers", "not our number", "nothing is known", "more are no faster"],
)  # fmt: skip
def test_otherwise_a_rung_comes_alone(stack: Stack, loaders_ms: Any) -> None:
    lab = MadeUpLab(Machine(noise=0.0, factors={"amp": 0.5}))
    here = scene(lab, stack, loaders_ms=loaders_ms)
    alone = predicted(here, AMP, "02-amp")
    assert fed(here, alone) is alone


def test_a_patch_of_the_workers_is_left_as_it_is() -> None:
    lab = MadeUpLab(Machine(noise=0.0))
    here = scene(lab, {"workers": {"enabled": True, "count": 4}}, loaders_ms=KNOWN, outside_ms=50.0, gap_ms=30.0)
    stay = Candidate(rung="workers", key="x", patches=(patch("workers", persistent=True),), component="gap")
    alone = predicted(here, stay, "02-x")
    assert fed(here, alone) is alone and alone.patch == patch("workers", persistent=True)


def test_a_rung_that_loading_does_not_hold_up_comes_alone() -> None:
    lab = MadeUpLab(Machine(noise=0.0, decode_ms=100.0, factors={"amp": 0.5}))
    here = scene(lab, {"workers": {"enabled": True, "count": 4}}, loaders_ms=((4, 25.0), (8, 12.5)))
    alone = predicted(here, AMP, "02-amp")
    assert fed(here, alone) is alone
