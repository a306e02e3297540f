"""The laboratory of a climb: what it asks of trials, and what it finds again. The trainings themselves are made up."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fastloop.commands.climb import list_shipped
from fastloop.errors import ConfigError
from fastloop.experiments.ab import passports
from fastloop.experiments.ab.arms import Ask, ConfigArm
from fastloop.experiments.climb import runner as module
from fastloop.experiments.climb.attempt import BaseFailed
from fastloop.experiments.climb.budget import GRACE_S, ClimbBudget, Length, Spent
from fastloop.experiments.climb.interface import Needs, Result
from fastloop.experiments.climb.runner import ProcessRunner
from fastloop.experiments.trials.trial import Job, read_finished
from fastloop.experiments.tune.search import KnownTimes
from fastloop.records import store
from fastloop.records.experiment import Gate
from fastloop.records.measurement import Measurement
from fastloop.records.store import read, to_json
from fastloop.records.trial import Trial
from tests.trainings import NET

AMP = {"amp": {"enabled": True}}


class World:
    """What trials do here: their seconds, their cause, their device."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Job, Ask, Any]] = []
        self.seconds, self.cause, self.device = 1.0, None, "Made Up 1"
        self.refused = ""
        self.plan: dict[str, Any] = {"parity_class": "approximate", "rungs": []}

    def run(self, arm: Any, label: str, folder: Path, ask: Ask, *, limits: Any = None, progress: Any = None) -> Trial:
        self.asked.append((label, arm.job, ask, limits))
        if progress is not None:
            progress(f"{label}: step 1 of 2")
        result = {
            "steps": 20,
            "samples_per_s": 100.0 + ask.seed,
            "global_batch": 10,
            "device_name": self.device,
            "loss": [1.0 + 0.1 * ask.seed] * 30,
        }
        trial = Trial(
            name=label,
            ok=self.cause is None,
            cause=self.cause,
            seconds=self.seconds,
            run_dir=folder,
            code=0,
            measurement=store.decode(result, Measurement),
        )
        amp = {"rung": "amp", "took": not self.refused, "why": self.refused or "bfloat16"}
        took = [amp] if arm.config().ladder.amp.enabled else []
        contents = {
            "verdicts": {"verdicts": took},
            "measurement": result,
            "plan": self.plan,
            "trial": store.to_json(trial),
        }
        store.write(folder, {f"{name}.json": store.dump(each) for name, each in contents.items()})
        return trial


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(ConfigArm, "run", lambda arm, *rest, **more: made.run(arm, *rest, **more))
    return made


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(place: Path, clock: Clock, budget_s: float = 1000.0) -> tuple[ProcessRunner, list[str]]:
    said: list[str] = []
    return ProcessRunner(
        ConfigArm(name="net", job=Job(conf=str(NET))),
        place,
        ClimbBudget(budget_s, clock),
        limit_s=300,
        progress=said.append,
    ), said


def run(bench: ProcessRunner, at: str = "01-amp/predict-1", **changes: Any) -> Result:
    return bench.run(
        at, changes.pop("stack", AMP), Ask(steps=9), what="amp: predicting", need_s=changes.pop("need_s", 5.0)
    )


def test_a_stack_is_trained_in_its_folder_and_found_again(world: World, clock: Clock, tmp_path: Path) -> None:
    bench, said = made(tmp_path, clock)
    first = run(bench)
    ((label, job, ask, limits),) = world.asked
    assert label == "amp: predicting" and job.overrides == ("rungs.amp.enabled=true",) and ask.steps == 9
    assert limits.total_s == 300 and read_finished(tmp_path / "01-amp/predict-1") is not None
    assert (
        said[0] == "amp: predicting; 16.7 min of the budget left"
        and "step 1 of 2; 16.7 min of the budget left" in said[1]
    )
    clock.now = 2000
    again, _ = made(tmp_path, clock, budget_s=1)
    clock.now = 9999
    assert run(again).samples_per_s == first.samples_per_s == 100 and len(world.asked) == 1


def test_the_rungs_of_a_ladder_have_to_pay(world: World, clock: Clock, tmp_path: Path) -> None:
    """As in the user's own run with that ladder. What is not in the stack is as it was."""
    start, ladders = Job(conf=str(NET), overrides=("rungs.pin.enabled=true",)), list_shipped()
    bench = ProcessRunner(
        ConfigArm(name="net", job=start),
        tmp_path,
        ClimbBudget(1000, clock),
        limit_s=300,
        progress=lambda _line: None,
        ladders=ladders,
    )
    stack = {rung: settings for rung, settings in ladders["bf16"].items() if rung not in ("pin", "cache")}
    for place, ladder in (("ladder", "bf16"), ("rungs", None)):
        bench.run(place, stack, Ask(steps=9), what="x", need_s=5.0, ladder=ladder, slowest_ms=300)
    configs = [job.config() for _, job, _, _ in world.asked]
    assert [config.by_ladder for config in configs] == [frozenset(stack), frozenset()]
    assert {rung for rung, each in configs[0].ladder.rungs() if each.enabled} == {*stack, "pin"}
    assert configs[0].ladder == configs[1].ladder and world.asked[0][3].slowest_step_s == 0.3


