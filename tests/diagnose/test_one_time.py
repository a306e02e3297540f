"""Compiles that go on, and rungs with which a run is slower than without: said first, and not said of noise."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from fastloop import diagnose
from fastloop.diagnose.one_time import STORM_STEPS, _t95, find_slowdown
from fastloop.ladder import cards
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Rehearsed, Verdict
from tests.diagnose.scenes import findings, on_cpu, resnet50_naive, scene

REASON = "tensor 'input_ids' size mismatch at index 1. expected 17, actual 23"


def compiled(seconds: float = 98.0, **changes: Any) -> Any:
    """The changes of a run that compiled so long: 37 times in 31 steps, unless said otherwise."""
    found = {"count": 37, "steps": 31, "fit_s": 122.0, "reasons": [REASON], "at_least": False, **changes}
    return {"one_time_s": {"compile": seconds, "validation_compile": 0.0}, "evidence": {"compilation": found}}


def first(seen: Measurement, verdicts: tuple[Verdict, ...] = ()) -> Finding:
    return diagnose.findings(seen, cards(), (), verdicts)[0]


def test_a_run_that_compiles_all_the_time_is_told_so_first() -> None:
    seen = resnet50_naive(**compiled())
    finding = first(seen)
    assert finding.title == "COMPILING AGAIN AND AGAIN" and finding.bottleneck == "host_other"
    assert finding.alarm == f"compile ran 37 times, 98 s of this run's 122 s ({REASON})"
    assert finding.why.startswith(
        "compile ran 37 times, 98 s of this run's 122 s, in 31 of 220 steps; no rung helps: mark"
    )
    assert finding.share_pct is None, "all of it came before the window"
    assert [each.bottleneck for each in findings(seen)[1:]] == [each.bottleneck for each in findings(resnet50_naive())]


def test_compiles_inside_the_window_are_its_share_and_not_the_loops_own() -> None:
    changes = compiled(ms_per_step=60.0, at_least=True)
    seen = scene(100.0, device="cpu", host_other=62.0, samples_per_s=10.0, **changes)
    storm, *others = findings(seen)
    assert storm.share_pct == pytest.approx(60.0) and storm.ceiling_gain_pct == pytest.approx(150.0)
    assert "60.0 ms of each step in the window" in storm.why and "at least 37 times" in storm.alarm
    assert "host_other" not in [each.bottleneck for each in others], "2 ms are the loop's"
    del changes["evidence"]["compilation"]["ms_per_step"]
    control = scene(100.0, device="cpu", host_other=62.0, **changes)
    assert "host_other" in [each.bottleneck for each in findings(control)[1:]]


@pytest.mark.parametrize(
    "changes",
    [
        compiled(steps=STORM_STEPS - 1),  # the first step, a validation, a last batch
        compiled(seconds=11.0),  # less than a tenth of the fit
        compiled(fit_s=10_000.0),
        compiled(fit_s=None),
        compiled(steps=None),
        {"one_time_s": {"compile": None}, "evidence": {"compilation": {"count": 9, "steps": 9, "fit_s": 122.0}}},
        {"one_time_s": {"compile": 41.0}},  # nothing else is known, as in other versions' files
        {},
    ],
)
def test_compiles_that_come_once_raise_no_alarm(changes: Any) -> None:
    seen = resnet50_naive(**changes)
    assert findings(seen)[0].title == "STARVED BY DATA" and not any(each.alarm for each in findings(seen))


def test_an_alarm_takes_the_place_of_nothing_to_gain() -> None:
    assert [each.title for each in findings(on_cpu())] == ["NOTHING TO GAIN"]
    seen = on_cpu(**compiled())
    assert [each.title for each in findings(seen)] == ["COMPILING AGAIN AND AGAIN"]


# -- slower than without -----------------------------------------------------------------------------------------------


def took(
    rung: str = "compile", eager: float | None = 10.0, changed: float | None = 6.0, of_batch: bool = True
) -> Verdict:
    tried = Rehearsed(eager_ms=eager, changed_ms=changed, of_batch=of_batch)
    return Verdict(rung=rung, took=True, rehearsed=tried)


def steady(mean: float, spread: float = 1.0, n: int = 60, **changes: Any) -> Measurement:
    """A window of so many steps whose deciles lie `spread` beside the mean; a tenth of the step is no compute."""
    times = {"mean": mean, "median": mean, "p10": mean - spread, "p90": mean + spread}
    compute = {"forward": 0.3 * mean, "backward": 0.6 * mean}
    return Measurement(
        steps=n, step_ms=times, parts_ms={**compute, **changes.pop("parts", {})}, device="cuda", **changes
    )


def eager(*step_ms: float | None) -> dict[str, Any]:
    return {"eager_steps": {"step_ms": list(step_ms)}}


EAGER = eager(10.6, 10.9, 10.8, 11.0, 10.7)


def test_steps_slower_than_the_runs_own_eager_ones_name_the_rung_with_n_and_interval() -> None:
    finding = first(steady(21.4, evidence=EAGER), (took(),))
    assert finding.title == "SLOWER WITH COMPILE" and finding.patch == {"rungs": {"compile": {"enabled": False}}}
    assert finding.alarm == (
        "steps take 21.4 ms with compile, the run's own 5 steps without rungs took 10.8 ms"
        " (n = 60, slower by 10.3 to 10.9 ms, 95 %)"
    )
    assert finding.why == f"{finding.alarm}; switch compile off"


def test_a_rehearsal_is_a_reference_too() -> None:
    seen = steady(24.0, parts={"validation": 2.0})
    finding = find_slowdown(seen, (took(eager=10.0, changed=9.0),))
    assert finding is not None and finding.alarm == (
        "forward and backward take 21.6 ms with compile, without rungs the rehearsed batch took 10.0 ms"
        " (n = 60, slower by 11.4 to 11.8 ms, 95 %)"
    )
    micro = steady(40.0, global_batch=32, micro_batch=8)
    assert find_slowdown(micro, (took(eager=10.0),)) is None, "four batches a step"
    assert find_slowdown(micro, (took(eager=5.0),)) is not None


@pytest.mark.parametrize(
    ("seen", "verdicts"),
    [
        (steady(10.9, evidence=EAGER), (took(),)),  # as fast
        (steady(11.3, spread=0.1, evidence=EAGER), (took(),)),  # certain, and too little
        (steady(14.0, spread=20.0, n=8, evidence=EAGER), (took(),)),  # much, and uncertain
        (steady(21.4, n=4, evidence=EAGER), (took(),)),
        (steady(21.4, evidence=eager(1.0, None, 1.0)), (took(eager=None),)),  # too few of them
        (steady(21.4, evidence=EAGER), ()),
        (steady(21.4, evidence=EAGER), (Verdict(rung="compile", took=False),)),  # not on: none of its doing
        (steady(21.4, evidence=EAGER, parts={"validation": 10.5}), (took(),)),  # the eager steps had no validation
        (steady(11.0), (took(eager=10.0),)),  # 9.9 ms of forward and backward
        (steady(24.0, spread=13.0), (took(eager=10.0),)),  # batches differ: the quickest tenth takes 9.9 ms
        (steady(16.0), (took(eager=10.0),)),  # 14.4 ms: the rest may be losses and metrics
        (steady(24.0), (took("fused", eager=0.5, changed=0.4, of_batch=False),)),  # an optimizer's step
        (Measurement(), (took(),)),
        (Measurement(steps=60, step_ms={"mean": 21.4}, evidence=EAGER), (took(),)),  # no spread: an older file
        (steady(21.4, evidence=eager()), (Verdict(rung="compile", took=True),)),
        (steady(21.4, parts={"forward": None}), (took(),)),
    ],
)
def test_what_is_not_certain_is_not_said(seen: Measurement, verdicts: tuple[Verdict, ...]) -> None:
    assert find_slowdown(seen, verdicts) is None


@pytest.mark.parametrize(
    ("verdicts", "changes", "named"),
    [
        ((took("layout", 10.0, 12.0), took("amp", 10.0, 7.0), took("fused", 10.0, 7.1)), {}, "layout"),
        ((took("layout", 10.0, 9.0), took("amp", 10.0, 7.0), took("compile", 10.0, 7.2)), {}, "compile"),  # kept before
        ((took("layout", 10.0, 9.0), took("compile", 10.0, 7.0)), compiled(ms_per_step=5.0), "compile"),
        ((took("layout", 10.0, 9.0), took("compile", 10.0, 7.0)), {}, "layout or compile"),
        ((took("amp", 10.0, 7.0), took("fused", 0.5, 0.4, of_batch=False)), {}, "amp or fused"),
        ((Verdict(rung="pin", took=True), Verdict(rung="amp", took=True)), {}, "pin or amp"),
    ],
)
def test_the_rung_that_costs_is_named(verdicts: tuple[Verdict, ...], changes: Any, named: str) -> None:
    evidence = {**EAGER, **changes.get("evidence", {})}
    finding = find_slowdown(steady(21.4, evidence=evidence, one_time_s=changes.get("one_time_s", {})), verdicts)
    assert finding is not None and f"with {named}," in finding.alarm
    assert finding.patch == {"rungs": {named.split(" or ")[0]: {"enabled": False}}}


def test_two_hundred_runs_that_are_as_fast_raise_no_alarm() -> None:
    """Within a run, where steps are alike; and nearly all that are a fifth slower do."""
    draw, alarms = random.Random(0), {1.0: 0, 1.2: 0}
    for slower in alarms:
        for _ in range(200):
            alone = [draw.gauss(10.0, 0.5) for _ in range(5)]
            steps = sorted(draw.gauss(10.0 * slower, 0.5) for _ in range(60))
            deciles = statistics.quantiles(steps, n=10)
            times = {"mean": statistics.mean(steps), "p10": deciles[0], "p90": deciles[-1]}
            seen = Measurement(steps=60, step_ms=times, evidence=eager(*alone))
            alarms[slower] += find_slowdown(seen, (took(),)) is not None
    assert alarms[1.0] == 0 and alarms[1.2] > 190


@pytest.mark.parametrize(("df", "true"), [(4, 2.776), (9, 2.262), (30, 2.042), (200, 1.972)])
def test_the_quantile(df: int, true: float) -> None:
    assert math.isclose(_t95(df), true, rel_tol=0.02)
