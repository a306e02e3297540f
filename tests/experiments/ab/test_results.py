"""What an experiment writes: rows of arms, causes of failures, what makes figures doubtful."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastloop.experiments.ab import passports, results
from fastloop.experiments.ab.experiment import Experiment, Settings, Side
from fastloop.experiments.ab.sides import list_sides
from fastloop.records.store import to_json
from fastloop.report.drawing.html import draw_reports
from fastloop.report.experiments import ab_report
from tests.experiments.made_arms import MadeArm


def done(place: Path, *arms: MadeArm) -> Experiment:
    sides = list_sides([MadeArm(), *arms], aa=True)
    for side in sides:
        side.folder = place / side.folder
    made = Experiment(sides, place, Settings(steps=40, runs=3), lambda _: None)
    made.run()
    return made


def amp(**settings: Any) -> MadeArm:
    return MadeArm(
        name="amp",
        overrides=("rungs.amp.enabled=true",),
        verdicts={"amp": True},
        parity_class="approximate",
        rate=lambda _: 120.0,
        **settings,
    )


def test_one_rung_alone_gets_its_passport(tmp_path: Path) -> None:
    content = results.write(done(tmp_path, amp()), "cifar10", partial=False)
    (passport,) = passports.load("amp")
    assert passport.parity_class == "approximate" and passport.passed is True and passport.runs == 3
    assert {gate.name for gate in passport.gates} == {"ledger", "gradient", "loss"}
    assert content.hardware.device_name == "a GPU" and content.hardware.torch == "2.11.0"
    results.write(done(tmp_path, amp()), "cifar10", partial=False)
    assert len(passports.load("amp")) == 1, "a resumed experiment says it again"
    results.write(done(tmp_path / "half", amp()), "cifar10", partial=True)
    assert len(passports.load("amp")) == 1, "what was stopped says nothing"
    pair = MadeArm(
        name="pair",
        overrides=("rungs.pin.enabled=true,rungs.prefetch.enabled=true",),
        verdicts={"pin": True, "prefetch": True},
    )
    results.write(done(tmp_path / "pair", pair), "cifar10", partial=False)
    assert passports.load("pin") == () and passports.load("prefetch") == ()


def test_the_top_copies_the_first_comparison(tmp_path: Path) -> None:
    content = to_json(results.summarize(done(tmp_path, amp(), MadeArm(name="again")), "cifar10", partial=False))
    first, second = content["comparisons"]
    assert all(content[key] == first[key] for key in ("ratio", "ci95", "verdict", "parity"))
    assert (first["verdict"], second["arm"]) == ("faster", "again") and second["parity"]["class"] == "exact"
    assert sorted(content["order"]) == ["again"] * 3 + ["amp"] * 3 + ["base"] * 3
    assert [arm["seeds"] for arm in content["arms"]] == [[0, 1, 2]] * 3
    json.dumps(content, allow_nan=False)


def test_a_script_that_ends_sooner_than_asked_is_told(tmp_path: Path) -> None:
    made = done(tmp_path, amp())
    for number in made.base.runs:
        measured(made.base, number, total_steps=40)
    assert results.summarize(made, "train", partial=False).ended_at is None
    for number in made.base.runs:
        measured(made.base, number, total_steps=28)
    found = results.summarize(made, "train", partial=False)
    assert (found.steps, found.ended_at) == (40, 28)


def measured(side: Side, number: int, **changes: Any) -> None:
    """Let a run have measured something else."""
    trial = side.runs[number]
    assert trial.measurement is not None
    side.runs[number] = replace(trial, measurement=replace(trial.measurement, **changes))


def test_throttling_and_short_windows_are_flagged_once_for_an_arm_with_its_runs(tmp_path: Path) -> None:
    made = done(tmp_path, amp())
    assert results.list_flags(made.sides) == []
    measured(
        made.sides[1], 1, state=("the GPU's clocks were held back: hw_thermal 12 %",), window_too_short=True, steps=60
    )
    for number in (0, 1, 2):
        crowded = f"the training waited for a CPU for about {10 * number + 40} % of the time"
        measured(made.base, number, state=(crowded,), window_too_short=True, steps=60)
    assert results.list_flags(made.sides) == [
        "base, run-0 to run-2: the training waited for a CPU for about 40 to 60 % of the time",
        "base, run-0 to run-2 and amp, run-1: window too short for the loader's queues",
        "amp, run-1: the GPU's clocks were held back: hw_thermal 12 %",
    ]
    for steps in (9, 0):  # without a timed step there is no rate, and this is why
        measured(made.sides[1], 1, state=(), window_too_short=True, steps=steps)
        assert results.list_flags(made.sides)[-1] == f"amp, run-1: window too short: {steps} steps"


@pytest.mark.parametrize(
    ("after_fit", "flagged"),
    [("", False), ("exit code 1: ValueError: plotting failed", True), ("exit code 1: no checkpoint to test", False)],
)
def test_a_script_that_fails_after_its_fit_is_flagged(tmp_path: Path, after_fit: str, flagged: bool) -> None:
    """Unless what it lacked is a checkpoint, which trials do not write."""
    made = done(tmp_path, amp())
    made.base.runs[1] = replace(made.base.runs[1], code=int(bool(after_fit)), after_fit=after_fit, unsaved=True)
    flag = "base, run-1: the script ended with exit code 1 after its fit"
    assert (flag in results.list_flags(made.sides)) == flagged


def test_a_flag_of_every_run_names_none(tmp_path: Path) -> None:
    made = done(tmp_path, amp())
    for side in made.sides:
        for number in side.runs:
            measured(side, number, state=("the CPUs were oversubscribed",))
    assert results.list_flags(made.sides) == ["all 6 runs: the CPUs were oversubscribed"]


@pytest.mark.parametrize(
    ("numbers", "said"), [([4], "run-4"), ([0, 1, 2], "run-0 to run-2"), ([1, 3, 4, 7], "run-1, run-3 to run-4, run-7")]
)
def test_runs_in_few_letters(numbers: list[int], said: str) -> None:
    assert results.format_spans(numbers) == said


def test_runs_of_several_environments_are_flagged_with_what_differs(tmp_path: Path) -> None:
    made = done(tmp_path, amp(), MadeArm(name="two", overrides=("run.devices=2",)))
    for number in made.sides[2].runs:  # by intention
        measured(made.sides[2], number, world_size=2)
    assert results.list_mixed_environments(made.sides) == []
    other = made.base.runs[2]
    (other.run_dir / "env.json").write_text(json.dumps({"versions": {"torch": "2.10.0"}, "driver": None}))
    measured(made.base, 2, device_name="another GPU")
    assert results.list_mixed_environments(made.sides) == [
        "the runs come from different environments: device a GPU and another GPU, torch 2.11.0 and 2.10.0"
    ]
    measured(made.sides[2], 1, world_size=4)
    (flag,) = to_json(results.summarize(made, "x", partial=False))["flags"]
    assert "number of devices 2 and 4" in flag, "a wish for two is no wish for four"


def set_environment(side: Side, number: int, **changes: Any) -> None:
    """Let a run have recorded other settings."""
    path = side.runs[number].run_dir / "env.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_settings_of_torch_that_differ_between_arms_are_flagged(tmp_path: Path) -> None:  # P6
    made = done(tmp_path, amp(), MadeArm(name="again"))
    for side in made.sides:
        high = side.name == "amp"
        flags = {"float32_matmul_precision": "high" if high else "highest", "cudnn_allow_tf32": True}
        for number in side.runs:
            set_environment(side, number, torch_flags={**flags, "cudnn_benchmark": high})
    (flag,) = results.list_flags(made.sides)
    assert flag == (
        "the runs have different settings: float32_matmul_precision highest (base and again) and high (amp);"
        " cudnn_benchmark false (base and again) and true (amp)"
    )
    result = results.summarize(made, "x", partial=False)
    assert any(flag in line for line in ab_report.write_lines(result))
    assert all(
        "float32_matmul_precision" in report for report in draw_reports(ab_report.make_document(result)).values()
    )


def test_variables_of_a_resumed_experiment_are_flagged_with_their_runs(tmp_path: Path) -> None:  # P6
    made = done(tmp_path, amp())
    for side in made.sides:
        for number in side.runs:
            once = {"NVIDIA_TF32_OVERRIDE": "0"} if number == 2 else {}
            set_environment(side, number, variables={"MASTER_PORT": str(number), "OMP_NUM_THREADS": "2", **once})
    assert results.list_flags(made.sides) == [
        "the runs have different settings: NVIDIA_TF32_OVERRIDE unset (base, run-0 to run-1 and amp, run-0 to run-1)"
        " and 0 (base, run-2 and amp, run-2)"
    ]
    set_environment(made.base, 0, variables=None, torch_flags=None)  # written by a version that did not keep them
    assert "(base, run-1 and amp, run-0 to run-1)" in results.list_flags(made.sides)[0]
