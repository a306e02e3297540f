"""What is said where no bottleneck is named."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.diagnose import findings
from fastloop.measurement import Measurement
from fastloop.records import Finding
from tests.diagnose.scenes import on_cpu, scene


@pytest.mark.parametrize(("step", "parts"), [(None, {"data_wait": 1.0}), (0.0, {"data_wait": 0.0}), (100.0, {}),
                                             (100.0, {"data_wait": None}), (None, {})])  # fmt: skip
def test_too_short(step: float | None, parts: dict[str, Any]) -> None:
    seen = Measurement(step_ms={"mean": step}, parts_ms=parts, total_steps=12, warmup_steps=20)
    why = "too short to judge: 12 steps ran and the first 20 are warm-up; train longer or lower watch.warmup_steps"
    assert findings(seen) == (Finding(bottleneck="none", share_pct=None, why=why, title="TOO SHORT TO JUDGE"),)


@pytest.mark.parametrize(("steps", "says"), [(0, "too short to judge: no step was trained"),
                                             (1, "too short to judge: 1 step ran and the first 20 are warm-up")])
def test_hardly_any_step(steps: int, says: str) -> None:
    (finding,) = findings(Measurement(total_steps=steps, warmup_steps=20))
    assert finding.why.startswith(says) and finding.title == "TOO SHORT TO JUDGE"


def test_a_run_that_was_long_enough_is_not_called_short() -> None:
    (finding,) = findings(Measurement(total_steps=60, warmup_steps=20, state=("the profiler was replaced",)))
    assert finding.why == "nothing was measured in 60 steps: the profiler was replaced"
    assert finding.title == "NOT MEASURED"


def test_what_was_not_measured_is_said() -> None:
    (finding,) = findings(Measurement(step_ms={"mean": 100.0}, parts_ms={"data_wait": 1.0}))
    assert finding.why.startswith("no bottleneck among what was measured") and "not split further" in finding.why
    (finding,) = findings(on_cpu(unexplained=1.9))
    assert "unexplained" not in finding.why and finding.why.startswith("nothing to gain")
    (finding,) = findings(on_cpu(unexplained=10.0))
    assert "25.0 % of the step is unexplained" in finding.why


def test_a_share_that_is_small_in_milliseconds_is_called_so() -> None:
    (finding,) = findings(scene(2.0, device="cpu", data_wait=0.2))
    assert finding.bottleneck == "none"
    assert "10.0 % of the step, less than the 0.25 ms that any loop pays" in finding.why
    for other in (on_cpu(), scene(4.9, device="cpu", host_other=0.7)):
        assert "any loop pays" not in findings(other)[0].why