def test_nothing_is_begun_that_the_budget_does_not_hold(world: World, clock: Clock, tmp_path: Path) -> None:
    bench, _ = made(tmp_path, clock, budget_s=20)
    with pytest.raises(Spent):
        run(bench, need_s=21.0)
    assert world.asked == [] and list(tmp_path.iterdir()) == []


def test_what_the_budget_ended_says_nothing_of_the_training(world: World, clock: Clock, tmp_path: Path) -> None:
    bench, _ = made(tmp_path, clock, budget_s=20)
    world.cause, world.seconds = "exceeded its time limit of 50 s", 20 + GRACE_S
    with pytest.raises(Spent):
        run(bench)
    assert world.asked[0][3].total_s == 20 + GRACE_S and not (tmp_path / "01-amp/predict-1").exists()


def test_a_training_that_fails_by_itself_says_why(world: World, clock: Clock, tmp_path: Path) -> None:
    bench, _ = made(tmp_path, clock)
    world.cause = "killed by SIGKILL"
    assert run(bench).cause == "killed by SIGKILL"
    world.cause = None
    assert run(bench).ok and len(world.asked) == 2, "what failed is tried again on another day"


def test_a_training_that_outlives_the_grace_is_ended(world: World, clock: Clock, tmp_path: Path) -> None:
    bench, _ = made(tmp_path, clock, budget_s=10)

    def late(*_: Any, progress: Any, **more: Any) -> Any:
        clock.now = 11 + GRACE_S
        progress("gradient: step 1")

    world.run = late  # type: ignore[method-assign, assignment]
    with pytest.raises(Spent):
        run(bench)


def test_two_machines_do_not_compare(world: World, clock: Clock, tmp_path: Path) -> None:
    bench, _ = made(tmp_path, clock)
    run(bench)
    another, _ = made(tmp_path, clock)
    run(another)
    world.device = "Made Up 2"
    with pytest.raises(ConfigError, match="this climb began on Made Up 1"):
        run(another, at="01-amp/screen-1-base")


def test_another_host_with_the_same_device_goes_on(world: World, clock: Clock, tmp_path: Path) -> None:
    bench, _ = made(tmp_path / "here", clock)
    first = run(bench)
    env = tmp_path / "here" / "01-amp/predict-1" / "env.json"
    env.write_text('{"hardware": {"cpu_model": "A", "gpus": [{"driver": "550.1"}]}}')
    (tmp_path / "here").rename(tmp_path / "there")  # another session finds it at another place
    another, _ = made(tmp_path / "there", clock)
    assert run(another).samples_per_s == first.samples_per_s and len(world.asked) == 1
    assert run(another, at="01-amp/screen-1-base").ok and len(world.asked) == 2


def test_a_rung_that_the_configuration_forbids_is_no_end(world: World, clock: Clock, tmp_path: Path) -> None:
    bench, _ = made(tmp_path, clock)
    bench.start = bench.start.change("net", "trainer.precision=32-true")
    found = run(bench)
    assert "trainer.precision" in found.skipped["amp"] and "rungs.amp is enabled and sets it" in found.skipped["amp"]
    assert world.asked == [] and list(tmp_path.iterdir()) == []


# -- searching --------------------------------------------------------------------------------------------------------


def test_each_training_of_a_search_has_to_fit(world: World, clock: Clock, tmp_path: Path) -> None:
    original = world.run

    def slow(*rest: Any, **more: Any) -> Trial:
        clock.now += 20
        return original(*rest, **more)

    world.run = slow  # type: ignore[method-assign]
    asked: dict[str, Any] = {"given": KnownTimes(ms={0: 150.0}), "what": "overlap: tuning", "need_s": 20.0}
    bench, _ = made(tmp_path, clock, budget_s=50)
    with pytest.raises(Spent, match=r"overlap: tuning, overlap-50 \(about 20 s\)"):
        bench.tune("01-overlap/tune", {}, "overlap", Length(warmup=3, window=10), **asked)
    assert [label for label, *_ in world.asked] == ["overlap-10", "overlap-25"], "what is known is not trained"
    again, _ = made(tmp_path, clock, budget_s=500)
    again.tune("01-overlap/tune", {}, "overlap", Length(warmup=3, window=10), **asked)
    labels = [label for label, *_ in world.asked]
    assert len(labels) == len(set(labels)) and "overlap-50" in labels, "what had finished is found again"


