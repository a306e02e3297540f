"""Whole climbs on machines that are made up: where they come to, what they roll back, and what they never do again."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest

from fastloop.commands.climb import describe_unproven, list_shipped
from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb import candidates, loop, measuring
from fastloop.experiments.climb.attempt import APART, LEFT_TO_PROOF, UNSCREENED, BaseFailed, _Screen
from fastloop.experiments.climb.budget import GRACE_S, ClimbBudget, Length, Spent
from fastloop.experiments.climb.candidates import make_patch
from fastloop.experiments.climb.interface import Result
from fastloop.experiments.climb.loop import BESIDE, CONFIRM_RUNS, Climb
from fastloop.experiments.climb.measuring import Measured, pool_spreads
from fastloop.ladder import collect_cards
from fastloop.records.card import Stack
from fastloop.records.climb import TOP, Attempt, ClimbFile, Confirmation, Rates
from fastloop.records.experiment import Gate, Outcome
from tests.experiments import simulated_runner
from tests.experiments.simulated_runner import BATCH, START_S, Disturbed, Machine, SimulatedRunner, make_climb

RUNGS = ("pin", "prefetch", "amp", "layout", "fused", "compile", "batch")
RESNET = Machine()
GPT = Machine(decode_ms=5, device_ms=1580, copy_ms=1, host_ms=100, factors={"amp": 0.4, "compile": 0.75, "batch": 0.9})
CIFAR = Machine(decode_ms=22, device_ms=8, host_ms=8.5, copy_ms=0.5)
OWN_WORKERS = Machine(decode_ms=800, device_ms=300, own_workers=8, queued=16, factors={"amp": 0.4, "compile": 0.8})
COMPUTED = Machine(decode_ms=300, device_ms=200, factors={"amp": 0.5, "layout+amp": 0.7, "fused": 0.95, "compile": 0.9})


def stacks() -> Iterator[Stack]:
    """All that could be set by hand."""
    for count in range(len(RUNGS) + 1):
        for rungs in itertools.combinations(RUNGS, count):
            for workers in (None, 8, 12):
                stack = {rung: {"enabled": True} for rung in rungs}
                yield stack if workers is None else {**stack, "workers": {"enabled": True, "count": workers}}


def ended(climb: Climb, key: str) -> str:
    return next(row.ended for row in reversed(climb.rows) if row.key == key)


def climb_up(runner: SimulatedRunner, **settings: Any) -> Climb:
    """A climb at its end."""
    climb = make_climb(runner, **settings)
    climb.climb()
    return climb


def begin(runner: SimulatedRunner) -> Climb:
    """A climb that has measured its start."""
    climb = make_climb(runner)
    climb.begin()
    climb.measure_missing()
    return climb


# -- where it comes to ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [RESNET, GPT, CIFAR, COMPUTED], ids=["resnet", "gpt", "cifar", "computed"])
def test_it_climbs_to_the_best_stack_that_there_is(machine: Machine) -> None:
    runner = SimulatedRunner(machine, best={"workers": 12, "batch": 256})
    climb = climb_up(runner)
    best = min(machine.step_ms(stack, "as_it_is") for stack in stacks())
    assert machine.step_ms(climb.stack, "as_it_is") <= 1.03 * best, climb.stack
    assert climb.confirm() is not None and runner.confirmed == [climb.stack]


def test_its_predictions_come_true() -> None:
    errors = []
    for machine in (RESNET, GPT, COMPUTED):
        climb = climb_up(SimulatedRunner(machine, best={"workers": 12, "batch": 256}))
        errors += [row.prediction_error_pct for row in climb.rows if row.prediction_error_pct is not None]
    assert len(errors) >= 7 and sorted(errors)[len(errors) // 2] <= 15, errors


def test_each_step_tells_what_was_predicted_and_what_came_of_it() -> None:
    climb = climb_up(SimulatedRunner(RESNET))
    kept = [row for row in climb.rows if row.kept]
    assert [row.rung for row in kept][:2] == ["workers", "amp"], "the largest ceiling first"
    assert all(row.predicted_saved_ms > 0 and row.measured_saved_ms > 0 for row in kept)
    for before, after in itertools.pairwise(kept):
        assert after.step_ms_before == pytest.approx(before.step_ms_after, rel=0.05)


def test_a_rung_that_pays_only_on_top_of_others_is_tried_again() -> None:
    machine = Machine(decode_ms=3, copy_ms=0, factors={"layout": 1.02, "layout+fused": 0.8, "fused": 0.8}, noise=0.001)
    climb = climb_up(SimulatedRunner(machine))
    tries = [(row.ended, row.at) for row in climb.rows if row.key == "layout"]
    assert tries == [("small", 0), ("kept", 1)] and {"layout", "fused"} <= set(climb.stack)


def test_the_exchange_is_a_family_of_its_own() -> None:
    machine = Machine(decode_ms=1, copy_ms=0, exchange_ms=60, factors={})
    runner = SimulatedRunner(machine)
    climb = climb_up(runner, devices=2)
    assert "00-naive/no_exchange" in runner.ran and ended(climb, "overlap") == "small", (
        "it saves nothing on this machine"
    )
    alone = climb_up(SimulatedRunner(machine))
    assert all(row.rung != "overlap" for row in alone.rows)


# -- rungs that pay together ------------------------------------------------------------------------------------------

TOGETHER = Machine(decode_ms=3, copy_ms=0, factors={"amp+layout+compile": 0.4, "amp": 1.02, "layout": 1.0})
"""bfloat16, channels-last and compiled graphs pay only where all three are on, as in a ResNet on an H200."""


def test_a_ladder_is_found_where_no_rung_of_it_pays_alone() -> None:
    alone = climb_up(SimulatedRunner(TOGETHER))
    assert not {"amp", "layout", "compile"} & set(alone.stack), "one by one they do not"
    runner = SimulatedRunner(TOGETHER)
    climb = climb_up(runner, ladders=list_shipped())
    assert {"amp", "layout", "compile"} <= set(climb.stack)
    best = min(TOGETHER.step_ms(stack, "as_it_is") for stack in (*stacks(), *list_shipped().values()))
    assert TOGETHER.step_ms(climb.stack, "as_it_is") <= 1.01 * best
    assert {rung for row in climb.rows if row.is_removal and row.kept for rung in [row.rung]} >= {"workers", "fused"}
    assert not {"workers", "fused", "cache"} & set(climb.stack), "what it came with, and does nothing, is gone"


def test_a_ladder_with_rungs_on_top_is_run_with_all_of_them_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name, stack = "full+cache+host", {**list_shipped()["full"], "cache": {"enabled": True, "store": "device"}}
    for module in (loop, candidates):
        monkeypatch.setattr(module, "list_bundles", lambda _known: {name: stack})
    asked: dict[str, str | None] = {}

    class Asked(SimulatedRunner):
        def run(self, at: str, *rest: Any, ladder: str | None = None, **named: Any) -> Result:
            asked[at] = ladder
            return super().run(at, *rest, ladder=ladder, **named)

    class Replays(Machine):
        def step_ms(self, stack: Stack, variation: str) -> float:
            stored = stack.get("cache", {}).get("store") == "device"
            return super().step_ms(stack, variation) * (0.1 if stored else 1.0)

    machine = Replays(decode_ms=3, copy_ms=0, noise=0.0, factors={"amp": 0.9}, idle={"workers": "a store loads"})
    climb = climb_up(Asked(machine), ladders=list_shipped())
    first = climb.rows[0]
    assert first.kept and first.name == f"ladder-{name}" and "workers" in first.idle and name in climb.ladders
    assert asked[f"00-ladder-{name}/screen-2-arm"] is None and asked["00-ladder-full/screen-2-arm"] == "full"
    assert climb.stack["cache"] == stack["cache"] and "amp" in climb.stack


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No budget is so short that a climb hurries."""
    for name in ("RUNS", "COMPILES"):
        monkeypatch.setattr(measuring, name, 0)


