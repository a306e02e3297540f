"""How a cost becomes a finding."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.diagnose.naming import device, gain_pct, named, per_step, serial_gain_pct, share_pct, times
from fastloop.diagnose.remedies import Remedy
from fastloop.measurement import Measurement

SEEN = Measurement(step_ms={"mean": 100.0})
PATCH = Remedy({"rungs": {"pin": {"enabled": True}}}, "pin it")


def made(ms: float | None, **settings: Any) -> Any:
    return named(SEEN, "h2d", ms, "copies", PATCH, **settings)


def test_a_finding_says_facts_and_remedy() -> None:
    finding = made(20.0, detail=["a line"])
    assert finding.why == "copies; pin it" and finding.patch == PATCH.patch and finding.detail == ("a line",)
    assert finding.share_pct == 20 and finding.ceiling_gain_pct == pytest.approx(25) and finding.ceiling_is_estimate


@pytest.mark.parametrize(("ms", "settings"), [
    (None, {}), (4.9, {}), (20.0, {"worth_pct": 25.0}), (20.0, {"least_ms": 21.0}), (20.0, {"measured_pct": 3.0}),
])  # fmt: skip
def test_what_is_not_worth_naming(ms: float | None, settings: dict[str, Any]) -> None:
    assert made(ms, **settings) is None


@pytest.mark.parametrize(("settings", "gain", "estimate"), [
    ({"measured_pct": 60.0}, 60.0, False), ({"measured_pct": 3.1, "bound": True}, 3.1, False),
    ({"most_pct": 10.0}, 10.0, True), ({"most_pct": 80.0}, 25.0, True), ({"bound": True}, None, True),
])  # fmt: skip
def test_the_ceiling(settings: dict[str, Any], gain: float | None, estimate: bool) -> None:
    finding = made(20.0, **settings)
    assert finding.ceiling_gain_pct == (None if gain is None else pytest.approx(gain))
    assert finding.ceiling_is_estimate is estimate


def test_a_share_is_at_most_the_step_and_then_has_no_bound_of_its_own() -> None:
    assert share_pct(SEEN, 250.0) == 100.0 and share_pct(SEEN, None) is None and share_pct(Measurement(), 1.0) is None
    assert serial_gain_pct(100.0) is None and serial_gain_pct(50.0) == pytest.approx(100)
    assert gain_pct(SEEN, 50.0) == pytest.approx(100) and gain_pct(Measurement(), 50.0) is None
    assert made(100.0).ceiling_gain_pct is None and made(100.0, most_pct=40.0).ceiling_gain_pct == 40.0


@pytest.mark.parametrize(("step", "ms", "text"), [(100.0, 60.0, "60.0 of 100.0 ms a step"),
                                                  (0.4, 0.06, "0.06 of 0.40 ms a step")])  # fmt: skip
def test_times_of_short_steps_have_a_second_digit(step: float, ms: float, text: str) -> None:
    assert per_step(Measurement(step_ms={"mean": step}), ms) == text


def test_words() -> None:
    assert (times(732.4), times(1.2), times(0.0)) == ("8.3x", "1.01x", "1.00x")
    assert device(Measurement(device="cuda")) == "GPU" and device(Measurement(device="mps")) == "device"
