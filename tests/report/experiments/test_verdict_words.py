"""Verdicts in a word, ratios with digits enough."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.records.experiment import ArmResult, Comparison, ExperimentResult, Hardware
from fastloop.records.store import decode
from fastloop.report.experiments import verdict_words
from tests.report import made_experiments
from tests.report.made_experiments import BROKEN, CLAIMLESS, UNKNOWN

KILLED = ArmResult(name="a", failed="killed")


def comparison(content: dict[str, Any]) -> Comparison:
    found = decode(content, Comparison)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("one", "said", "tone"),
    [
        (made_experiments.judged("a", 1.32), "FASTER 1.32x", "good"),
        (made_experiments.judged("a", 1.32, parity=UNKNOWN), "FASTER 1.32x, PARITY NOT SHOWN", "unknown"),
        (made_experiments.judged("a", 1.32, parity=CLAIMLESS), "FASTER 1.32x, NO PARITY CLAIMED", "unknown"),
        (made_experiments.judged("a", 1.32, parity=BROKEN), "PARITY FAILED", "bad"),
        (made_experiments.judged("a", 0.5, parity=UNKNOWN), "SLOWER 0.50x", "bad"),
        (made_experiments.judged("a", 1.0, 0.01, "no_difference"), "NO DIFFERENCE", "unknown"),
        (made_experiments.judged("a", 1.0, 0.1), "INCONCLUSIVE", "unknown"),
        (made_experiments.judged("a", None), "INSUFFICIENT", "unknown"),
        ({}, "INSUFFICIENT", "unknown"),
        ({"ratio": 1.3, "ci95": [1.2, None], "verdict": "faster"}, "INSUFFICIENT", "unknown"),
        (made_experiments.judged("a", 1.3, verdict="sideways"), "INCONCLUSIVE", "unknown"),
    ],
    ids=["faster", "parity-open", "claimless", "broken", "slower", "same", "open", "none", "empty", "half", "odd"],
)
def test_a_verdict_in_a_headline(one: dict[str, Any], said: str, tone: str) -> None:
    assert verdict_words.write_headline(comparison(one)) == said and verdict_words.choose_tone(said) == tone


def test_an_arm_without_an_interval_that_failed() -> None:
    assert verdict_words.choose_word(comparison(made_experiments.judged("a", None)), KILLED) == "FAILED"
    assert verdict_words.choose_word(comparison(made_experiments.judged("a", 1.3)), KILLED) == "FASTER", (
        "the runs before it count"
    )


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([1.29, 1.35], "1.29 to 1.35"),
        ([1.002, 1.006], "1.002 to 1.006"),
        ([0.98, 1.0], "0.98 to 1.00"),
        ([1.00002, 1.00004], "1.0000 to 1.0000"),
        ([0.985, 0.9961], "0.985 to 0.996"),
        (None, "n/a"),
        ([None, 2], "n/a"),
    ],
    ids=["plain", "near", "holds-1", "tiny", "below", "none", "half"],
)
def test_rounding_never_hides_on_which_side_of_1_an_interval_lies(ends: Any, said: str) -> None:
    assert verdict_words.format_interval(comparison({"ratio": 1.0, "ci95": ends})) == said


@pytest.mark.parametrize(("alpha", "said"), [(0.05, "95 %"), (0.0125, "98.75 %"), (None, "95 %")])
def test_the_level(alpha: float | None, said: str) -> None:
    assert verdict_words.format_level(comparison({"alpha": alpha})) == said


def test_arms_are_judged_together_where_the_file_says_so() -> None:
    shared, own = comparison({"alpha": 0.0125}), comparison({"alpha": None})
    assert verdict_words.describe_shared_error_rate([shared] * 4).startswith("with 4 arms, each interval is at 98.75 %")
    assert (
        verdict_words.describe_shared_error_rate([own] * 2)
        == ""
        == verdict_words.describe_shared_error_rate([shared])
        == verdict_words.describe_shared_error_rate([])
    )


def test_the_band_is_settable() -> None:
    found = [decode(content, ExperimentResult) for content in ({}, {"band_pct": 1.5})]
    assert [each and each.band_pct for each in found] == [3.0, 1.5]


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ({}, ("n/a",)),
        ({"device_name": "GPU", "devices": 2, "torch": "2.11", "driver": None}, ("2x GPU", "torch 2.11")),
        ({"device_name": "cpu"}, ("cpu",)),
    ],
    ids=["nothing", "gpus", "cpu"],
)
def test_where_it_ran(hardware: dict[str, Any], said: tuple[str, ...]) -> None:
    found = decode(hardware, Hardware)
    assert found is not None and verdict_words.describe_hardware(found) == said


def test_each_text_is_on_one_line() -> None:
    assert verdict_words.put_on_one_line(["a\n  b\x00", "  c"]) == ["a   b", "  c"]