def list_proven(
    machine: Machine = COMPUTED, budgets: Iterable[int] = range(280, 460, 10)
) -> tuple[list[int], list[int]]:
    """Budgets whose climb ends with its proof, and those in which the gradients were left to it."""
    proven, left = [], []
    for budget_s in budgets:
        runner = SimulatedRunner(machine).with_budget(budget_s)
        climb = make_climb(runner, ladders=list_shipped())
        with contextlib.suppress(Spent):
            climb.climb()
        with contextlib.suppress(Spent):
            proven += [budget_s] if climb.confirm() is not None else []
        left += [budget_s] if any(row.parity.why == LEFT_TO_PROOF for row in climb.rows) else []
        assert runner.budget.left_s() > -GRACE_S
    return proven, left


@pytest.mark.usefixtures("calm")
def test_a_small_budget_ends_with_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """320 s once kept a ladder, compared its gradients, and had no time for the proof, which compares them again. 540 s
    of a ViT's were spent on the other ladders, when the first had been three times as fast. 295 s of a BERT's were
    spent on a compile, and had no time left to prove what it brought."""
    assert list_proven() == (list(range(280, 460, 10)), [])
    monkeypatch.setattr(Climb, "_defer_slow_compiles", lambda _, ladders: ladders)
    monkeypatch.setattr(Climb, "_leave_out_unprovable", lambda _, rates: rates)
    assert list_proven() == (list(range(360, 460, 10)), [360, 370]), "the control compiles first"
    monkeypatch.setattr(Climb, "_reserve_proof_time", lambda *_: False)
    assert list_proven() == (list(range(390, 460, 10)), [390, 400, 410]), "the control keeps no time for a fast ladder"
    monkeypatch.setattr(Climb, "context", Measured.context)
    assert list_proven() == (list(range(420, 460, 10)), []), "the control compares them before"


def test_a_ladder_without_time_for_its_proof_is_put_off_until_there_is_time() -> None:
    def climb(budget_s: float) -> Climb:
        made = make_climb(SimulatedRunner(COMPUTED).with_budget(budget_s), ladders=list_shipped())
        with contextlib.suppress(Spent):
            made.climb()
        return made

    short, long = climb(300), climb(600)
    assert short.put_off == ["full"] and "full" not in short.ladders and short.ladders["bf16"]
    assert [row.key for row in short.rows if row.kept] == ["ladder-bf16"] and short.confirm() is not None
    assert long.put_off == [] and list(long.ladders) == ["full", "bf16", "safe"]
    assert climb(150).put_off == [], "there is no time for any proof: the fastest comes first"


def test_a_slow_start_ends_with_the_ladder_that_compiles_and_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ResNet's steps took 1.3 s, and 535 s ended with `safe`, 5 times as slow as `full`: its first run was expected
    to be as slow as the start, and ceilings and screens took the time for its proof."""
    monkeypatch.setattr(simulated_runner, "START_S", 5.0)
    machine = Machine(
        decode_ms=1240,
        device_ms=125,
        host_ms=30,
        engine_ms=30,
        factors={"amp+layout+compile": 0.25},
        compiles_s=60,
        caches_compiles=True,
    )

    def climb(budget_s: float) -> list[str]:
        made = make_climb(SimulatedRunner(machine).with_budget(budget_s), ladders=list_shipped())
        with contextlib.suppress(Spent):
            made.climb()
        assert made.confirm() is not None
        return [row.key for row in made.rows if row.kept][:1]

    budgets = range(430, 640, 10)
    assert {*itertools.chain(*map(climb, budgets))} == {"ladder-full"}
    for name in ("RUNS", "COMPILES"):
        monkeypatch.setattr(measuring, name, 0)
    assert climb(440) == ["ladder-safe"], "the control does not hurry"


def test_a_hurried_climb_runs_parts_of_a_faster_ladder_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPT-2's steps took 1.6 s; `safe` took 35 s of its 535 for nothing, and `full` was not run."""
    monkeypatch.setattr(simulated_runner, "START_S", 8.0)
    factors = {"amp": 0.2, "amp+compile": 0.45}
    machine = Machine(decode_ms=5, device_ms=1580, host_ms=20, factors=factors, compiles_s=50, caches_compiles=True)

    shipped = dict(list_shipped())

    def climb(budget_s: float) -> list[str]:
        made = make_climb(SimulatedRunner(machine).with_budget(budget_s), ladders=shipped)
        with contextlib.suppress(Spent):
            made.climb()
        assert made.confirm() is not None and made.hurries
        assert "safe" not in made.put_off
        return [row.key for row in made.rows if row.kept][:1]

    assert {*itertools.chain(*map(climb, range(450, 640, 10)))} == {"ladder-full"}
    shipped["safe"] = {**shipped["safe"], "nodes": {"enabled": True}}
    assert climb(480) == ["ladder-bf16"], "the control: a ladder that is no part of another takes its turn"


def test_a_hurried_climb_measures_no_ceilings_before_its_proof() -> None:
    """A ViT with eight workers of its own: 45 s of its 295 went to a long first run, and 50 s to ceilings."""

    def climb(budget_s: float) -> tuple[SimulatedRunner, Climb]:
        runner = SimulatedRunner(OWN_WORKERS).with_budget(budget_s)
        made = make_climb(runner, ladders=list_shipped())
        with contextlib.suppress(Spent):
            made.climb()
        return runner, made

    hurried, made = climb(295)
    assert made.hurries and made.confirm() is not None
    assert not [at for at in hurried.ran if "replayed" in at or "resident" in at], "no time for them"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RUNS", "COMPILES"):
            patch.setattr(measuring, name, 0)  # the control does not hurry
        slow, made = climb(295)
    assert not made.hurries and "00-naive/replayed" in slow.ran
    assert "00-naive/as-it-is" not in hurried.ran and "00-naive/as-it-is" in slow.ran, "the longer pilot serves"
    calm, made = climb(3600)
    assert not made.hurries and {"00-naive/replayed", "00-naive/resident"} <= set(calm.ran)
    assert calm.seconds["00-naive/as-it-is"] > 1.3 * hurried.seconds["00-naive/pilot-longer"]


def test_a_hurried_climb_leaves_a_faster_ladder_to_its_proof() -> None:
    """55 s of a ViT's 295 went to the screen of a ladder that was twice as fast; its proof ended too late."""

    def climb(budget_s: float) -> tuple[list[str], Climb]:
        runner = SimulatedRunner(OWN_WORKERS).with_budget(budget_s)
        made = make_climb(runner, ladders=list_shipped())
        with contextlib.suppress(Spent):
            made.climb()
        return runner.ran, made

    ran, short = climb(250)
    first = short.rows[0]
    assert short.hurries and first.kept and not first.parity.gates and first.parity.why == UNSCREENED
    assert first.step_ms_before and first.step_ms_after and first.step_ms_before > APART * first.step_ms_after
    assert not [at for at in ran if "screen-1-base" in at or "gradient" in at] and short.confirm() is not None
    ran, long = climb(3600)
    assert not long.hurries and long.rows[0].parity.gates and "00-ladder-full/screen-1-base" in ran
    ran, shortest = climb(150)
    assert all(row.parity.gates for row in shortest.rows if row.kept), "there is no time for any proof"


