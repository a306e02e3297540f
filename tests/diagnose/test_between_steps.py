"""What comes between steps: named from its share, with what to do about it and no rung."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diagnose.scenes import NO_WORKERS, findings, gpt2_tuned, on_cpu, scene

GAPS = {"validation": "val_check_interval", "checkpoint": "AsyncCheckpointIO", "epoch_gap": "make epochs longer"}


@pytest.mark.parametrize("name", GAPS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gap_is_named_with_its_advice(name: str, device: str) -> None:
    seen = scene(100.0, device=device, trail=50.0 if device == "cuda" else None, **{name: 20.0})
    (finding,) = findings(seen)
    assert finding.bottleneck == name and finding.share_pct == pytest.approx(20)
    assert "20.0 of 100.0 ms a step" in finding.why and GAPS[name] in finding.why and "no rung helps" in finding.why
    assert finding.patch is None and finding.ceiling_gain_pct == pytest.approx(25) and finding.ceiling_is_estimate


@pytest.mark.parametrize("name", GAPS)
@pytest.mark.parametrize(("ms", "named"), [(4.9, False), (5.0, True)])
def test_from_five_per_cent_on(name: str, ms: float, named: bool) -> None:
    assert (findings(scene(100.0, device="cpu", **{name: ms}))[0].bottleneck == name) is named


@pytest.mark.parametrize(
    ("loader", "enabled", "advice"),
    [
        ({"num_workers": 4}, (), "your loader's 4 workers between epochs: persistent_workers=True"),
        ({"num_workers": 4}, ("workers",), "rungs.workers.persistent: true"),
        ({"num_workers": 0}, (), "make epochs longer"),
        ({"num_workers": 4, "persistent_workers": True}, (), "make epochs longer"),
        ({"num_workers": 4, "persistent_workers": True}, ("workers",), "make epochs longer"),
    ],
)
def test_workers_that_start_anew_each_epoch(loader: dict[str, Any], enabled: tuple[str, ...], advice: str) -> None:
    (finding,) = findings(on_cpu(epoch_gap=10.0, loader={**NO_WORKERS, **loader}), enabled)
    assert finding.bottleneck == "epoch_gap" and advice in finding.why


@pytest.mark.parametrize("enabled", [(), ("workers",)])
def test_the_time_of_their_start_is_said_where_it_was_measured(enabled: tuple[str, ...]) -> None:
    found = {**NO_WORKERS, "num_workers": 4}
    words = "workers were started anew 7 times, 0.41 s each until their first batch"
    (finding,) = findings(on_cpu(epoch_gap=10.0, loader=found), enabled)
    assert words not in finding.why, "an older file, or workers that stay"
    loader = {**found, "worker_restarts": 7, "worker_restart_s": 0.412}
    (finding,) = findings(on_cpu(epoch_gap=10.0, loader=loader), enabled)
    assert words in finding.why and "persistent" in finding.why


def test_a_gap_is_told_even_where_the_gpu_is_well_used() -> None:
    (finding,) = findings(gpt2_tuned(validation=20.0))
    assert finding.bottleneck == "validation", "that the GPU is well used is no reason to hide it"
