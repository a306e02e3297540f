"""What is said where no bottleneck is named."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding
from tests.diagnose.scenes import findings, gpt2_tuned, on_cpu, resnet50_naive, scene, with_trace


@pytest.mark.parametrize(
    ("step", "parts"),
    [(None, {"data_wait": 1.0}), (0.0, {"data_wait": 0.0}), (100.0, {}), (100.0, {"data_wait": None}), (None, {})],
)
def test_too_short(step: float | None, parts: dict[str, Any]) -> None:
    seen = Measurement(step_ms={"mean": step}, parts_ms=parts, total_steps=12, warmup_steps=20)
    why = "12 steps ran, but the first 21 are not timed; train longer or lower watch.warmup_steps"
    assert findings(seen) == (Finding(bottleneck="none", share_pct=None, why=why, title="TOO SHORT TO JUDGE"),)


def test_without_a_watch_nothing_is_known() -> None:
    (finding,) = findings(Measurement(total_steps=None))
    assert finding.why == "nothing was measured: watch.enabled is false" and finding.title == "NOT MEASURED"


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (0, "no step was trained"),
        (1, "1 step ran, but the first 21 are not timed"),
    ],
)
def test_hardly_any_step(steps: int, says: str) -> None:
    (finding,) = findings(Measurement(total_steps=steps, warmup_steps=20))
    assert finding.why.startswith(says) and finding.title == "TOO SHORT TO JUDGE"


def test_a_run_that_was_long_enough_is_not_called_short() -> None:
    (finding,) = findings(Measurement(total_steps=60, warmup_steps=20, state=("the profiler was replaced",)))
    assert finding.why == "nothing was measured in 60 steps: the profiler was replaced"
    assert finding.title == "NOT MEASURED"


def test_what_was_not_measured_is_said() -> None:
    (finding,) = findings(Measurement(step_ms={"mean": 100.0}, parts_ms={"data_wait": 1.0}))
    assert finding.why.startswith("no bottleneck in what was measured") and "not split further" in finding.why
    (finding,) = findings(on_cpu(unexplained=1.9))
    assert "unexplained" not in finding.why and finding.why.startswith("no rung is worth trying: ")
    (finding,) = findings(on_cpu(unexplained=10.0))
    assert "25.0 % of the step is unexplained" in finding.why


def test_what_waited_for_a_cpu_is_not_nothing_to_gain() -> None:
    crowd = {"cpu": {"crowded": True}}
    (finding,) = findings(on_cpu(evidence=crowd))
    assert finding.title == "CPU OVERSUBSCRIBED" and finding.why.startswith("the CPUs were oversubscribed (run it")
    assert findings(scene(**{**SMALL, "device": "cuda"}, evidence=crowd))[0].title != "CPU OVERSUBSCRIBED"


def test_a_share_that_is_small_in_milliseconds_is_called_so() -> None:
    (finding,) = findings(scene(2.0, device="cpu", data_wait=0.2))
    assert finding.bottleneck == "none"
    said = "is 10.0 % of the step, less than the 0.25 ms that any loop costs"
    assert finding.why == f"no rung is worth trying: the largest avoidable cost, waiting for data, {said}"
    for other in (on_cpu(), scene(4.9, device="cpu", host_other=0.7)):
        assert "any loop costs" not in findings(other)[0].why


SMALL = {"step": 100.0, "device": "cpu", "host_other": 8.1, "callbacks_logging": 7.9, "data_wait": 4.8}


def test_small_costs_that_come_to_much_are_not_nothing_to_gain() -> None:
    (finding,) = findings(scene(**SMALL))
    assert finding.bottleneck == "none" and finding.title == "NO SINGLE BOTTLENECK" and finding.patch is None
    assert finding.why.startswith(
        "20.8 % of the step is not training: other work of the host 8.1 %, callbacks and logging 7.9 %,"
        " waiting for data 4.8 %, none large enough on its own"
    )
    (finding,) = findings(scene(**{**SMALL, "data_wait": 0.0, "host_other": 7.0}))
    assert finding.title == "NOTHING TO GAIN", "14.9 %"
    (finding,) = findings(scene(**{**SMALL, "host_other": 0.0, "blocked_ms": 9.0}))
    assert "the host sleeping 9.0 %" in finding.why


def test_costs_inside_the_work_of_a_gpu_count_too() -> None:
    seen = scene(100.0, data_wait=4.9, h2d=4.9, callbacks_logging=2.0, trail=0.0, gpu={"gr_active_pct": 84.0})
    (finding,) = findings(seen)
    assert finding.title == "NO SINGLE BOTTLENECK" and "launches 4.2 %" in finding.why


def test_what_any_loop_pays_is_not_summed_up() -> None:
    (finding,) = findings(scene(1.0, device="cpu", data_wait=0.1, callbacks_logging=0.1))
    assert finding.title == "NOTHING TO GAIN"


def test_where_ranks_wait_for_one_another_is_said_to_be_that() -> None:
    (finding,) = findings(scene(**{**SMALL, "host_other": 20.0}, world_size=2))
    assert (
        finding.title == "NO SINGLE BOTTLENECK"
        and "other work of the host (it includes ranks waiting for each other) 20.0 %" in finding.why
    )
    assert findings(scene(**{**SMALL, "host_other": 20.0}))[0].bottleneck == "host_other", "one rank waits for nobody"


CEILINGS = {"replayed": 119.0, "resident": 1236.0}


@pytest.mark.parametrize(
    ("device", "ceilings", "title"),
    [
        ("cpu", CEILINGS, "NO BOTTLENECK FOUND"),
        ("cpu", {"replayed": 40.0, "resident": 41.0}, "NOTHING TO GAIN"),
        ("cpu", {"resident": 1236.0}, "NO BOTTLENECK FOUND"),
        ("cpu", {"replayed": 20.0}, "NOTHING TO GAIN"),
    ],
)
def test_a_ceiling_that_nothing_accounts_for_is_not_nothing_to_gain(
    device: str, ceilings: dict[str, float], title: str
) -> None:
    """Seen: 35.8 samples/s beside trials of 119 and 1,236, and a verdict that there was nothing to gain."""
    (finding,) = findings(on_cpu(device=device, samples_per_s=35.8, ceilings=ceilings))
    assert finding.bottleneck == "none" and finding.title == title
    said = "36 samples/s now, 119 replayed and 1,236 resident: no part of the step explains the difference"
    assert (said in finding.why and "run it again" in finding.why) is (ceilings == CEILINGS)


def test_a_gpu_that_was_idle_for_no_reason_seen_is_not_called_busy() -> None:
    """Seen: the mean step of gpt2 was 946 ms, the median one 321, and the counters saw work for a third of the time."""
    seen = gpt2_tuned(
        step=945.6, trail=320.0, gpu={"nvml_busy_pct": 37.0, "gr_active_pct": 34.3}, mfu={"datasheet": 0.059}
    )
    (finding,) = findings(with_trace(seen, 325.0, {"other": 1.4}, {"gemm": 198.0, "elementwise": 110.0}))
    assert finding.bottleneck == "none" and finding.title == "NO BOTTLENECK FOUND" and finding.patch is None
    assert "the GPU was idle for another 621.3 of 945.6 ms a step (a kernel ran 34 % of the time)" in finding.why
    busy = with_trace(gpt2_tuned(mfu={"datasheet": 0.059}), 122.0, {}, {"gemm": 70.0, "elementwise": 50.0})
    assert findings(busy)[0].title == "BUSY, NOT FAST: ELEMENTWISE", "the control"
    (finding,) = findings(gpt2_tuned(validation=20.0, gpu={"gr_active_pct": 50.0}))
    assert finding.bottleneck == "validation" and "the GPU was idle for another" in finding.detail[0]


def test_a_fit_that_died_says_so_first_and_proposes_no_rung() -> None:
    killed = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."
    first, *others = findings(resnet50_naive(partial=True, died_of=killed))
    assert first.title == "DIED" and first.alarm == killed and first.patch is None
    assert first.why.startswith(f"the fit died after 220 steps: {killed[:-1]}; the figures are from the steps before")
    known = findings(
        resnet50_naive(partial=True, died_of=killed, evidence={"died": {"hint": "write amp.enabled: false"}})
    )
    assert known[0].why == f"{first.why}; write amp.enabled: false"
    early = findings(Measurement(total_steps=10, warmup_steps=20, partial=True, died_of=killed))
    assert early[0].why == f"the fit died after 10 steps: {killed[:-1]}", "no step was measured: no figures"
    alive = findings(resnet50_naive(partial=True))
    assert alive[0].bottleneck == "data_wait" and alive[0].patch is not None, "it was interrupted"
    assert [finding.bottleneck for finding in others] == [finding.bottleneck for finding in alive]
    assert [finding for finding in others if finding.patch] == []