def test_a_hurried_climb_adds_validation_to_its_short_baseline() -> None:
    """A ViT's 27 steps had none, the 142 of a ladder's first run had: `safe` looked a quarter slower than the start."""
    machine = dataclasses.replace(OWN_WORKERS, rare_ms=50.0)
    runner = SimulatedRunner(machine).with_budget(295)
    made = make_climb(runner, ladders=list_shipped())
    with contextlib.suppress(Spent):
        made.climb()
    measured, naive = runner.done["00-naive/pilot-longer"], made.naive
    assert made.hurries and naive is not None and naive.step_ms and naive.samples_per_s and measured.step_ms
    assert (measured.outside_ms, naive.outside_ms) == (0.0, 50.0)
    assert naive.step_ms == pytest.approx(measured.step_ms + 50.0)
    assert naive.samples_per_s == pytest.approx(1e3 * BATCH / naive.step_ms)
    assert made.ladders["safe"] and made.ladders["safe"] > naive.samples_per_s
    assert made.rows[0].step_ms_before == pytest.approx(naive.step_ms)


def test_a_compile_that_overruns_leaves_the_proof_of_another_ladder_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ViT on two cores compiled for 235 of its 295 s, when `bf16` had been 2.4 times as fast."""
    for machine in (OWN_WORKERS, COMPUTED):
        slow = dataclasses.replace(machine, compiles_s=235.0)
        budgets = range(280, 640, 40)
        assert list_proven(slow, budgets)[0] == list(budgets)
        with monkeypatch.context() as patch:
            begin = ClimbBudget.begin
            patch.setattr(ClimbBudget, "begin", lambda *a, to=begin, **b: to(*a, **b) + a[0]._spared_s)
            assert len(list_proven(slow, budgets)[0]) < len(budgets), "the control compiles to the very end"


def test_a_hurried_climb_screens_no_ladder_that_was_not_faster() -> None:
    """A script with metrics spent 100 s of its 250 on the screen of a ladder that was 0.6 % faster in one run."""
    machine = Machine(decode_ms=0.3, device_ms=30, host_ms=30, copy_ms=0, factors={})
    for budget_s, screens in ((200, False), (3600, True)):
        runner = SimulatedRunner(machine).with_budget(budget_s)
        with contextlib.suppress(Spent):
            climb_up(runner, ladders=list_shipped())
        assert any(at.startswith("00-ladder") and "screen-1-base" in at for at in runner.ran) is screens
        assert "00-naive/replayed" in runner.ran
        assert "00-naive/as-it-is" in runner.ran, "a pilot of 0.3 s"


def test_a_hurried_climb_measures_its_start_once_where_nothing_was_ready_before() -> None:
    for budget_s, again in ((160, False), (3600, True)):
        runner = SimulatedRunner(Machine(decode_ms=20, device_ms=180, host_ms=20)).with_budget(budget_s)
        with contextlib.suppress(Spent):
            climb_up(runner, ladders=list_shipped())
        assert ("00-naive/as-it-is" in runner.ran) is again, "a pilot of two seconds"


def test_a_hurried_climb_without_a_ladder_measures_its_ceilings() -> None:
    runner = SimulatedRunner(Machine(own_workers=8, queued=16, device_ms=500)).with_budget(295)
    made = make_climb(runner)
    with contextlib.suppress(Spent):
        made.climb()
    assert made.hurries and "00-naive/replayed" in runner.ran


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize(("budget_s", "at"), [(290, "confirm-1-short"), (600, "confirm-")])
def test_a_proof_is_short_where_a_long_one_does_not_fit(budget_s: float, at: str) -> None:
    climb = make_climb(SimulatedRunner(COMPUTED).with_budget(budget_s), ladders=list_shipped())
    with contextlib.suppress(Spent):
        climb.climb()
    confirmed = climb.confirm()
    assert confirmed is not None and confirmed.run_dir.startswith(at)
    assert confirmed.run_dir.endswith("-short") is at.endswith("-short")


def test_a_proof_has_time_to_take_longer_than_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ViT's steps took 174 ms in its proof, not 149: the sixth run of six did not fit."""

    class Slowed(SimulatedRunner):
        def confirm(self, at: str, stack: Stack, length: Length, *, need_s: float) -> Confirmation:
            return super().confirm(at, stack, length, need_s=1.15 * need_s)

    def prove(budget_s: int) -> str | None:
        climb = make_climb(Slowed(COMPUTED).with_budget(budget_s), ladders=list_shipped())
        with contextlib.suppress(Spent):
            climb.climb()
        with contextlib.suppress(Spent):
            return getattr(climb.confirm(), "run_dir", None)
        return None

    budgets = range(480, 620, 20)
    assert {prove(budget_s) for budget_s in budgets} == {"confirm-1-short", "confirm-1"}
    monkeypatch.setattr(loop, "SURE", 1.0)
    assert {prove(budget_s) for budget_s in budgets} == {None}, "the control"


def test_a_ladder_of_which_a_part_has_no_effect_or_breaks() -> None:
    idle = dataclasses.replace(TOGETHER, idle={"cache": "no epoch ended", "pin": "no CUDA"})
    runner = SimulatedRunner(idle)
    climb = climb_up(runner, ladders=list_shipped())
    assert not any("cache" in at or "pin" in at for at in runner.ran), "what had no effect is not asked about again"
    assert next(row.idle for row in climb.rows if row.kept) == idle.idle
    broken = dataclasses.replace(RESNET, wrong=frozenset({"compile"}))
    climb = climb_up(SimulatedRunner(broken), ladders=list_shipped())
    ends = {row.name: row.ended for row in climb.rows if row.name.startswith("ladder-")}
    assert ends["ladder-bf16"] == "kept" and ends.get("ladder-full") != "kept"
    assert "compile" not in climb.stack and {"workers", "amp"} <= set(climb.stack)


def test_time_is_kept_for_gradients_that_compile_anew() -> None:
    """A ResNet-50's proof once waited 70 s for them, and had no time left for its last runs."""
    climb = climb_up(SimulatedRunner(COMPUTED).with_budget(3600), ladders=list_shipped())
    (kept, *_), compile_s = (row for row in climb.rows if row.kept), collect_cards()["compile"].first_start_s
    gates = [Gate(name=name, passed=True, why="") for name in ("ledger", "gradient")]
    climb.rows = [dataclasses.replace(kept, parity=Outcome(gates=tuple(gates)))]
    checked_s = climb._estimate_confirmation_s()
    climb.rows = [dataclasses.replace(kept, parity=Outcome(gates=tuple(gates[:1])))]
    assert "compile" in climb.stack and climb._estimate_confirmation_s() == pytest.approx(checked_s + compile_s)
    assert climb.costs is not None
    climb.costs = climb.costs.but(compile_s=20.0)  # as long as its first run took for it
    assert climb._estimate_confirmation_s() == pytest.approx(checked_s + 20)


