"""Numerics passports: written by an experiment on one rung, shown with the rung's manual."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastloop.commands import listing
from fastloop.experiments.ab import passports
from fastloop.records.experiment import Gate, Hardware, Outcome, Sample
from fastloop.records.store import to_json

SAMPLE = Sample(name="amp", samples_per_s=(1.0, 2.0, 3.0), places=(0, 1, 2))
HARDWARE = Hardware(device_name="NVIDIA H200", torch="2.11.0", lightning="2.6.6", fastloop="0.1.0")


def outcome(deviation: float = 3e-3) -> Outcome:
    gate = Gate(
        name="gradient",
        passed=True,
        why=f"the gradient deviates by {deviation}",
        deviation=deviation,
        limit=0.05,
        visible=0.004,
    )
    return Outcome(parity_class="approximate", passed=True, why="gradient passed", gates=(gate,))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fastloop" / "passports"


def test_kept_newest_first_and_shown_with_the_manual(cache: Path) -> None:
    assert "no experiment on this machine yet" in listing.list_rungs("amp").text
    for deviation in (1e-3, 2e-3):
        passports.keep("amp", outcome(deviation), HARDWARE, SAMPLE)
    found = passports.load("amp")
    assert [each.gates[0].deviation for each in found] == [2e-3, 1e-3] and found[0].runs == 3
    answer = listing.list_rungs("amp")
    assert "NVIDIA H200" in answer.text and "approximate, passed" in answer.text and "deviates by 0.002" in answer.text
    seen = "deviation (smallest visible): gradient 2e-3 (4e-3); lightning 2.6.6, fastloop 0.1.0, driver n/a"
    assert seen in answer.text and "gradient 1e-3 (4e-3)" in answer.text
    assert answer.json is not None and len(answer.json["passports"]) == 2
    told = to_json(answer.json["passports"][0])
    assert (told["class"], told["passed"], told["environment"]["device_name"]) == ("approximate", True, "NVIDIA H200")
    assert passports.load("layout") == ()


def test_only_so_many_are_kept() -> None:
    for _ in range(passports.MOST + 3):
        passports.keep("amp", outcome(), HARDWARE, SAMPLE)
    assert len(passports.load("amp")) == passports.MOST


def test_no_gate_no_passport(cache: Path) -> None:
    passports.keep("amp", Outcome(parity_class="changes-training"), HARDWARE, SAMPLE)
    assert not cache.exists()


def test_a_cache_that_cannot_be_used_is_as_good_as_none(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    passports.keep("amp", outcome(), HARDWARE, SAMPLE)
    assert passports.load("amp") == () and cache.is_file()
    cache.unlink()
    cache.mkdir()
    (cache / "amp.json").write_text("[1, 2")
    assert passports.load("amp") == ()


def test_what_no_gate_has_measured_is_not_shown() -> None:
    equal = Gate(name="ledger", passed=True, why="the same samples")
    passports.keep("amp", Outcome(parity_class="exact", passed=True, gates=(equal,)), Hardware(), SAMPLE)
    assert passports.describe("amp")[-1] == "    lightning n/a, fastloop n/a, driver n/a"
