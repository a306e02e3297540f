"""One attempt of a climb: kept, or rolled back with its reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fastloop.experiments.climb.attempt import BaseFailed, make_attempt
from fastloop.experiments.climb.candidates import Candidate, make_patch
from fastloop.experiments.climb.interface import Result
from fastloop.judge import parity
from fastloop.judge.statistics import Pool
from fastloop.ladder import collect_cards
from fastloop.records.card import Variant
from fastloop.records.experiment import Gate, Outcome
from fastloop.records.plan import Parity
from fastloop.records.store import to_json
from tests.experiments.climb.test_prediction import AMP, WORKERS, scene
from tests.experiments.simulated_runner import Disturbed, Machine, SimulatedRunner

KNOWN_SPREAD = Pool(squares=0.00027, dof=5)

SHAPE = {
    "rung",
    "family",
    "patch",
    "step_ms_before",
    "step_ms_after",
    "predicted_saved_ms",
    "measured_saved_ms",
    "ci95_saved_ms",
    "prediction_error_pct",
    "kept",
    "why",
    "parity",
    "tuned",
    "runs",
}


def tried(runner: SimulatedRunner, candidate: Candidate, *, alone: bool = False, **changes: Any) -> Any:
    here = scene(runner, {} if alone or candidate is WORKERS else {"workers": {"enabled": True}}, **changes)
    return make_attempt(
        type(here)(runner=runner, known=here.known, warmup=20, start_s=12.0, pool=KNOWN_SPREAD), candidate, "01-x"
    )


def test_a_rung_that_is_faster_and_the_same_training_is_kept() -> None:
    runner = SimulatedRunner(Machine())
    found = tried(runner, WORKERS)
    row = found
    assert set(to_json(row)) >= SHAPE | {"try", "ended", "at", "rates", "costs"}
    assert row.kept and row.ended == "kept" and row.parity.passed is True
    assert row.measured_saved_ms == pytest.approx(740 - 140, rel=0.05) and row.prediction_error_pct < 5
    assert row.runs == 1 and row.ci95_saved_ms is None, "five times as fast: one pair says enough"
    assert found.costs.now_ms == row.step_ms_after and found.costs.workers == 8
    assert row.tuned == {"rungs.workers.count": 8} and found.costs.copies_ms == 10 and found.costs.fill_read


def test_two_pairs_in_opposite_order_with_shared_seeds_and_a_ledger() -> None:
    runner = SimulatedRunner(Machine())
    row = tried(runner, AMP)
    low, high = row.ci95_saved_ms
    assert low < row.measured_saved_ms < high and row.runs == 2
    screen = [(at.rpartition("/")[2], ask) for at, (_, ask) in runner.asks.items() if "screen" in at]
    assert [name for name, _ in screen] == ["screen-1-base", "screen-2-arm", "screen-3-arm", "screen-4-base"]
    assert [ask.seed for _, ask in screen] == [0, 0, 1, 1] and all(ask.ledger for _, ask in screen)
    assert len({(ask.steps, ask.warmup) for _, ask in screen}) == 1, "learning rates may hang on the number of steps"


def test_the_prediction_was_there_before_the_screen() -> None:
    runner = SimulatedRunner(Machine())
    tried(runner, AMP)
    assert runner.ran[0] == "01-x/predict-1" and "screen-1" in runner.ran[1]


def test_a_gradient_that_moves_rolls_it_back() -> None:
    found = tried(SimulatedRunner(Machine(wrong=frozenset({"amp"}))), AMP)
    assert not found.kept and found.ended == "parity" and found.costs is None
    assert found.why == "gradient: amp moves it by 0.3" and found.measured_saved_ms > 30
    assert [gate.name for gate in found.parity.gates if gate.passed is False] == ["gradient"]


def test_what_is_predicted_to_save_too_little_is_not_screened() -> None:
    runner = SimulatedRunner(Machine(factors={"amp": 0.99}, noise=0.0))
    found = tried(runner, AMP)
    assert found.ended == "small" and "below 3 %" in found.why and found.measured_saved_ms is None
    assert not any("screen" in at for at in runner.ran) and found.predicted_saved_ms == pytest.approx(1.3, abs=0.01)


def test_what_is_predicted_to_be_slower_does_not_save_a_negative_time() -> None:
    found = tried(SimulatedRunner(Machine(factors={"amp": 1.2}, noise=0.0)), AMP)
    assert found.ended == "small" and found.why.startswith("predicted to make the step ") and "-" not in found.why
    assert found.why.endswith(" longer") and found.predicted_saved_ms < 0


def test_a_crash_names_its_cause() -> None:
    found = tried(SimulatedRunner(Machine(crashes={"amp": "CUDA error"})), AMP)
    assert found.ended == "crashed" and found.why == "CUDA error"


def test_an_engine_is_screened_without_a_prediction() -> None:
    way = Variant(changes="engine")
    candidate = Candidate(rung="dali", key="dali", patches=(make_patch("dali"),), way=way)
    runner = SimulatedRunner(Machine(engine_ms=100))
    row = tried(runner, candidate, alone=True)
    assert row.kept and row.predicted_saved_ms is None and row.measured_saved_ms == pytest.approx(740 - 140, rel=0.05)
    assert not [at for at in runner.ran if "predict" in at] and "01-x/screen-1-base" in runner.ran
    bound = tried(SimulatedRunner(Machine(engine_ms=100, launch_bound=True)), candidate, alone=True)
    assert (row.costs.launch_bound, bound.costs.launch_bound) == (False, True), "no trial without loading told it"
    slow = tried(SimulatedRunner(Machine(engine_ms=900)), candidate, alone=True)
    assert not slow.kept and slow.ended == "not_faster"


def test_a_rung_without_effect_gets_no_credit() -> None:
    runner = SimulatedRunner(Machine(noise=0.0))
    runner.machine.idle = {}
    row = tried(_Idle(runner.machine), AMP)
    assert row.ended == "inactive" and row.why == "ran in fp32" and row.runs == 1 and not row.kept


def test_rungs_that_an_engine_leaves_without_effect_go() -> None:
    class Replaces(SimulatedRunner):
        def _train(self, at: str, stack: Any, ask: Any) -> Result:
            self.machine.idle = {"fused": "always"} | ({"workers": "it loads itself"} if "dali" in stack else {})
            return super()._train(at, stack, ask)

    runner = Replaces(Machine(engine_ms=10, decode_ms=4000, noise=0.0))
    candidate = Candidate(rung="dali", key="dali", patches=(make_patch("dali"),), way=Variant(changes="engine"))
    row = tried(runner, candidate)
    assert row.kept and row.idle == {"workers": "it loads itself"}
    assert row.patch["rungs"] == {"dali": {"enabled": True}, "workers": {"enabled": False}} and not row.is_removal


class _Idle(SimulatedRunner):
    """The rung looks good in its trial, and takes no effect in a real training."""

    def _train(self, at: str, stack: Any, ask: Any) -> Result:
        if "screen" in at:
            self.machine.idle = {"amp": "ran in fp32"}
        return super()._train(at, stack, ask)


def test_what_is_slow_in_both_pairs_is_not_faster() -> None:
    runner = _Slower(Machine(noise=0.0))
    row = tried(runner, AMP)
    assert row.ended == "not_faster" and row.why.startswith("not faster: -") and row.runs == 2
    assert row.measured_saved_ms < 0 and row.prediction_error_pct > 100


def test_what_turns_out_slow_is_expected_to_be_so_again() -> None:
    needs: dict[str, float] = {}

    class Asked(_Slower):
        def run(self, at: str, *asked: Any, need_s: float, **named: Any) -> Result:
            needs[at] = need_s
            return super().run(at, *asked, need_s=need_s, **named)

    tried(Asked(Machine(noise=0.0)), AMP)
    steps_s = [needs[f"01-x/screen-{turn}-arm"] - 12 for turn in (2, 3)]
    assert steps_s[1] == pytest.approx(steps_s[0] * 270 / 87.5, rel=0.01)


def test_only_the_first_run_of_the_arm_is_expected_to_compile() -> None:
    needs: dict[str, float] = {}

    class Asked(SimulatedRunner):
        def run(self, at: str, *asked: Any, need_s: float, **named: Any) -> Result:
            needs[at.rpartition("/")[2]] = need_s
            return super().run(at, *asked, need_s=need_s, **named)

    candidate = Candidate(rung="compile", key="x", patches=(make_patch("compile"),), way=Variant(changes="engine"))
    tried(Asked(Machine(noise=0.0)), candidate)
    first_s = collect_cards()["compile"].first_start_s
    assert first_s > 10 and needs["screen-2-arm"] - needs["screen-3-arm"] == pytest.approx(first_s, rel=0.1)
    assert needs["screen-1-base"] < first_s, "the base compiles nothing"


@pytest.mark.parametrize("disturbed", ["screen-1-base", "screen-2-arm", "screen-3-arm", "screen-4-base"])
def test_one_disturbed_run_is_outvoted_by_a_third_pair(disturbed: str) -> None:
    runner = Disturbed(Machine(factors={"amp": 0.85}, noise=0.001), {disturbed: 10.0})
    row = tried(runner, AMP)
    assert row.kept and row.runs == 2 and "without one disturbed pair (" in row.why
    assert [at for at in runner.ran if "screen" in at][-2:] == ["01-x/screen-5-base", "01-x/screen-6-arm"]
    ratios = [arm / base for base, arm in zip(row.rates.base, row.rates.arm, strict=True)]
    assert ratios == pytest.approx([130 / 110.5] * 2, rel=0.1), "later screens do not see the disturbed pair"


def test_three_pairs_that_differ_give_no_answer() -> None:
    noisy = {"screen-1-base": 2.0, "screen-3-arm": 2.0}
    row = tried(Disturbed(Machine(factors={"amp": 0.85}, noise=0.001), noisy), AMP)
    assert row.ended == "odd" and "so something else disturbed this machine" in row.why and not row.kept
    assert len(re.findall(r"[+-]\d+ %", row.why)) == 3 == row.runs


def test_two_pairs_that_agree_need_no_third() -> None:
    runner = SimulatedRunner(Machine())
    tried(runner, AMP)
    assert not [at for at in runner.ran if "screen-5" in at]


@pytest.mark.parametrize(
    ("factor", "disturbed", "ended"), [(0.4, "screen-1-base", "kept"), (2.0, "screen-3-arm", "not_faster")]
)
def test_pairs_that_differ_but_agree_give_an_answer(factor: float, disturbed: str, ended: str) -> None:
    runner = Disturbed(Machine(noise=0.001, factors={"amp": factor}), {disturbed: 1.5, "predict-1": 0.4 / factor})
    assert tried(runner, AMP).ended == ended


def gated(gradient: Gate, promise: Parity = "approximate") -> Any:
    class Gated(SimulatedRunner):
        def check_parity(self, *asked: Any, **named: Any) -> Outcome:
            return parity.sum_up_gates(promise, (Gate(name="ledger", passed=True, why="equal"), gradient))

    return tried(Gated(Machine()), AMP)


def test_gates_that_could_not_be_taken_keep_nothing() -> None:
    found = gated(Gate(name="gradient", passed=None, why="the arm's gradient could not be taken: hung"))
    assert not found.kept and found.ended == "undecided" and found.costs is None
    assert found.why.startswith("not shown to be the same training: gradient: the arm's gradient could not be")
    assert found.measured_saved_ms > 30 and found.parity.undecided == ("gradient",)


def test_what_nothing_can_test_here_is_kept_and_said_where_the_bits_are_promised() -> None:
    blind = Gate(name="gradient", passed=None, why="not testable here: FSDP", detail={"testable": False})
    row = gated(blind, "exact")
    assert row.kept and row.parity.passed is None and row.why.startswith("+")
    assert row.why.endswith("; gradient: not testable here: FSDP")
    rounds = gated(blind)
    assert not rounds.kept and rounds.ended == "undecided", "a rung that rounds is not kept on its samples alone"


def test_a_rest_that_takes_longer_than_the_step_is_measured_again() -> None:
    machine = Machine(decode_ms=3, noise=0.0)
    assert tried(SimulatedRunner(machine), AMP, alone=True).costs.replayed_ms == pytest.approx(62)
    found = tried(Disturbed(machine, {"predict-1": 1.2}), AMP, alone=True)
    assert found.kept and found.costs.replayed_ms is None is found.costs.mfu


def test_beside_workers_the_rest_is_what_the_runs_show() -> None:
    machine = Machine(decode_ms=3, noise=0.0, crowding=1.5)
    assert tried(SimulatedRunner(machine), AMP).costs.replayed_ms == pytest.approx(1.5 * 62)
    assert tried(Disturbed(machine, {"predict-1": 1.2}), AMP).costs.replayed_ms == pytest.approx(1.5 * 62)


def test_other_samples_in_the_first_pair_need_no_second() -> None:
    runner = SimulatedRunner(Machine(noise=0.0, shuffles=frozenset({"amp"})))
    row = tried(runner, AMP)
    assert row.ended == "parity" and row.why == "ledger: step 0 saw other samples" and row.runs == 1
    assert row.parity.passed is False and [gate.name for gate in row.parity.gates] == ["ledger"]
    assert runner.ran == ["01-x/predict-1", "01-x/screen-1-base", "01-x/screen-2-arm"], "and no gradient"


class _Slower(SimulatedRunner):
    def _train(self, at: str, stack: Any, ask: Any) -> Result:
        self.machine.factors = {"amp": 2.0} if "screen" in at else {"amp": 0.5}
        return super()._train(at, stack, ask)


def test_noise_is_not_kept() -> None:
    """It promises 4 %, brings nothing, and single runs differ by 2 %: of 40 such screens few may be taken in."""
    kept = 0
    for number in range(40):
        runner = _Promises(Machine(noise=0.02), str(number))
        here = scene(runner, {"workers": {"enabled": True}})
        pool = Pool(squares=0.0027, dof=5)
        row = make_attempt(
            type(here)(runner=runner, known=here.known, warmup=20, start_s=12.0, pool=pool), AMP, f"{number}-x"
        )
        kept += row.kept
    assert kept <= 9, "10 % of screens, plus their own noise"


class _Promises(SimulatedRunner):
    def __init__(self, machine: Machine, name: str) -> None:
        super().__init__(machine)
        self.name = name

    def _train(self, at: str, stack: Any, ask: Any) -> Result:
        self.machine.factors = {} if "screen" in at else {"amp": 0.9}
        return super()._train(f"{self.name}/{at}", stack, ask)


def test_another_batch_is_another_training() -> None:
    found = tried(_OtherBatch(Machine(noise=0.0)), AMP)
    assert found.ended == "parity" and "has 128 samples, not 256" in found.why


class _OtherBatch(SimulatedRunner):
    def _train(self, at: str, stack: Any, ask: Any) -> Result:
        import dataclasses

        found = super()._train(at, stack, ask)
        return dataclasses.replace(found, global_batch=128) if "arm" in at else found


def test_where_the_base_fails_nothing_can_be_said() -> None:
    with pytest.raises(BaseFailed, match="out of luck"):
        tried(_BaseFails(Machine()), AMP)


class _BaseFails(SimulatedRunner):
    def _train(self, at: str, stack: Any, ask: Any) -> Result:
        return Result(ok=False, cause="out of luck") if "base" in at else super()._train(at, stack, ask)


def test_what_need_not_be_tried_says_so() -> None:
    runner = SimulatedRunner(Machine())
    row = tried(runner, Candidate(rung="pin", key="pin", patches=(make_patch("pin"),), refused="needs CUDA"))
    assert row.ended == "inactive" and row.why == "needs CUDA" and runner.ran == []
    assert row.patch == make_patch("pin") and not row.kept


def test_a_slow_base_does_not_make_one_pair_enough() -> None:
    """The base is known from before; and what is much faster in both pairs is faster, however far these differ."""
    runner = Disturbed(Machine(), {"screen-1-base": 10.0})
    row = tried(runner, WORKERS)
    assert row.kept and row.runs == 2 and "01-x/screen-4-base" in runner.ran