def test_the_proofs_runs_of_the_top_start_as_it_does() -> None:
    """A stack with compiled code starts in 18 s, the beginner's script in 5."""
    climb = climb_up(SimulatedRunner(COMPUTED).with_budget(3600), ladders=list_shipped())
    assert climb.costs is not None and climb.costs.start_s is not None
    before_s = climb._estimate_confirmation_s()
    climb.costs = climb.costs.but(start_s=climb.costs.start_s + 10)
    assert climb._estimate_confirmation_s() == pytest.approx(before_s + CONFIRM_RUNS * 10 + 10), "and its gradients"


def test_all_runs_of_the_top_start_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ViT's climb took 7 s for the start of one that compiles, and the time of its proof went into that."""
    monkeypatch.setattr(_Screen, "start_s", 40.0)
    asked: list[tuple[str, float]] = []

    class Asks(SimulatedRunner):
        def run(self, at: str, stack: Stack, ask: Ask, *, what: str, need_s: float, **how: Any) -> Result:
            asked.append((what, need_s))
            return super().run(at, stack, ask, what=what, need_s=need_s, **how)

    climb_up(Asks(COMPUTED).with_budget(3600), ladders=list_shipped())
    first = next(place for place, (what, _) in enumerate(asked) if what.startswith("ladder-full: screening"))
    later = [each for each in asked[first:] if each[0].startswith(("measuring", "the best stack", "without-"))]
    assert {what.partition(" ")[0] for what, _ in later} >= {"measuring", "the"}
    assert all(need_s > 40 for _, need_s in later), later


def test_a_hopeless_ladder_is_not_run_to_its_end() -> None:
    """Where bfloat16 is emulated, a ladder that has it takes minutes to show that it is ten times slower."""
    machine = dataclasses.replace(TOGETHER, factors={"amp": 10.0})
    runner = SimulatedRunner(machine)
    climb = climb_up(runner, ladders=list_shipped())
    assert climb.ladders["full"] is None and climb.ladders["bf16"] is None and climb.ladders["safe"]
    assert runner.seconds["00-ladder-full/screen-2-arm"] == START_S and "amp" not in climb.stack
    slower = dataclasses.replace(TOGETHER, factors={"amp": 2.0})
    climb = climb_up(SimulatedRunner(slower), ladders=list_shipped())
    assert climb.ladders["bf16"] and not any(row.name == "ladder-bf16" for row in climb.rows), "one run says enough"


def test_what_pays_together_is_found_once_something_else_is_no_limit_any_more() -> None:
    """With 8 workers all ladders wait for their data alike; with 12 the arithmetic is the limit."""
    machine = dataclasses.replace(TOGETHER, decode_ms=1250, noise=0.001)
    runner = SimulatedRunner(machine)
    climb = climb_up(runner, ladders=list_shipped())
    kept = [row.name for row in climb.rows if row.kept and not row.is_removal]
    assert kept[:2] == ["ladder-safe", "workers-count"] and kept[-1] == "ladder-full"
    assert {"workers", "amp", "layout", "compile"} == set(climb.stack)
    assert machine.step_ms(climb.stack, "as_it_is") < min(
        machine.step_ms(stack, "as_it_is") for stack in list_shipped().values()
    )


def test_a_ladder_whose_screen_was_disturbed_has_a_third_pair() -> None:
    less = dataclasses.replace(TOGETHER, factors={**TOGETHER.factors, "amp+layout+compile": 0.6})
    climb = climb_up(Disturbed(less, {"00-ladder-full/screen-3-arm": 15.0}), ladders=list_shipped())
    assert [row.ended for row in climb.rows if row.key == "ladder-full"] == ["kept"]


def test_small_losses_of_rungs_that_are_taken_away_do_not_add_up() -> None:
    """Each of eight rungs makes the step 0.8 % faster: alone that is noise, together it is not."""
    rungs = ("pin", "prefetch", "overlap", "amp", "layout", "fused", "compile", "cache")
    machine = Machine(decode_ms=1, copy_ms=0, host_ms=1, noise=0.0, factors=dict.fromkeys(rungs, 0.992))
    climb = climb_up(SimulatedRunner(machine), ladders={"full": {rung: {"enabled": True} for rung in rungs}})
    whole = machine.step_ms({rung: {} for rung in rungs}, "as_it_is")
    assert machine.step_ms(climb.stack, "as_it_is") < 1.011 * whole and len(climb.stack) == len(rungs) - 1


def check_resumed(whole: Climb, why: str, runner_of: Any, budget_s: float, **settings: Any) -> None:
    """In calls of this budget each, a climb comes to the same end as the whole one, and repeats nothing."""
    done: dict[str, Result] = {}
    ran: list[str] = []
    rows: list[Any] = []
    for _ in range(60):
        runner = runner_of(done=done).with_budget(budget_s)
        climb = make_climb(runner, rows=rows, **settings)
        try:
            assert climb.climb() == why
            break
        except Spent:
            rows = climb.rows
            with contextlib.suppress(Spent):
                climb.confirm()  # as the command does
        finally:
            ran += runner.ran
    else:
        pytest.fail("it gets nowhere")
    assert climb.stack == whole.stack and [row.key for row in climb.rows] == [row.key for row in whole.rows]
    assert len(ran) == len(set(ran)), "what finished was found again"


@pytest.mark.usefixtures("calm")
def test_in_several_calls_a_climb_with_ladders_comes_to_the_same_top() -> None:
    whole = make_climb(SimulatedRunner(COMPUTED), ladders=list_shipped())
    why = whole.climb()
    check_resumed(whole, why, partial(SimulatedRunner, COMPUTED), 150, ladders=list_shipped())


@pytest.mark.usefixtures("calm")
def test_a_ladder_that_can_be_proved_in_time_comes_before_a_faster_one_that_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A BERT's `full` was 3.5 times as fast, and its proof did not fit into 295 s; that of `bf16`, 2.6 times, did."""

    def climb(budget_s: float) -> tuple[Confirmation | None, list[str]]:
        made = make_climb(SimulatedRunner(COMPUTED).with_budget(budget_s), ladders=list_shipped())
        monkeypatch.setattr(made, "_defer_slow_compiles", lambda ladders: ladders)  # `full` is run first
        with contextlib.suppress(Spent):
            made.climb()
        with contextlib.suppress(Spent):
            return made.confirm(), [row.name for row in made.rows if row.kept]
        return None, []

    proof, kept = climb(320)
    assert proof is not None and kept[0] == "ladder-bf16"
    proof, kept = climb(3600)
    assert proof is not None and kept[0] == "ladder-full", "with time for both it is the fastest"
    monkeypatch.setattr(Climb, "_leave_out_unprovable", lambda _, rates: rates)
    assert climb(320) == (None, []), "the control"


@pytest.mark.usefixtures("calm")
def test_a_faster_ladder_that_had_no_time_for_its_proof_comes_first_in_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ResNet's climb kept `safe` at 1,956 images/s, where `full` had trained 5,401, and went on with single rungs."""
    done: dict[str, Result] = {}
    machine = dataclasses.replace(COMPUTED, factors={"amp": 0.5, "compile": 0.5})
    first = make_climb(SimulatedRunner(machine, done=done).with_budget(320), ladders=list_shipped())
    monkeypatch.setattr(first, "_defer_slow_compiles", lambda ladders: ladders)
    with contextlib.suppress(Spent):
        first.climb()
    assert [row.key for row in first.rows if row.kept] == ["ladder-bf16"] and first.ladders["full"]

    def go_on(rates: Any) -> list[str]:
        runner = SimulatedRunner(machine, done=dict(done)).with_budget(3600)
        then = make_climb(runner, rows=first.rows, ladders=list_shipped(), rates=rates)
        then.climb()
        return [row.key for row in then.rows if row.kept]

    left = r"; full was 2\.\d times as fast in one run; proving full takes about \d min"
    assert re.fullmatch(left, describe_unproven(first))
    assert go_on(first.ladders)[1] == "ladder-full"
    assert "ladder-full" not in go_on({**first.ladders, "full": first.ladders["bf16"]}), "the control is as fast"


