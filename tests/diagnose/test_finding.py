"""How a cost becomes a finding."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.diagnose.attribution import StepParts
from fastloop.diagnose.finding import compute_gain_bound_pct, format_factor, weigh
from fastloop.diagnose.remedies import Remedy
from fastloop.records.measurement import Measurement

PATCH = Remedy({"rungs": {"pin": {"enabled": True}}}, "pin it")


def a_step(ms: float = 100.0, device: str = "cpu") -> StepParts:
    return StepParts(measured=Measurement(device=device), step_ms=ms, straggler=None, parts_ms={})


def weighed(ms: float | None, **settings: Any) -> Any:
    return weigh(a_step(), "h2d", ms, **settings)


def test_a_finding_says_facts_and_remedy() -> None:
    finding = weighed(20.0).explain("copies", PATCH, detail=["a line"])
    assert finding.why == "copies; pin it" and finding.patch == PATCH.patch and finding.detail == ("a line",)
    assert finding.share_pct == 20 and finding.ceiling_gain_pct == pytest.approx(25) and finding.ceiling_is_estimate
    assert finding.title == "WAITING FOR COPIES"
    assert weighed(20.0).explain("copies", PATCH, title="ITS OWN").title == "ITS OWN"


@pytest.mark.parametrize(
    ("ms", "settings"),
    [
        (None, {}),
        (4.9, {}),
        (20.0, {"worth_pct": 25.0}),
        (20.0, {"least_ms": 21.0}),
        (20.0, {"measured_pct": 3.0}),
    ],
)
def test_what_is_not_worth_naming(ms: float | None, settings: dict[str, Any]) -> None:
    assert weighed(ms, **settings) is None


@pytest.mark.parametrize(
    ("settings", "gain", "estimate"),
    [
        ({"measured_pct": 60.0}, 60.0, False),
        ({"measured_pct": 3.1, "bound": True}, 3.1, False),
        ({"most_pct": 10.0}, 10.0, True),
        ({"most_pct": 80.0}, 25.0, True),
        ({"bound": True}, None, True),
    ],
)
def test_the_ceiling(settings: dict[str, Any], gain: float | None, estimate: bool) -> None:
    cost = weighed(20.0, **settings)
    assert cost.gain_pct == (None if gain is None else pytest.approx(gain))
    assert cost.is_estimate is estimate


def test_a_share_is_at_most_the_step_and_then_has_no_bound_of_its_own() -> None:
    assert a_step().to_pct(250.0) == 100.0 and a_step().to_pct(50.0) == pytest.approx(50)
    assert compute_gain_bound_pct(100.0) is None and compute_gain_bound_pct(50.0) == pytest.approx(100)
    assert weighed(100.0).gain_pct is None and weighed(100.0, most_pct=40.0).gain_pct == 40.0


@pytest.mark.parametrize(
    ("step", "ms", "text"), [(100.0, 60.0, "60.0 of 100.0 ms a step"), (0.4, 0.06, "0.06 of 0.40 ms a step")]
)
def test_times_of_short_steps_have_a_second_digit(step: float, ms: float, text: str) -> None:
    assert a_step(step).format_ms(ms) == text


def test_words() -> None:
    assert (format_factor(732.4), format_factor(1.2), format_factor(0.0)) == ("8.3x", "1.01x", "1.00x")
    assert a_step(device="cuda").device == "GPU" and a_step(device="mps").device == "device"
