"""The running of an experiment, with arms that train nothing: order, resume, what ends it, and what it then says."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastloop.experiments.ab import experiment, results
from fastloop.experiments.ab.experiment import Experiment, Settings, classify_promise, count_enough_steps
from fastloop.experiments.ab.sides import list_sides
from fastloop.experiments.trials.trial import read_finished
from fastloop.records.store import to_json
from fastloop.report.experiments import ab_report
from tests.experiments.made_arms import MadeArm

BASE = MadeArm()
AMP = MadeArm(
    name="amp",
    overrides=("rungs.amp.enabled=true",),
    rate=lambda _: 130.0,
    verdicts={"amp": True},
    parity_class="approximate",
)


def carried_out(
    place: Path, *arms: MadeArm, aa: bool = False, said: list[str] | None = None, **settings: Any
) -> Experiment:
    base = BASE.but() if arms[0].name != "base" else arms[0]
    others = arms if arms[0].name != "base" else arms[1:]
    sides = list_sides([base, *others], aa=aa)
    for side in sides:
        side.folder = place / side.folder
    made = Experiment(sides, place, Settings(**{"steps": 40, **settings}), (said if said is not None else []).append)
    made.run()
    return made


def runs(arm: MadeArm) -> list[str]:
    return [name for name, ask in arm.calls if ask.variation == "as_it_is"]


def test_a_faster_arm_is_found_and_every_run_of_a_number_shares_its_seed(tmp_path: Path) -> None:
    base, amp = BASE.but(), AMP.but()
    done = carried_out(tmp_path, base, amp)
    (found,) = done.comparisons()
    assert found.verdict == "faster" and found.ratio == pytest.approx(1.3, rel=0.02) and found.runs == 5
    assert found.parity.passed is True and {gate.name for gate in found.parity.gates} == {"ledger", "gradient", "loss"}
    assert runs(base) == ["warm-up", *(f"run-{n}" for n in range(5))] and runs(amp) == runs(base)[1:]
    for arm in (base, amp):
        asks = dict(arm.calls)
        assert [asks[f"run-{n}"].seed for n in range(5)] == [0, 1, 2, 3, 4]
        assert all(asks[f"run-{n}"].ledger and asks[f"run-{n}"].steps == 40 for n in range(5))


def test_arms_take_turns_and_the_turns_are_reversed(tmp_path: Path) -> None:
    order = [name for name, _ in carried_out(tmp_path, AMP.but(), runs=4).order]
    rounds = [order[at : at + 2] for at in range(0, 8, 2)]
    assert rounds[1] == rounds[0][::-1] and rounds[3] == rounds[2][::-1]
    assert all(sorted(turn) == ["amp", "base"] for turn in rounds)


def test_resuming_repeats_nothing_that_finished(tmp_path: Path) -> None:
    class Stop(KeyboardInterrupt):
        pass

    class Stops(MadeArm):
        def run(self, label: str, folder: Path, *rest: Any, **more: Any) -> Any:
            if folder.name == "run-2":
                raise Stop
            return super().run(label, folder, *rest, **more)

    stops = Stops(**{field.name: getattr(AMP, field.name) for field in dataclasses.fields(AMP)} | {"calls": []})
    with pytest.raises(Stop):
        carried_out(tmp_path, BASE.but(), stops)
    assert (
        read_finished(tmp_path / "1-amp" / "run-1") is not None and read_finished(tmp_path / "1-amp" / "run-2") is None
    )
    base, amp = BASE.but(), AMP.but()
    resumed = carried_out(tmp_path, base, amp)
    assert runs(amp) == ["run-2", "run-3", "run-4"]
    assert set(runs(base)) <= {"warm-up-again", "run-2", "run-3", "run-4"}
    assert [runs(amp)[0], *runs(base)].count("warm-up-again") == 1 and runs(base)[0] == "warm-up-again", "page cache"
    asks = dict(base.calls)
    assert asks["warm-up-again"].steps == 40 and not asks["warm-up-again"].ledger
    base, amp = BASE.but(), AMP.but()
    again = carried_out(tmp_path, base, amp)
    assert again.order == resumed.order and not base.calls and not amp.calls, "nothing is left that could be slower"
    whole = carried_out(tmp_path / "whole", AMP.but())
    assert resumed.comparisons()[0].ratio == whole.comparisons()[0].ratio and resumed.order == whole.order


@pytest.mark.parametrize(
    ("wrong", "gate", "runs_done"),
    [
        ("ledger", "ledger", 1),
        ("gradient", "gradient", 1),
        ("nan", "loss", 1),
        ("loss", "loss", 3),
    ],
)
def test_another_training_is_named_by_its_gate_and_trained_no_further(
    tmp_path: Path, wrong: str, gate: str, runs_done: int
) -> None:
    amp = AMP.but(wrong=wrong)
    done = carried_out(tmp_path, amp)
    (found,) = done.comparisons()
    assert found.parity.passed is False and found.verdict == "inconclusive" and "no speed is claimed" in found.why
    assert [each.name for each in found.parity.gates if each.passed is False] == [gate]
    assert len(runs(amp)) == runs_done and results.exit_code(done) == 3


def test_arms_whose_windows_are_too_short_are_trained_no_further(tmp_path: Path) -> None:
    """As in 20 steps of an arm whose queues hold 19 batches: the clock starts when those are used."""
    short = AMP.but(timed=1)
    done = carried_out(tmp_path, short)
    assert runs(short) == ["run-0"] and results.exit_code(done) == 4
    assert done.comparisons()[0].why.startswith("only 1 step of amp could be timed")


def test_an_arm_that_was_only_planned_promises_what_its_plan_does(tmp_path: Path) -> None:
    """As after a signal during the warm-up run."""
    stopped = BASE.but(fails_at=-1)
    (found,) = carried_out(tmp_path, stopped, AMP.but(parity_class="approximate")).comparisons()
    assert found.parity.parity_class == "approximate" and found.parity.passed is None


def test_what_saw_other_samples_is_not_even_asked_for_its_gradient(tmp_path: Path) -> None:
    base, amp = BASE.but(), AMP.but(wrong="ledger")
    (found,) = carried_out(tmp_path, base, amp).comparisons()
    assert [name for name, _ in amp.calls] == ["plan", "run-0"] and "parity" not in dict(base.calls)
    assert [gate.name for gate in found.parity.gates] == ["ledger", "loss"]


@pytest.mark.parametrize(("runs_", "alpha"), [(5, 0.05 / 3), ("auto", 0.05 / 12)])
def test_arms_are_judged_together_those_included_that_failed(tmp_path: Path, runs_: Any, alpha: float) -> None:
    layout = MadeArm(name="layout", overrides=("rungs.layout.enabled=true",), verdicts={"layout": True})
    dead = MadeArm(name="fused", overrides=("rungs.fused.enabled=true",), fails_at=0)
    rows = to_json(results.summarize(carried_out(tmp_path, AMP.but(), layout, dead, runs=runs_), "x", partial=False))[
        "comparisons"
    ]
    assert [row["alpha"] for row in rows] == pytest.approx([alpha] * 3)
    alone = carried_out(tmp_path / "alone", AMP.but(), runs=5)
    assert alone.alpha == 0.05
    if runs_ == 5:
        (single,) = to_json(results.summarize(alone, "x", partial=False))["comparisons"]
        assert single["ratio"] == pytest.approx(rows[0]["ratio"], rel=0.02)
        assert rows[0]["ci95"][1] - rows[0]["ci95"][0] > 1.1 * (single["ci95"][1] - single["ci95"][0])
        assert rows[0]["mde_pct"] > 1.1 * single["mde_pct"]


def test_a_loss_that_is_not_finite_fails_also_what_claims_no_parity(tmp_path: Path) -> None:
    amp = AMP.but(wrong="nan", parity_class="changes-training")
    done = carried_out(tmp_path, amp)
    (found,) = done.comparisons()
    assert found.parity.passed is False and "step 13" in found.why and results.exit_code(done) == 3
    fine = carried_out(tmp_path / "fine", AMP.but(wrong="loss", parity_class="changes-training"))
    (found,) = fine.comparisons()
    assert found.parity.passed is None and "claims no parity" in found.parity.why and found.verdict == "faster"


def test_an_arm_that_fails_leaves_the_others_their_verdict(tmp_path: Path) -> None:
    layout = MadeArm(name="layout", overrides=("rungs.layout.enabled=true",), fails_at=1, verdicts={"layout": True})
    done = carried_out(tmp_path, AMP.but(), layout)
    assert [each.verdict for each in done.comparisons()] == ["faster", "inconclusive"]
    assert runs(layout) == ["run-0", "run-1"] and results.exit_code(done) == 1
    (failure,) = to_json(results.summarize(done, "x", partial=False))["failures"]
    assert (failure["arm"], failure["run"], failure["last_step"]) == ("layout", "run-1", 7)
    assert "SIGKILL" in failure["cause"] and "boom" in failure["tail"]


@pytest.mark.parametrize("at", [-1, 0, 2])
def test_without_a_base_nothing_goes_on(tmp_path: Path, at: int) -> None:
    base, amp = BASE.but(fails_at=at), AMP.but()
    done = carried_out(tmp_path, base, amp)
    assert done.base.failed is not None and len(runs(amp)) <= max(0, at + 1) and results.exit_code(done) == 1


def test_a_rung_that_did_not_take_gets_no_credit(tmp_path: Path) -> None:
    done = carried_out(tmp_path, AMP.but(verdicts={"amp": False}))
    (found,) = done.comparisons()
    assert found.verdict == "inconclusive" and "there is one device" in found.why and results.exit_code(done) == 4
    assert found.runs == 1, "more runs of the same training would tell nothing"


@pytest.mark.parametrize("steps", [None, 40])
def test_what_the_plan_leaves_out_is_not_trained(tmp_path: Path, steps: int | None) -> None:
    base, amp = BASE.but(), AMP.but(skips={"amp": "needs CUDA"})
    done = carried_out(tmp_path / "alone", base, amp, steps=steps)
    (found,) = done.comparisons()
    assert [name for name, _ in amp.calls] == ["plan"] and base.calls == []
    assert found.why == "not run: none of its changes would take effect: amp (needs CUDA)"
    assert results.exit_code(done) == 4
    assert "RATE" not in "\n".join(ab_report.write_lines(results.summarize(done, "net", partial=False)))

    layout = MadeArm(name="layout", overrides=("rungs.layout.enabled=true",), verdicts={"layout": True})
    beside = carried_out(tmp_path / "beside", base := BASE.but(), amp := amp.but(), layout, steps=steps)
    assert [name for name, _ in amp.calls] == ["plan"] and {"run-0", "run-4"} <= {*runs(base)} & {*runs(layout)}
    assert next(one.why for one in beside.comparisons()) == found.why

    more = AMP.but(skips=amp.skips, overrides=("rungs.amp.enabled=true", "trainer.benchmark=true"))
    on = BASE.but(overrides=("rungs.amp.enabled=true",))
    for base, arm in ((BASE.but(), more), (on, AMP.but(skips=amp.skips, overrides=("rungs.amp.mode=tf32",)))):
        carried_out(tmp_path / f"control {arm.overrides[-1]}", base, arm, steps=steps)
        assert runs(base) and runs(arm), "the controls change more, or what the base has"


@pytest.mark.parametrize("change", ["rungs.amp.enabled=true", "trainer.benchmark=true", "recipe.data=elsewhere"])
def test_an_arm_that_cannot_be_planned_is_the_end_before_anything_is_trained(change: str, tmp_path: Path) -> None:
    base, amp = BASE.but(), AMP.but(fails_at=-2, overrides=(change,))
    with pytest.raises(experiment.Unplanned):
        carried_out(tmp_path, base, amp)
    assert runs(base) == [] and [name for name, _ in amp.calls] == ["plan"]


def test_auto_ends_as_soon_as_it_is_clear(tmp_path: Path) -> None:
    amp = AMP.but()
    assert carried_out(tmp_path / "clear", amp, runs="auto").comparisons()[0].verdict == "faster"
    assert len(runs(amp)) == 3
    noisy = AMP.but(rate=lambda n: 100.0, spread=0.12)
    carried_out(tmp_path / "noisy", BASE.but(spread=0.12), noisy, runs="auto")
    assert len(runs(noisy)) == 10


def test_arms_with_other_batches_are_compared_at_equal_samples(tmp_path: Path) -> None:
    half = MadeArm(name="half", overrides=("trainer.accumulate_grad_batches=2",), global_batch=128)
    base = BASE.but()
    done = carried_out(tmp_path, base, half)
    steps = {name: ask.steps for name, ask in half.calls}
    assert steps["warm-up"] == 40 and steps["run-0"] == 20 and dict(base.calls)["run-0"].steps == 40
    assert done.comparisons()[0].parity.parity_class == "changes-training"


def test_steps_of_a_window_are_enough_for_its_queues_and_its_seconds(tmp_path: Path) -> None:
    deep = AMP.but(queued=40)
    done = carried_out(tmp_path, deep, steps=None, warmup=7)
    assert done.base.steps == 7 + 1000 and {side.steps for side in done.sides} == {1007}  # ten seconds at 10 ms a step
    slow = AMP.but(queued=40, step_ms=900.0)
    trial = slow.run("x", tmp_path / "slow" / "run-0", experiment.Ask())
    assert count_enough_steps(trial) == 401  # forty batches of one step each, ten times
    assert count_enough_steps(BASE.but(step_ms=900.0).run("x", tmp_path / "few" / "run-0", experiment.Ask())) == 50


@pytest.mark.parametrize(
    ("keys", "same", "expected"),
    [
        (["trainer.benchmark"], True, "approximate"),
        (["trainer.accumulate_grad_batches"], False, "changes-training"),
        (["recipe.lr"], True, "changes-training"),
        (["run.devices", "trainer.benchmark"], True, "changes-training"),
    ],
)
def test_what_other_settings_promise(keys: list[str], same: bool, expected: str) -> None:
    assert classify_promise(keys, same_batch=same) == expected


def test_the_time_left_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    carried_out(tmp_path, AMP.but(), said=said)
    assert any(line.startswith("amp, run-1 (2 of 5), about") and line.endswith("s left") for line in said)


@pytest.mark.parametrize("fast_s", [1.0, 5.0])
def test_the_time_left_is_that_of_each_arm(tmp_path: Path, fast_s: float) -> None:
    """A base of 13 s a run beside a cache of 3: 22 s were said to be left, and 55 it took."""

    class Takes(MadeArm):
        def run(self, label: str, folder: Path, *rest: Any, **more: Any) -> Any:
            trial = super().run(label, folder, *rest, **more)
            return dataclasses.replace(trial, seconds=fast_s if self.name == "amp" else 10.0)

    def make(arm: MadeArm) -> Takes:
        return Takes(**{field.name: getattr(arm, field.name) for field in dataclasses.fields(arm)} | {"calls": []})

    said: list[str] = []
    carried_out(tmp_path, make(BASE), make(AMP), said=said)
    lefts = [float(re.search(r"about (\d+) s left", line)[1]) for line in said if " left" in line]  # type: ignore[index]
    assert len(lefts) == 10 and lefts[-1] in (10.0, fast_s), "the last run's own"
    assert lefts[2::2] == [(5 - pairs) * (10.0 + fast_s) for pairs in range(1, 5)], "after each pair"


def test_a_run_is_called_the_same_everywhere(tmp_path: Path) -> None:
    said: list[str] = []
    broken = AMP.but(fails_at=2)
    done = carried_out(tmp_path, BASE.but(), broken, said=said)
    result = results.write(done, "mine", partial=False)
    assert any(line.startswith("amp, run-2 (3 of 5)") for line in said), "while it runs"
    assert any(line.startswith("amp, run-2 failed: killed by SIGKILL") for line in said), "when it fails"
    assert ab_report.list_failures(result)[0].startswith("amp, run-2: killed by SIGKILL"), "in the report"
    assert json.loads((tmp_path / "1-amp" / "run-2" / "trial.json").read_text())["name"] == "amp, run-2", "on the disk"


def test_a_run_that_did_not_begin_where_the_others_did_is_none(tmp_path: Path) -> None:
    late = AMP.but(began=lambda number: {-2: None, 2: 40}.get(number, 0))
    done = carried_out(tmp_path, BASE.but(began=lambda _: 0), late)
    (failure,) = to_json(results.summarize(done, "x", partial=False))["failures"]
    assert (failure["arm"], failure["run"]) == ("amp", "run-2") and results.exit_code(done) == 1
    assert failure["cause"].startswith("it began at step 40, and base, warm-up at step 0: ")
    again = carried_out(tmp_path, BASE.but(), late.but())
    assert again.sides[1].failed is not None, "on another day, too"


def test_what_checkpoints_have_to_do_with_it_is_flagged(tmp_path: Path) -> None:
    both = {"began": lambda _: 120, "unsaved": True}
    found = results.list_flags(carried_out(tmp_path, BASE.but(**both), AMP.but(**both)).sides)
    assert found == [
        "all runs began at step 120, from a checkpoint that the script loads",
        "checkpoints outside the run directories were not written, so the time for that is missing, in all arms alike",
    ]
    assert results.list_flags(carried_out(tmp_path / "plain", AMP.but(began=lambda _: 0)).sides) == []


def test_of_an_arm_without_a_run_nothing_is_said_to_have_taken_or_not(tmp_path: Path) -> None:
    (found,) = carried_out(tmp_path, AMP.but(fails_at=0)).comparisons()
    assert found.why == "insufficient: 1 run of the base and 0 of the arm, a verdict needs 3"
