"""The gates of an experiment, from the files that runs left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastloop.experiments.ab import parity_gates
from fastloop.experiments.ab.arms import Ask
from fastloop.records.measurement import Measurement
from fastloop.records.store import to_json
from fastloop.records.trial import Trial
from tests.experiments.made_arms import MadeArm


def trial(folder: Path, number: int = 0, **settings: Any) -> Trial:
    return MadeArm(**settings).run("x", folder / f"run-{number}", Ask())


def rewrite(trial: Trial, name: str, content: Any) -> None:
    (trial.run_dir / name).write_text(json.dumps(content))


def test_the_weakest_class_of_the_plans_counts(tmp_path: Path) -> None:
    exact, loose = trial(tmp_path / "a"), trial(tmp_path / "b", parity_class="approximate")
    assert parity_gates.find_class([exact]) == "exact" and parity_gates.find_class([exact, loose]) == "approximate"
    assert parity_gates.find_class([]) == "exact"


def test_a_rung_took_if_it_took_in_every_run(tmp_path: Path) -> None:
    runs = [trial(tmp_path, n, verdicts={"amp": True, "pin": n != 1}) for n in range(3)]
    assert parity_gates.split_by_effect(runs) == (("amp",), {"pin": "there is one device"})


def test_the_ledger_is_compared_run_by_run_and_rank_by_rank(tmp_path: Path) -> None:
    bases = [trial(tmp_path / "base", n) for n in range(2)]
    arms = [trial(tmp_path / "arm", n) for n in range(2)]
    pairs = list(zip(bases, arms, strict=True))
    assert parity_gates.judge_ledgers(pairs, "exact").passed is True
    assert parity_gates.judge_ledgers([(bases[0], arms[1])], "exact").passed is False, "another seed has other samples"
    rank_1 = json.loads((bases[0].run_dir / "ledger.json").read_text()) | {"rank": 1}
    rewrite(bases[0], "ledger-1.json", rank_1)
    assert (
        parity_gates.judge_ledgers(pairs, "exact").passed is None
        and "ledger-1.json" in parity_gates.judge_ledgers(pairs, "exact").why
    )
    rank_1["steps"][4][0] = "other"
    rewrite(arms[0], "ledger-1.json", rank_1)
    assert parity_gates.judge_ledgers(pairs, "exact").passed is False


def test_a_rank_that_ended_badly_is_no_rank_that_saw_the_same(tmp_path: Path) -> None:
    base, arm = trial(tmp_path / "base"), trial(tmp_path / "arm")
    both = [Measurement(world_size=2)] * 2
    pairs = [tuple(replace(each, measurement=seen) for each, seen in zip((base, arm), both, strict=True))]
    gate = parity_gates.judge_ledgers(pairs, "exact")  # type: ignore[arg-type]
    assert gate.passed is None and gate.is_testable and gate.why == "a run wrote no ledger-1.json", "it was killed"
    for side in (base, arm):
        content = json.loads((side.run_dir / "ledger.json").read_text()) | {"rank": 1, "partial": side is arm}
        rewrite(side, "ledger-1.json", content)
    gate = parity_gates.judge_ledgers(pairs, "exact")  # type: ignore[arg-type]
    assert gate.passed is None and gate.is_testable
    assert gate.why == "rank 1 of the arm did not finish its training"


def test_merged_windows_may_have_fewer_backwards(tmp_path: Path) -> None:
    base, arm = trial(tmp_path / "base"), trial(tmp_path / "arm")
    content = json.loads((base.run_dir / "ledger.json").read_text())
    rewrite(base, "ledger.json", content | {"steps": [[ids, size, 4, lr] for ids, size, _, lr in content["steps"]]})
    assert parity_gates.judge_ledgers([(base, arm)], "exact").passed is False, "three of four backwards are missing"
    rewrite(arm, "plan.json", {"rungs": [{"rung": "batch", "status": "planned", "wants": {"loader.window": 4}}]})
    assert (
        parity_gates.regroups(arm)
        and not parity_gates.regroups(base)
        and parity_gates.judge_ledgers([(base, arm)], "exact").passed is True
    )
    rewrite(arm, "plan.json", {"rungs": [{"rung": "batch", "status": "skipped", "wants": {"loader.window": 4}}]})
    assert not parity_gates.regroups(arm)


def test_two_arms_that_merge_windows_may_begin_to_at_different_steps(tmp_path: Path) -> None:
    """The first step runs batch by batch where the merged one does not fit yet: as its own plan says."""
    base, arm = trial(tmp_path / "base"), trial(tmp_path / "arm")
    content = json.loads((base.run_dir / "ledger.json").read_text())
    for side in (base, arm):
        rewrite(side, "plan.json", {"rungs": [{"rung": "batch", "status": "planned", "wants": {"loader.window": 4}}]})
    rows = [[ids, size, 4 if number == 0 else 2, lr] for number, (ids, size, _, lr) in enumerate(content["steps"])]
    planned = [row[2] for row in rows]
    rewrite(arm, "ledger.json", content | {"steps": rows, "planned": planned})
    assert parity_gates.judge_ledgers([(base, arm)], "exact").passed is True
    rewrite(arm, "ledger.json", content | {"steps": rows, "planned": [2, *planned[1:]]})
    assert parity_gates.judge_ledgers([(base, arm)], "exact").passed is False, "the control"


ROWS = {
    "workers": {"rung": "workers", "status": "planned", "parity_class": "approximate"},
    "exact": {"rung": "workers", "status": "planned", "parity_class": "exact"},
    "skipped": {"rung": "workers", "status": "skipped", "parity_class": "approximate"},
    "amp": {"rung": "amp", "status": "planned", "parity_class": "approximate"},
    "prefetch": {"rung": "prefetch", "status": "planned", "parity_class": "approximate"},
}


@pytest.mark.parametrize(
    ("base", "arm", "passes"),
    [
        ("", "workers", True),
        ("workers", "", True),
        ("", "prefetch", True),
        ("prefetch", "prefetch workers", True),
        ("amp", "amp workers", True),
        ("", "", False),
        ("workers", "workers", False),
        ("", "exact", False),
        ("", "skipped", False),
        ("", "amp", False),
        ("workers", "prefetch workers", False),
    ],
)
def test_another_shuffle_passes_where_augmentations_moved(base: str, arm: str, passes: bool, tmp_path: Path) -> None:
    runs = [trial(tmp_path / name) for name in ("base", "arm")]
    for side, names, order in zip(runs, (base, arm), ("one", "another"), strict=True):
        rewrite(side, "plan.json", {"rungs": [ROWS[name] for name in names.split()]})
        content = json.loads((side.run_dir / "ledger.json").read_text())
        for number, row in enumerate(content["steps"]):
            row[0] = order if number >= 10 else row[0]
        epochs = [[10, 640, True, "all", 0], [20, 640, True, "all", 0]]
        rewrite(side, "ledger.json", content | {"epochs": epochs, "dataset": 640, "own_order": False})
    gate = parity_gates.judge_ledgers([(runs[0], runs[1])], "exact")
    assert gate.passed is passes and (gate.detail == {"step": 11, "differs": "samples"}) is not passes


@pytest.mark.parametrize(("parity_class", "passed"), [("exact", False), ("approximate", None)])
def test_other_content_of_an_approximate_arm_may_be_augmentation(
    parity_class: Any, passed: Any, tmp_path: Path
) -> None:
    base, arm = trial(tmp_path / "base"), trial(tmp_path / "arm")
    for side, content in ((base, "this"), (arm, "that")):
        ledger = json.loads((side.run_dir / "ledger.json").read_text()) | {"ids": "content"}
        rewrite(side, "ledger.json", ledger | {"steps": [[content, *row[1:]] for row in ledger["steps"]]})
    gate = parity_gates.judge_ledgers([(base, arm)], parity_class)
    assert gate.passed is passed and ("augmentation" in gate.why) is (passed is None)
    assert parity_gates.judge_parity([(base, arm)], None, parity_class).gates[0].passed is passed


def test_the_gradient_of_the_base_serves_all_arms_and_is_not_taken_twice(tmp_path: Path) -> None:
    base, good, bad = MadeArm(), MadeArm(name="good"), MadeArm(name="bad", wrong="gradient")
    found = [
        parity_gates.judge_gradients(base, arm, tmp_path / "base", tmp_path / arm.name, "approximate")
        for arm in (good, bad)
    ]
    assert [gate.passed for gate in found] == [True, False]
    assert len(base.calls) == 1 and good.calls[0][1].reference == (tmp_path / "base").absolute()
    parity_gates.judge_gradients(base, good, tmp_path / "base", tmp_path / "good", "approximate")
    assert len(good.calls) == 1
    parity_gates.sweep(tmp_path)
    assert not list(tmp_path.rglob("*.pt"))
    assert parity_gates.judge_gradients(base, good, tmp_path / "base", tmp_path / "good", "approximate").passed is True
    assert len(base.calls) == 1, "what both said is still there"
    late = MadeArm(name="late")
    parity_gates.judge_gradients(base, late, tmp_path / "base", tmp_path / "late", "approximate")
    assert len(base.calls) == 2, "a new arm needs the base's gradient itself"


@pytest.mark.parametrize("who", ["base", "arm"])
def test_a_gradient_that_cannot_be_taken_is_no_verdict(tmp_path: Path, who: str) -> None:
    class Dies(MadeArm):
        def run(self, label: str, folder: Path, *rest: Any, **more: Any) -> Trial:
            return Trial(name=label, ok=False, cause="out of memory", seconds=1, run_dir=folder, code=1)

    base, arm = (Dies(), MadeArm()) if who == "base" else (MadeArm(), Dies(name="arm"))
    gate = parity_gates.judge_gradients(base, arm, tmp_path / "a", tmp_path / "b", "exact")
    assert gate.passed is None and f"the {who}'s gradient could not be taken: out of memory" in gate.why
    runs = [trial(tmp_path / "base"), trial(tmp_path / "arm")]
    assert to_json(parity_gates.judge_parity([(runs[0], runs[1])], gate, "exact"))["undecided"] == ["gradient"]


def test_without_runs_there_is_no_outcome(tmp_path: Path) -> None:
    assert parity_gates.judge_parity([], None, "exact").passed is None
    told = to_json(parity_gates.judge_parity([(trial(tmp_path / "a"), trial(tmp_path / "b"))], None, "exact"))
    assert told["class"] == "exact" and [gate["name"] for gate in told["gates"]] == ["ledger", "loss"]