# -- gates ------------------------------------------------------------------------------------------------------------


def pairs(world: World, bench: ProcessRunner) -> list[tuple[Result, Result]]:
    runs = [
        run(bench, at=f"01-amp/{side}-{number}", stack=AMP if side == "arm" else {})
        for number in (1, 2)
        for side in ("base", "arm")
    ]
    world.asked.clear()
    return [(runs[0], runs[1]), (runs[2], runs[3])]


def judged(world: World, bench: ProcessRunner, base: Any = None, at: str = "01-amp") -> Any:
    return bench.check_parity(
        at, base or {}, {**(base or {}), **AMP}, pairs(world, bench), what="amp: parity", need_s=5
    )


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the two gates say."""
    said: dict[str, Any] = {"ledger": True, "gradient": True, "folders": []}

    def ledger(trials: Any, *rest: Any) -> Gate:
        return Gate(name="ledger", passed=said["ledger"], why="x")

    monkeypatch.setattr(module.parity_gates, "judge_ledgers", ledger)

    def gradient(base: Any, arm: Any, base_folder: Path, folder: Path, *rest: Any, **more: Any) -> Gate:
        said["folders"].append((base.job.overrides, arm.job.overrides, base_folder, folder))
        return Gate(name="gradient", passed=said["gradient"], why="y", detail={"testable": False})

    monkeypatch.setattr(module.parity_gates, "judge_gradients", gradient)
    return said


def test_ledger_and_gradient_decide(world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path) -> None:
    bench, _ = made(tmp_path, clock)
    found = judged(world, bench)
    assert found.passed is True and [each.name for each in found.gates] == ["ledger", "gradient"]
    assert found.parity_class == "approximate"
    (passport,) = passports.load("amp")
    assert passport.passed is True and passport.runs == 2
    gate["gradient"] = False
    assert judged(world, bench).passed is False


@pytest.mark.parametrize("took_s", [69, 71])
def test_a_gradient_that_the_budget_ended_says_nothing(
    took_s: int, world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 s, 30 are kept for the proof."""
    bench, _ = made(tmp_path, clock, budget_s=100)
    bench.reserve(30)

    def gradient(*_: Any, limits: Any, **__: Any) -> Gate:
        assert limits.total_s == 70
        clock.now += took_s
        return Gate(name="gradient", passed=None, why="the arm's gradient could not be taken: exceeded its time limit")

    monkeypatch.setattr(module.parity_gates, "judge_gradients", gradient)
    if took_s < 70:
        assert judged(world, bench).undecided
    else:
        with pytest.raises(Spent, match="amp: parity"):
            judged(world, bench)


def test_a_ledger_that_differs_needs_no_gradient(
    world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path
) -> None:
    bench, _ = made(tmp_path, clock)
    gate["ledger"] = False
    assert judged(world, bench).passed is False and gate["folders"] == []


def test_the_samples_of_one_pair_need_no_training(
    world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path
) -> None:
    bench, _ = made(tmp_path, clock)
    first = pairs(world, bench)[:1]
    assert bench.compare_ledgers({}, AMP, first).passed is not False and passports.load("amp") == ()
    gate["ledger"] = False
    found = bench.compare_ledgers({}, AMP, first)
    assert found.passed is False and [each.name for each in found.gates] == ["ledger"] and world.asked == []
    (passport,) = passports.load("amp")
    assert passport.passed is False and passport.runs == 1
    world.plan = {"parity_class": "changes-training", "rungs": []}
    assert bench.compare_ledgers({}, AMP, pairs(world, made(tmp_path / "b", clock)[0])[:1]).gates == ()


def test_another_training_claims_no_parity(world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path) -> None:
    bench, _ = made(tmp_path, clock)
    world.plan = {"parity_class": "changes-training", "rungs": []}
    found = judged(world, bench)
    assert found.passed is None and found.gates == () and gate["folders"] == []


def test_the_gradient_of_a_stack_is_taken_once(
    world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path
) -> None:
    bench, _ = made(tmp_path, clock)
    fused = {"fused": {"enabled": True}}
    for at, base in (("01-amp", {}), ("02-amp", {}), ("03-amp", fused)):
        judged(world, bench, base, at)
    bases = [folder for _, _, folder, _ in gate["folders"]]
    assert bases[0] == bases[1] != bases[2] and bases[0].name == "naive" and "fused" in bases[2].name
    assert gate["folders"][2][:2] == (
        ("rungs.fused.enabled=true",),
        ("rungs.fused.enabled=true", "rungs.amp.enabled=true"),
    )


# -- confirming -------------------------------------------------------------------------------------------------------


def confirmed(bench: ProcessRunner) -> Any:
    return bench.confirm("confirm-1", AMP, Length(warmup=3, window=30), need_s=5)


