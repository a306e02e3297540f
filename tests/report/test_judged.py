"""Verdicts in a word, ratios with digits enough."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.report import judged
from tests.report import experiments
from tests.report.experiments import BROKEN, CLAIMLESS, UNKNOWN


@pytest.mark.parametrize(
    ("one", "said", "tone"),
    [(experiments.judged("a", 1.32), "FASTER 1.32x", "good"),
     (experiments.judged("a", 1.32, parity=UNKNOWN), "FASTER 1.32x, PARITY NOT SHOWN", "unknown"),
     (experiments.judged("a", 1.32, parity=CLAIMLESS), "FASTER 1.32x, NO PARITY CLAIMED", "unknown"),
     (experiments.judged("a", 1.32, parity=BROKEN), "PARITY FAILED", "bad"),
     (experiments.judged("a", 0.5, parity=UNKNOWN), "SLOWER 0.50x", "bad"),
     (experiments.judged("a", 1.0, 0.01, "no_difference"), "NO DIFFERENCE", "unknown"),
     (experiments.judged("a", 1.0, 0.1), "INCONCLUSIVE", "unknown"),
     (experiments.judged("a", None), "INSUFFICIENT", "unknown"), ({}, "INSUFFICIENT", "unknown"),
     ({"ratio": 1.3, "ci95": [1.2, None], "verdict": "faster"}, "INSUFFICIENT", "unknown"),
     (experiments.judged("a", 1.3, verdict="sideways"), "INSUFFICIENT", "unknown")],
    ids=["faster", "parity-open", "claimless", "broken", "slower", "same", "open", "none", "empty", "half", "odd"],
)  # fmt: skip
def test_a_verdict_in_a_headline(one: dict[str, Any], said: str, tone: str) -> None:
    assert judged.headline(one) == said and judged.tone(said) == tone


def test_an_arm_without_an_interval_that_failed() -> None:
    assert judged.word(experiments.judged("a", None), {"failed": "killed"}) == "FAILED"
    assert judged.word(experiments.judged("a", 1.3), {"failed": "killed"}) == "FASTER", "the runs before it count"


@pytest.mark.parametrize(
    ("ends", "said"),
    [([1.29, 1.35], "1.29 to 1.35"), ([1.002, 1.006], "1.002 to 1.006"), ([0.98, 1.0], "0.98 to 1.00"),
     ([1.00002, 1.00004], "1.0000 to 1.0000"), ([0.985, 0.9961], "0.985 to 0.996"), (None, "n/a"), ([None, 2], "n/a")],
    ids=["plain", "near", "holds-1", "tiny", "below", "none", "half"])  # fmt: skip
def test_rounding_never_hides_on_which_side_of_1_an_interval_lies(ends: Any, said: str) -> None:
    assert judged.between({"ratio": 1.0, "ci95": ends}) == said


@pytest.mark.parametrize(("alpha", "said"), [(0.05, "95 %"), (0.0125, "98.75 %"), (None, "95 %")])
def test_the_level(alpha: float | None, said: str) -> None:
    assert judged.level({"alpha": alpha}) == said


def test_arms_are_judged_together_where_the_file_says_so() -> None:
    assert judged.together([{"alpha": 0.0125}] * 4).startswith("4 arms are judged together: each interval at 98.75 %")
    assert judged.together([{"alpha": 0.05}] * 2) == "" == judged.together([{"alpha": None}] * 2)
    assert judged.together([{"alpha": 0.0125}]) == "" == judged.together([])


def test_the_band_is_settable() -> None:
    assert judged.band_pct({}) == 3.0 and judged.band_pct({"band_pct": 1.5}) == 1.5