# -- what it does not keep --------------------------------------------------------------------------------------------


def test_a_broken_gradient_is_rolled_back_and_the_climb_goes_on() -> None:
    runner = SimulatedRunner(Machine(decode_ms=3, wrong=frozenset({"compile"})))
    climb = climb_up(runner)
    assert ended(climb, "compile") == "parity" and "compile" not in climb.stack and "amp" in climb.stack
    assert sum(row.key == "compile" for row in climb.rows) == 1, "and is not tried again"


def test_a_bf16_that_breaks_is_followed_by_tf32() -> None:
    class OnlyBf16(SimulatedRunner):
        def check_parity(self, at: str, base: Stack, arm: Stack, *rest: Any, **more: Any) -> Any:
            self.machine.wrong = frozenset({"amp"}) if arm["amp"].get("mode") is None else frozenset()
            return super().check_parity(at, base, arm, *rest, **more)

    climb = climb_up(OnlyBf16(Machine(decode_ms=3, factors={"amp": 0.5})))
    assert ended(climb, "amp") == "parity" and climb.stack["amp"] == {"enabled": True, "mode": "tf32"}


def test_a_crash_is_rolled_back_with_its_cause() -> None:
    climb = climb_up(SimulatedRunner(Machine(decode_ms=3, crashes={"compile": "killed by SIGSEGV"})))
    row = next(row for row in climb.rows if row.key == "compile")
    assert row.ended == "crashed" and row.why == "killed by SIGSEGV" and "amp" in climb.stack


def test_a_plan_that_says_no_is_said() -> None:
    climb = make_climb(
        SimulatedRunner(Machine(planned_off={"layout": "the model has no 2-D convolution"}, decode_ms=3))
    )
    climb.climb()
    row = next(row for row in climb.rows if row.key == "layout")
    assert row.ended == "inactive" and row.why == "the model has no 2-D convolution" and not row.kept


def test_what_the_start_shows_to_be_refused_costs_nothing() -> None:
    shows = {"layout": "the model has no 2-D convolution", "pin": "the loader already pins its memory"}
    runner = SimulatedRunner(Machine(decode_ms=3, shows=shows))
    climb = climb_up(runner)
    rows = {row.key: row for row in climb.rows if row.key in shows}
    assert {key: row.why for key, row in rows.items()} == shows
    assert all(row.ended == "inactive" and row.patch["rungs"] for row in rows.values())
    assert not any("layout" in at or "pin" in at for at in runner.ran) and "amp" in climb.stack


def test_what_changes_the_training_needs_leave() -> None:
    machine = Machine(decode_ms=3, classes={"batch": "changes-training"})
    climb = climb_up(SimulatedRunner(machine, best={"batch": 256}))
    assert ended(climb, "batch") == "class" and "batch" not in climb.stack
    allowed = climb_up(SimulatedRunner(machine, best={"batch": 256}), allow=["changes-training"])
    assert ended(allowed, "batch") == "kept" and "batch" in allowed.stack


def test_a_tuned_start_has_nothing_to_gain() -> None:
    machine = Machine(decode_ms=100, own_workers=8, copy_ms=0, device_ms=60, factors={"compile": 0.99, "batch": 1.1})
    runner = SimulatedRunner(machine)
    climb = make_climb(runner, enabled=["prefetch", "amp", "layout", "fused"])
    why = climb.climb()
    assert why.startswith("nothing to gain") and climb.stack == {} and climb.confirm() is None
    assert {row.ended for row in climb.rows} <= {"small", "inactive"} and runner.confirmed == []
    assert not any("screen" in at for at in runner.ran)


def test_noise_alone_leads_nowhere() -> None:
    """Nothing saves anything; what looked like a gain in one trial must not survive its screen."""
    kept = 0
    for number in range(20):
        runner = _Seeded(Machine(decode_ms=3, copy_ms=0, factors={}, noise=0.02), str(number))
        climb = climb_up(runner)
        kept += len(climb.stack)
    assert kept <= 6, "of five rungs in each of 20 climbs"


class _Seeded(SimulatedRunner):
    def __init__(self, machine: Machine, name: str) -> None:
        super().__init__(machine)
        self.name = name

    def _train(self, at: str, stack: Any, ask: Any) -> Result:
        return super()._train(f"{self.name}/{at}", stack, ask)


def test_a_screen_that_something_disturbed_has_a_third_pair() -> None:
    runner = Disturbed(Machine(decode_ms=3), {"01-amp/screen-2-arm": 15.0})
    climb = climb_up(runner)
    assert [row.ended for row in climb.rows if row.key == "amp"] == ["kept"]
    assert "compile" in climb.stack and (pool_spreads(climb.rows).sd or 1) < 0.02, (
        "nor does it blind the screens after it"
    )
    always = make_climb(Disturbed(Machine(decode_ms=3), {"screen-2-arm": 15.0, "screen-6-arm": 3.0}))
    why = always.climb()
    assert [row.ended for row in always.rows if row.key == "amp"] == ["odd"], "not again before the stack has grown"
    assert always.stack == {} and why.startswith("no remaining rung"), "which is not that there is nothing to gain"


# -- trials that cannot be true ---------------------------------------------------------------------------------------

PLAIN = Machine(decode_ms=120, noise=0.0)
"""Steps of 160 ms by loading, 140 without, 130 without copies."""


def test_a_ceiling_below_the_start_is_measured_again_with_the_start() -> None:
    runner = Disturbed(PLAIN, {"00-naive/replayed": 1.5})
    climb = climb_up(runner)
    assert runner.ran[2:5] == ["00-naive/replayed", "00-naive/as_it_is-again", "00-naive/replayed-again"]
    assert climb.ceilings["replayed"] == pytest.approx(1e3 * BATCH / 140) and "replayed" not in climb.notes
    undisturbed = climb_up(SimulatedRunner(PLAIN))
    assert not any("again" in at for at in undisturbed.runner.ran)  # type: ignore[attr-defined]
    assert undisturbed.notes == {f"replayed{TOP}": BESIDE}, "the rest of the top is from its runs"
    assert climb.stack == undisturbed.stack


def test_a_start_that_something_disturbed_is_measured_again() -> None:
    """All lengths follow from its step: at 20 times as long a step, all windows would have the fewest steps."""
    runner = Disturbed(PLAIN, {"00-naive/pilot": 20.0})
    climb = begin(runner)
    assert runner.ran[:3] == ["00-naive/pilot", "00-naive/replayed", "00-naive/as_it_is-again"]
    assert climb.naive is not None and climb.naive.step_ms == pytest.approx(160) == climb.known.costs.now_ms
    assert "slower than replayed ones" in climb.notes["00-naive/as_it_is-again"]
    assert runner.asks["00-naive/as_it_is-again"][1].steps > 14


