"""From a measurement to a finding: its share, its reason, the patch."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.diagnose import WORTH_NAMING_PCT, findings
from fastloop.measurement import Measurement
from fastloop.records import Finding

MAP = {"kind": "DataLoader", "num_workers": 0, "map_style": True, "usable_cpus": 8}


def only(loader: dict[str, Any] | None = None, *, step: float | None = 100.0, wait: float | None = 60.0,
         enabled: tuple[str, ...] = (), **seen: Any) -> Finding:  # fmt: skip
    measurement = Measurement(step_ms={"mean": step}, parts_ms={"data_wait": wait},
                              evidence={} if loader is None else {"loader": loader}, **seen)  # fmt: skip
    (finding,) = findings(measurement, enabled)
    return finding


@pytest.mark.parametrize(("loader", "enabled", "patch", "advice"), [
    (MAP, (), {"rungs": {"workers": {"enabled": True}}}, "the loader has 0 workers, 8 CPUs are usable"),
    (MAP, ("amp",), {"rungs": {"workers": {"enabled": True}}}, "the loader has 0 workers, 8 CPUs are usable"),
    (MAP, ("workers",), None, "no rung helps: workers is on but could not apply (its verdict says why)"),
    ({**MAP, "map_style": False}, (), None,
     "no rung helps: an iterable dataset has to be sharded by its owner before it can have workers"),
    ({**MAP, "num_workers": None}, (), None,
     "no rung helps: this loader is not a DataLoader; make its batches ahead of need"),
    ({**MAP, "num_workers": 6}, (), None,
     "no rung of this version helps: num_workers=6 on 8 CPUs is not enough; cheapen the transforms"),
    ({**MAP, "num_workers": 6}, ("workers",), None,
     "no rung of this version helps: num_workers=6 on 8 CPUs is not enough; cheapen the transforms"),
    (None, (), None, "no rung helps: this loader is not a DataLoader; make its batches ahead of need"),
])  # fmt: skip
def test_data_wait_and_what_to_do(loader: Any, enabled: tuple[str, ...], patch: Any, advice: str) -> None:
    finding = only(loader, enabled=enabled)
    assert finding.bottleneck == "data_wait" and finding.share_pct == pytest.approx(60)
    assert finding.patch == patch
    idle = "the device had nothing to do for 60.0 of 100.0 ms a step: the next batch was not there"
    assert finding.why == f"{idle}; {advice}"
    assert finding.ceiling_is_estimate


def test_a_gpu_is_called_one() -> None:
    assert only(MAP, device="cuda").why.startswith("the GPU had nothing to do for 60.0 of 100.0 ms")


@pytest.mark.parametrize("wait", [0.0, 1.0, 4.99])
def test_nothing_to_name(wait: float) -> None:
    finding = only(MAP, wait=wait)
    why = f"no bottleneck that this version can name: waiting for data is {wait:.1f} % of the step"
    assert finding == Finding(bottleneck="none", share_pct=None, why=why)
    assert only(MAP, wait=WORTH_NAMING_PCT).bottleneck == "data_wait"


@pytest.mark.parametrize(("step", "wait"), [(None, 1.0), (100.0, None), (None, None), (0.0, 0.0)])
def test_too_short(step: float | None, wait: float | None) -> None:
    finding = only(MAP, step=step, wait=wait, total_steps=12, warmup_steps=20)
    why = ("too short to judge: 12 steps ran and the first 20 are warm-up; train longer or lower watch.warmup_steps")
    assert finding == Finding(bottleneck="none", share_pct=None, why=why)
    assert findings(Measurement(total_steps=12, warmup_steps=20)) == (finding,)


@pytest.mark.parametrize("wait", [5.0, 20.0, 50.0, 90.0, 99.0])
def test_the_ceiling_is_the_step_without_the_wait(wait: float) -> None:
    finding = only(MAP, wait=wait)
    assert finding.ceiling_gain_pct is not None
    assert 100 / (1 + finding.ceiling_gain_pct / 100) == pytest.approx(100 - wait)


@pytest.mark.parametrize("wait", [100.0, 100.001, 250.0])
def test_a_step_that_is_all_wait_has_no_ceiling(wait: float) -> None:
    finding = only(MAP, wait=wait)
    assert finding.share_pct == 100 and finding.ceiling_gain_pct is None
