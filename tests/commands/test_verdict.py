"""What an experiment writes: rows of arms, causes of failures, what makes figures doubtful."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastloop.commands import ab, passports, verdict
from fastloop.commands.experiment import Experiment, Settings
from tests.commands.made_arms import MadeArm


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def done(place: Path, *arms: MadeArm) -> Experiment:
    sides = ab.sides_of([MadeArm(), *arms], aa=True)
    for side in sides:
        side.folder = place / side.folder
    made = Experiment(sides, place, Settings(steps=40, runs=3), lambda _: None)
    made.run()
    return made


def amp(**settings: Any) -> MadeArm:
    return MadeArm(name="amp", overrides=("rungs.amp.enabled=true",), verdicts={"amp": True},
                   parity_class="approximate", rate=lambda _: 120.0, **settings)  # fmt: skip


def test_one_rung_alone_gets_its_passport(tmp_path: Path) -> None:
    content = verdict.write(done(tmp_path, amp()), "cifar10", partial=False)
    (passport,) = passports.of("amp")
    assert passport["class"] == "approximate" and passport["passed"] is True and passport["runs"] == 3
    assert {gate["name"] for gate in passport["gates"]} == {"ledger", "gradient", "loss"}
    assert content["hardware"]["device_name"] == "a GPU" and content["hardware"]["torch"] == "2.11.0"
    verdict.write(done(tmp_path, amp()), "cifar10", partial=False)
    assert len(passports.of("amp")) == 1, "a resumed experiment says it again"
    verdict.write(done(tmp_path / "half", amp()), "cifar10", partial=True)
    assert len(passports.of("amp")) == 1, "what was stopped says nothing"
    pair = MadeArm(name="pair", overrides=("rungs.pin.enabled=true,rungs.prefetch.enabled=true",),
                   verdicts={"pin": True, "prefetch": True})  # fmt: skip
    verdict.write(done(tmp_path / "pair", pair), "cifar10", partial=False)
    assert passports.of("pin") == [] and passports.of("prefetch") == []


def test_the_top_copies_the_first_comparison(tmp_path: Path) -> None:
    content = verdict.told(done(tmp_path, amp(), MadeArm(name="again")), "cifar10", partial=False)
    first, second = content["comparisons"]
    assert all(content[key] == first[key] for key in ("ratio", "ci95", "verdict", "parity"))
    assert (first["verdict"], second["arm"]) == ("faster", "again") and second["parity"]["class"] == "exact"
    assert sorted(content["order"]) == ["again"] * 3 + ["amp"] * 3 + ["base"] * 3
    assert [arm["seeds"] for arm in content["arms"]] == [[0, 1, 2]] * 3
    json.dumps(content, allow_nan=False)


def test_throttling_and_short_windows_are_flagged_with_their_run(tmp_path: Path) -> None:
    made = done(tmp_path, amp())
    seen = made.sides[1].runs[1].measurement
    assert seen is not None and verdict.flags(made.sides) == []
    seen["state"], seen["window_too_short"] = ["the GPU's clocks were held back: hw_thermal 12 %"], True  # type: ignore[index]
    assert verdict.flags(made.sides) == ["amp, run 2: the GPU's clocks were held back: hw_thermal 12 %",
                                         "amp, run 2: the window is too short for its queues"]  # fmt: skip


@pytest.mark.parametrize(("tail", "rank"), [
    ("[rank3]: Traceback\n[rank3]: boom", 3), ("[rank1]: x\n[rank2]: y", None), ("boom", None), ("[rank: 7] x", 7),
])  # fmt: skip
def test_the_rank_that_failed_is_named_where_there_is_one(tail: str, rank: int | None) -> None:
    assert verdict.rank_in(tail) == rank