def test_a_ceiling_that_stays_below_the_start_is_none() -> None:
    runner = Disturbed(PLAIN, {"00-naive/replayed": 1.5, "00-naive/replayed-again": 1.4})
    climb = begin(runner)
    assert climb.naive is not None and climb.costs is not None
    assert climb.ceilings["replayed"] == pytest.approx(climb.naive.samples_per_s)
    assert climb.costs.replayed_ms == pytest.approx(climb.costs.core_ms)
    assert climb.notes["replayed"].startswith(
        f"no ceiling: two trials without these costs were slower ({1e3 * BATCH / 140 / 1.4:,.0f} samples/s)"
    )
    assert climb.ceilings["resident"] == pytest.approx(1e3 * BATCH / 130) and "resident" not in climb.notes


def test_with_workers_of_ones_own_the_rest_is_what_the_run_shows() -> None:
    """Predictions have them beside, so what they are held against has them too; the ceiling is a trial all the same."""
    machine = Machine(decode_ms=80, own_workers=8, copy_ms=0, crowding=1.3, noise=0.0)
    climb = begin(SimulatedRunner(machine))
    assert climb.costs is not None and climb.costs.replayed_ms == pytest.approx(1.3 * 130)
    assert climb.ceilings["replayed"] == pytest.approx(1e3 * BATCH / 130)


def test_a_confirmation_does_not_wait_for_queues_that_can_be_read() -> None:
    climb = make_climb(SimulatedRunner(Machine(noise=0.0)))
    climb.begin()
    assert climb.costs is not None
    lengths = []
    for read in (True, False):
        climb.costs = climb.costs.but(fill_read=read, workers=64)
        climb.rows = [Attempt(rung="workers", kept=True, patch=make_patch("workers", count=64), key="workers")]
        lengths.append(climb._choose_confirm_length())
    assert lengths[0].warmup < lengths[1].warmup and lengths[0].window == lengths[1].window


def test_a_ceiling_is_at_least_what_was_run() -> None:
    runner = Disturbed(PLAIN, {"00-naive/replayed": 1.17})
    climb = begin(runner)
    assert climb.naive is not None and climb.ceilings["replayed"] == pytest.approx(climb.naive.samples_per_s)
    assert "00-naive/replayed-again" not in runner.ran and climb.notes == {}, "2 % are noise"


def test_a_resident_batch_is_no_slower_than_a_replayed_one() -> None:
    runner = Disturbed(PLAIN, {"resident": 1.15, "resident-again": 1.17})
    climb = begin(runner)
    assert "00-naive/resident-again" in runner.ran and "00-naive/as_it_is-again" not in runner.ran, (
        "it was below the start"
    )
    assert climb.ceilings["resident"] == pytest.approx(climb.ceilings["replayed"]) and set(climb.notes) == {"resident"}


def test_a_machine_that_got_slower_is_compared_with_itself() -> None:
    runner = Disturbed(dataclasses.replace(PLAIN, factors={"amp": 0.5}), {"pilot": 1.0, "as-it-is": 1.0, "": 1.5})
    climb = climb_up(runner)
    assert climb.naive is not None and climb.naive.step_ms == pytest.approx(1.5 * 160)
    assert set(climb.notes) == {"00-naive/as_it_is-again", f"replayed{TOP}"} and {"workers", "amp"} <= set(climb.stack)
    assert all(rate > climb.naive.samples_per_s for rate in climb.ceilings.values() if rate)  # type: ignore[operator]
    resumed = Climb(
        SimulatedRunner(PLAIN, done=runner.done),
        climb.start,
        warmup=20,
        before=ClimbFile(rungs=tuple(climb.rows), ceilings_notes=climb.notes, ceilings_samples_per_s=climb.ceilings),
    )
    resumed.climb()
    assert resumed.naive == climb.naive and resumed.runner.ran == []  # type: ignore[attr-defined]


# -- what stops it ----------------------------------------------------------------------------------------------------


def test_a_start_that_fails_ends_it() -> None:
    class Broken(SimulatedRunner):
        def _train(self, at: str, stack: Any, ask: Any) -> Result:
            return Result(ok=False, cause="no such file")

    climb = make_climb(Broken(Machine()))
    with pytest.raises(BaseFailed, match="no such file"):
        climb.climb()
    assert climb.rows == []


def test_nothing_begins_that_the_budget_does_not_hold() -> None:
    runner = SimulatedRunner(Machine()).with_budget(200)
    climb = make_climb(runner)
    with pytest.raises(Spent):
        climb.climb()
    assert runner.ran and runner.late == [] and runner.now < 200


def test_a_ladder_that_does_not_fit_leaves_its_time_to_the_others() -> None:
    begun: list[float] = []
    whole = SimulatedRunner(COMPUTED, before=lambda at: begun.append(whole.now) if "ladder-full" in at else None)
    climb_up(whole, ladders=list_shipped())
    compile_s = collect_cards()["compile"].first_start_s
    climb = make_climb(SimulatedRunner(COMPUTED).with_budget(begun[0] + START_S + compile_s), ladders=list_shipped())
    with pytest.raises(Spent, match=r"ladder-full: first run"):
        climb.climb()
    assert climb.ladders and "full" not in climb.ladders