def test_the_start_against_the_top_in_fresh_runs(
    world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path
) -> None:
    bench, _ = made(tmp_path, clock)
    figures = to_json(confirmed(bench))
    found = read(tmp_path / "confirm-1" / "comparison.json") or {}
    assert [arm["name"] for arm in found["arms"]] == ["naive", "top"] and found["partial"] is False
    assert found["steps"] == 34 and [arm["runs"] for arm in found["arms"]] == [3, 3]
    assert sorted(found["order"]) == ["naive"] * 3 + ["top"] * 3 and len(gate["folders"]) == 1
    assert figures.pop("failures") == found["failures"] == [] and figures.pop("run_dir") == found["run_dir"]
    (first,) = found["comparisons"]
    assert figures.pop("inactive") == {}
    medians = [median(arm["samples_per_s"]) for arm in found["arms"]]
    assert [figures.pop(f"{name}_samples_per_s") for name in ("naive", "top")] == medians
    assert figures == {key: first[key] for key in figures} and figures["ratio"] is not None


def test_a_rung_without_effect_in_the_fresh_runs_is_kept_with_its_reason(
    world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path
) -> None:
    world.refused = "it was refused"
    assert confirmed(made(tmp_path, clock)[0]).inactive == {"amp": "it was refused"}


def test_a_confirmation_that_was_cut_short_goes_on(
    world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path
) -> None:
    original = world.run

    def slow(*rest: Any, **more: Any) -> Trial:
        clock.now += 30
        return original(*rest, **more)

    world.run = slow  # type: ignore[method-assign]
    bench, _ = made(tmp_path, clock, budget_s=100)
    with pytest.raises(Spent):
        confirmed(bench)
    before = len(world.asked)
    assert before and (read(tmp_path / "confirm-1" / "comparison.json") or {})["partial"] is True
    again, _ = made(tmp_path, clock, budget_s=1000)
    confirmed(again)
    assert (read(tmp_path / "confirm-1" / "comparison.json") or {})["partial"] is False
    folders = [label for label, *_ in world.asked]
    assert len(folders) - len(set(folders)) <= 1, "only the run that was cut short is done again"


def test_what_is_left_of_a_confirmation(world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path) -> None:
    """Its own folders, so that it is seen when an experiment goes about it in another way."""
    needs = Needs(start_s=1, first_s=5, base_s=10, arm_s=100, gradients_s=1000)
    bench, _ = made(tmp_path, clock)
    assert bench.estimate_confirmation_s("confirm-1", needs) == 5 + 3 * 10 + 3 * 100 + 1 + 2 * 1000
    confirmed(bench)
    assert sorted({ask.steps for _, _, ask, _ in world.asked if ask.steps}) == [13, 34], "the first run is a short one"
    assert bench.estimate_confirmation_s("confirm-1", needs) == 2 * 1000, "the gradients are made up here"
    assert bench.estimate_confirmation_s("confirm-2", needs) > 2 * 1000
    for place in ("gradients/naive", "confirm-1/1-top/gradients"):
        world.run(bench._make_arm("naive", {}), place, tmp_path / place, Ask())
    assert bench.estimate_confirmation_s("confirm-1", needs) == 0
    assert gate["folders"][0][2] == tmp_path / "gradients" / "naive", "as in the climb's own checks"


def test_a_climb_that_trained_before_its_confirmation_needs_no_run_that_fills_the_page_cache(
    world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path
) -> None:
    needs = Needs(start_s=1, first_s=5, base_s=10, arm_s=100, gradients_s=1000)
    bench, _ = made(tmp_path, clock)
    bench.run("00-naive/pilot", {}, Ask(steps=9), what="the pilot", need_s=1)
    assert bench.estimate_confirmation_s("confirm-1", needs) == 3 * 10 + 3 * 100 + 1 + 2 * 1000
    confirmed(bench)
    assert not (tmp_path / "confirm-1" / "base" / "warm-up").exists()
    again, _ = made(tmp_path / "again", clock)
    confirmed(again)
    assert (tmp_path / "again" / "confirm-1" / "base" / "warm-up").exists(), "the control: a call that goes on"


def test_a_confirmation_that_cannot_end_does_not_begin(
    world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path
) -> None:
    bench, _ = made(tmp_path, clock, budget_s=100)
    with pytest.raises(Spent):
        bench.confirm("confirm-1", AMP, Length(warmup=3, window=30), need_s=101 + GRACE_S)
    assert world.asked == [] and not (tmp_path / "confirm-1").exists()


def test_a_start_that_fails_confirms_nothing(world: World, clock: Clock, gate: dict[str, Any], tmp_path: Path) -> None:
    world.cause = "killed by SIGKILL"
    bench, _ = made(tmp_path, clock)
    with pytest.raises(BaseFailed, match="SIGKILL"):
        confirmed(bench)