def test_a_ladder_that_does_not_fit_ends_no_climb_that_has_time_to_prove_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script of 64 steps ended after 19 of 90 s, with a ladder that was a seventh faster, because `full` compiles."""
    monkeypatch.setattr(simulated_runner, "START_S", 2.0)
    machine = Machine(decode_ms=0.1, copy_ms=0, device_ms=8, host_ms=0.1, factors={"amp": 0.87}, ends_at=64)
    climb = make_climb(SimulatedRunner(machine).with_budget(90), ladders=list_shipped())
    with contextlib.suppress(Spent):
        climb.climb()
    assert "full" not in climb.ladders and climb.put_off == ["full"]
    assert [row.key for row in climb.rows if row.kept] == ["ladder-bf16"] and climb.confirm() is not None


@pytest.mark.parametrize("ends_at", [72, 18], ids=["in the window", "in the warm-up"])
def test_a_script_that_ends_soon_is_asked_for_no_more_and_waited_for_no_longer(ends_at: int) -> None:
    """As many seconds as its own runs take are enough: a window of seconds would have 400 steps and take 18 s."""
    machine = dataclasses.replace(CIFAR, ends_at=ends_at)
    runner = SimulatedRunner(machine, best={"workers": 12}).with_budget(900)
    climb = climb_up(runner)
    later = {at: ask.steps for at, (_, ask) in runner.asks.items() if not at.startswith("00-naive/as-it-is")}
    assert "workers" in climb.stack and all((steps or 0) <= ends_at for steps in later.values()), later
    estimate_s = climb._estimate_confirmation_s()
    assert estimate_s <= 12 * (START_S + ends_at * 0.03), "and so is the confirmation"


@pytest.mark.parametrize("ends_at", [16, 20])
@pytest.mark.parametrize("machine", [GPT, COMPUTED], ids=["gpt", "computed"])
def test_a_script_that_ends_before_a_later_window_is_trained_for_shorter(machine: Machine, ends_at: int) -> None:
    """A GAN of 30 steps was measured in 16, and its climb died of a run whose window was to open after 32."""
    runner = SimulatedRunner(dataclasses.replace(machine, ends_at=ends_at))
    climb = climb_up(runner, ladders=list_shipped())
    known = climb_up(SimulatedRunner(runner.machine), ladders=list_shipped(), ends_at=ends_at)
    assert climb.ends_at == ends_at and climb.stack == known.stack and len(climb.stack) > 3
    assert [row.ended for row in climb.rows] == [row.ended for row in known.rows], "as if it had been known"
    assert None not in climb.ladders.values() and "crashed" not in {row.ended for row in climb.rows}


def test_it_is_still_known_in_a_later_call() -> None:
    """Otherwise rungs would be kept because the runs without them ended before their windows."""
    machine, done = dataclasses.replace(GPT, ends_at=20), dict[str, Result]()
    whole = climb_up(SimulatedRunner(machine), ladders=list_shipped())
    stopped = make_climb(SimulatedRunner(machine, done=done, before=stop_at("top-1/run-1")), ladders=list_shipped())
    with pytest.raises(Spent):
        stopped.climb()
    assert stopped.ends_at == 20
    again = make_climb(
        SimulatedRunner(machine, done=done), rows=stopped.rows, ladders=list_shipped(), ends_at=stopped.ends_at
    )
    again.climb()
    assert again.stack == whole.stack and [row.ended for row in again.rows] == [row.ended for row in whole.rows]


class CompiledEndsSoon(SimulatedRunner):
    """Stacks with `compile` end after four steps: a time limit, a loss that is no number."""

    def _train(self, at: str, stack: Stack, ask: Ask) -> Result:
        if "compile" in stack:
            return Result(ok=False, cause="before the window", seconds=START_S, steps=4, ended_at=4)
        return super()._train(at, stack, ask)


def test_one_arm_that_ends_early_is_not_the_scripts_end() -> None:
    climb = climb_up(CompiledEndsSoon(COMPUTED), ladders=list_shipped())
    assert climb.ends_at is None and climb.stack and "compile" not in climb.stack
    assert climb.ladders["full"] is None and climb._choose_confirm_length().steps > 60


def stop_at(folder: str) -> Callable[[str], None]:
    def stop(at: str) -> None:
        if at == folder:
            raise Spent(at)

    return stop


class EndsInItsProof(SimulatedRunner):
    """Its first confirmation ends before the windows do."""

    def confirm(self, at: str, stack: Stack, length: Length, *, need_s: float) -> Confirmation:
        if length.steps > 20:
            raise BaseFailed(Result(ok=False, cause="before the window", ended_at=20))
        return super().confirm(at, stack, length, need_s=need_s)


def test_a_proof_that_is_too_long_for_the_script_is_made_shorter() -> None:
    climb = climb_up(EndsInItsProof(COMPUTED), ladders=list_shipped())
    confirmed = climb.confirm()
    assert confirmed is not None and climb.ends_at == 20 and confirmed.run_dir.endswith("-20-steps")


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("amp", [0.62, 0.70])
def test_time_is_kept_for_all_pairs_of_a_screen(amp: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ladder that is less than twice as fast has a second pair, and budgets lost the proof to it."""
    machine = dataclasses.replace(COMPUTED, decode_ms=100, factors={"amp": amp})
    proven = list_proven(machine, range(300, 500, 10))[0]
    assert proven == list(range(proven[0], 500, 10)), "no larger budget has less"
    monkeypatch.setattr(loop, "CLEAR", 0.0)  # the control: time for one pair only, and for no wrong estimate
    monkeypatch.setattr(loop, "SURE", 1.0)
    monkeypatch.setattr(_Screen, "_has_time_for_proof_only", lambda *_: False)
    assert len(list_proven(machine, range(300, 500, 10))[0]) < len(proven)


def test_a_second_pair_leaves_the_proof_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a ladder that is just twice as fast, and in its first run seemed a little faster."""
    monkeypatch.setattr(simulated_runner, "START_S", 5.0)
    machine = Machine(
        decode_ms=3000,
        device_ms=150,
        host_ms=9,
        copy_ms=5,
        own_workers=4,
        queued=2,
        factors={"amp": 0.71, "layout+amp": 0.92, "fused": 0.97, "amp+layout+compile": 0.76, "batch": 1.0},
        compiles_s=80,
        caches_compiles=True,
        noise=0.002,
    )
    for waits, proven in ((True, True), (False, False)):
        if not waits:
            monkeypatch.setattr(_Screen, "_has_time_for_proof_only", lambda *_: False)  # the control
        runner = SimulatedRunner(machine).with_budget(600)
        climb = make_climb(runner, ladders=list_shipped())
        with contextlib.suppress(Spent):
            climb.climb()
        assert ended(climb, "ladder-full") == "kept"
        assert ("00-ladder-full/screen-4-base" in runner.ran) is not proven
        if proven:
            assert climb.confirm() is not None
        else:
            with pytest.raises(Spent):
                climb.confirm()


def test_no_time_is_kept_for_a_ladder_that_is_out() -> None:
    """Its time goes to the other ladders."""
    shuffles = dataclasses.replace(COMPUTED, shuffles=frozenset({"dali"}))
    climb = make_climb(SimulatedRunner(shuffles).with_budget(460), ladders=list_shipped())
    with contextlib.suppress(Spent):
        climb.climb()
    assert ended(climb, "ladder-full") == "parity" and ended(climb, "ladder-bf16") == "kept"
    assert climb.confirm() is not None


@pytest.mark.usefixtures("calm")
def test_time_is_kept_for_a_ladder_that_an_earlier_call_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Climb, "_defer_slow_compiles", lambda _, ladders: ladders)
    budget_s, done = 400, dict[str, Result]()
    first = SimulatedRunner(COMPUTED, done=done, before=stop_at("00-ladder-full/screen-1-base")).with_budget(budget_s)
    climb = make_climb(first, ladders=list_shipped())
    with pytest.raises(Spent):
        climb.climb()
    assert next(iter(climb.ladders)) == "full" and not climb.rows
    second = SimulatedRunner(COMPUTED, done=done).with_budget(budget_s - first.now)
    again = make_climb(second, ladders=list_shipped())
    again.ladders = dict(climb.ladders)
    with contextlib.suppress(Spent):
        again.climb()
    assert again.confirm() is not None


@pytest.mark.parametrize("ends_at", [None, 40, 18])
def test_a_pilot_that_only_drained_the_users_own_workers_is_made_again_and_longer(ends_at: int | None) -> None:
    """Eight workers with two batches each: the first 16 steps wait for nothing, and show nothing."""
    machine = dataclasses.replace(CIFAR, own_workers=8, queued=16, ends_at=ends_at)
    runner = SimulatedRunner(machine, best={"workers": 12})
    climb = make_climb(runner)
    climb.begin()
    first, again, *_ = runner.ran
    assert (first, again) == ("00-naive/pilot", "00-naive/pilot-longer") and climb.naive is not None
    assert runner.asks[again][1].warmup == 16 and climb.naive.step_ms and climb.ends_at == ends_at
    later = make_climb(SimulatedRunner(machine, done=runner.done), ends_at=climb.ends_at)
    later.begin()
    assert later.naive is not None and later.naive.step_ms == climb.naive.step_ms, "found again in a later call"


@pytest.mark.parametrize(("queued", "ends_at"), [(16, 16), (32, 16), (32, 30), (20, 20)])
def test_a_script_that_never_waits_for_its_workers_is_no_climb(queued: int, ends_at: int) -> None:
    runner = SimulatedRunner(dataclasses.replace(CIFAR, own_workers=8, queued=queued, ends_at=ends_at))
    with pytest.raises(
        BaseFailed, match=rf"trained {ends_at} steps, but its loader already had {queued} batches ready"
    ):
        make_climb(runner).begin()
    assert len(runner.ran) <= 3


def test_a_script_of_a_few_steps_is_no_climb() -> None:
    with pytest.raises(BaseFailed, match=r"it ends after 9 steps, but a climb needs 14"):
        climb_up(SimulatedRunner(dataclasses.replace(CIFAR, ends_at=9)))


def test_once_there_is_something_to_confirm_time_is_kept_for_it() -> None:
    runner = SimulatedRunner(Machine(noise=0.0), best={"batch": 256}).with_budget(640)
    climb = make_climb(runner)
    with pytest.raises(Spent):
        climb.climb()
    assert climb.stack and runner.budget.left_s() > 100
    assert climb.confirm() is not None and runner.confirmed == [climb.stack]
    assert runner.budget.left_s() >= -GRACE_S


SLOW = Machine(decode_ms=5, device_ms=1580, copy_ms=1, host_ms=100, factors={"amp": 0.4, "compile": 0.75})
"""To confirm anything of this one takes 7 minutes."""


def test_a_confirmation_that_does_not_fit_is_not_begun_and_the_budget_is_for_rungs() -> None:
    runner = SimulatedRunner(SLOW).with_budget(400)
    climb = make_climb(runner)
    with pytest.raises(Spent):
        climb.climb()
    assert climb.stack and runner.budget.left_s() < 60, "nothing was kept back for what cannot be had"
    with pytest.raises(Spent, match=r"^the confirmation, about [4-8] min$"):
        climb.confirm()
    assert runner.confirmed == [] and not any("confirm" in at for at in runner.ran)


def test_a_later_call_confirms_what_an_earlier_one_had_no_time_for() -> None:
    done: dict[str, Result] = {}
    rows: list[Any] = []
    found, calls = None, 0
    while found is None and calls < 6:
        calls += 1
        runner = SimulatedRunner(SLOW, done=done).with_budget(340)
        climb = make_climb(runner, rows=rows)
        with contextlib.suppress(Spent):
            climb.climb()
        with contextlib.suppress(Spent):
            found = climb.confirm()
        rows = climb.rows
    assert found is not None and calls > 1, "there was no time for it in the first call"
    assert runner.confirmed == [climb.stack] and runner.budget.left_s() >= -GRACE_S


def test_what_has_finished_of_a_confirmation_is_not_waited_for_again() -> None:
    runner = SimulatedRunner(SLOW)
    climb = climb_up(runner)
    runner.with_budget(120)
    with pytest.raises(Spent):
        climb.confirm()
    runner.confirm_done_s = 300.0
    runner.budget = type(runner.budget)(190, lambda: runner.now)
    assert climb.confirm() is not None


# -- what it saves itself ---------------------------------------------------------------------------------------------


def test_no_trial_for_copies_that_hardly_take_time() -> None:
    runner = SimulatedRunner(SLOW)
    climb = climb_up(runner)
    assert not any("resident" in at for at in runner.ran)
    assert (
        climb.ceilings["resident"] == climb.ceilings["replayed"]
        and "same as replayed: copies take 1 ms" in climb.notes["resident"]
    )
    shown = SimulatedRunner(RESNET)
    climb_up(shown)
    assert "00-naive/resident" in shown.ran, "10 ms of 140 ms count"
    untold = SimulatedRunner(dataclasses.replace(SLOW, tells_copies=False))
    untold._train = _silent(untold)  # type: ignore[method-assign]
    climb_up(untold)
    assert "00-naive/resident" in untold.ran, "what nobody could see is not nothing"


def _silent(runner: SimulatedRunner) -> Any:
    original = runner._train
    return lambda *asked: dataclasses.replace(original(*asked), copies_ms=None)


@pytest.mark.parametrize(
    ("machine", "asked"),
    [(RESNET, False), (Machine(own_workers=4), True)],
    ids=["its own thread loads", "workers load"],
)
def test_what_the_training_thread_loads_needs_no_trial(machine: Machine, asked: bool) -> None:
    runner = SimulatedRunner(machine)
    climb_up(runner)
    assert ("00-naive/loader" in runner.ran) is asked


def test_a_rung_on_slow_steps_costs_little_more_than_its_starts() -> None:
    """As in the climbs this was learned from: a second for a naive step, and twelve for a start."""
    runner = SimulatedRunner(Machine(decode_ms=835, device_ms=130, copy_ms=19))
    climb_up(runner)
    workers = {at: seconds for at, seconds in runner.seconds.items() if at.startswith("01-workers/")}
    assert set(workers) == {
        "01-workers/predict-1",
        *(f"01-workers/screen-{each}" for each in ("1-base", "2-arm")),
    }
    assert sum(workers.values()) < 5 * START_S + 2 * 20 + 2 * 6 + 20


def test_workers_and_computing_that_wait_for_each_other_are_raised_together() -> None:
    climb = climb_up(SimulatedRunner(COMPUTED, best={"batch": 256}))
    taken = [row.rung for row in climb.rows if row.kept and "rungs.workers.count" in (row.tuned or {})]
    assert taken[0] == "workers" and len(taken) > 1 and "workers" not in taken[1:]
    assert all("screen" not in at for at in climb.runner.ran if "workers-count" in at)  # type: ignore[attr-defined]


@pytest.mark.parametrize("budget_s", [70, 150, 400])
def test_resumed_it_repeats_nothing_and_comes_to_the_same_top(budget_s: float) -> None:
    whole = make_climb(SimulatedRunner(Machine(), best={"workers": 12, "batch": 256}))
    why = whole.climb()
    check_resumed(whole, why, partial(SimulatedRunner, Machine(), best={"workers": 12, "batch": 256}), budget_s)


def test_killed_anywhere_it_goes_on_where_it_stood() -> None:
    whole_lab = SimulatedRunner(Machine(), best={"workers": 12})
    whole = climb_up(whole_lab)
    trained = [at for at in whole_lab.ran if "tune" not in at and "gradient" not in at]
    for killed_at in trained[1::3]:
        done: dict[str, Result] = {}

        def kill(at: str, deadly: str = killed_at) -> None:
            if at == deadly:
                raise KeyboardInterrupt

        first = SimulatedRunner(Machine(), done=done, best={"workers": 12}, before=kill)
        climb = make_climb(first)
        with pytest.raises(KeyboardInterrupt):
            climb.climb()
        second = SimulatedRunner(Machine(), done=done, best={"workers": 12})
        again = climb_up(second, rows=climb.rows)
        assert again.stack == whole.stack and not set(first.ran) & set(second.ran), killed_at


# -- the spread -------------------------------------------------------------------------------------------------------


def test_the_spread_is_gathered_from_all_screens() -> None:
    rows = [
        Attempt(rates=Rates(base=(100.0, 101.0), arm=(110.0, 112.0))),
        Attempt(rates=Rates(base=(), arm=())),
        Attempt(rates=Rates(base=(100.0, 99.0), arm=(50.0,))),
        Attempt(rates=Rates(base=(110.0, 108.0), arm=(120.0, 121.0))),
    ]
    found = pool_spreads(rows)
    assert found.dof == 2 and found.sd is not None and 0.001 < found.sd < 0.02
    assert pool_spreads([]).sd is None
