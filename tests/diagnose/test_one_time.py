"""Compiles that go on, and rungs with which a run is slower than without: said first, and not said of noise."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop import diagnose
from fastloop.diagnose.one_time import STORM_STEPS, find_slowdown
from fastloop.ladder import collect_cards
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Rehearsed, Verdict
from tests.diagnose.scenes import findings, on_cpu, resnet50_naive, scene

REASON = "tensor 'input_ids' size mismatch at index 1. expected 17, actual 23"


def compiled(seconds: float = 98.0, **changes: Any) -> Any:
    """The changes of a run that compiled so long: 37 times in 31 steps, unless said otherwise."""
    found = {"count": 37, "steps": 31, "fit_s": 122.0, "reasons": [REASON], "at_least": False, **changes}
    return {"one_time_s": {"compile": seconds, "validation_compile": 0.0}, "evidence": {"compilation": found}}


def first(seen: Measurement, verdicts: tuple[Verdict, ...] = ()) -> Finding:
    return diagnose.list_findings(seen, collect_cards(), (), verdicts)[0]


def test_a_run_that_compiles_all_the_time_is_told_so_first() -> None:
    seen = resnet50_naive(**compiled())
    finding = first(seen)
    assert finding.title == "KEEPS RECOMPILING" and finding.bottleneck == "host_other"
    assert finding.alarm == f"torch.compile ran 37 times and took 98 s of this run's 122 s ({REASON})"
    assert finding.why.startswith(
        "torch.compile ran 37 times and took 98 s of this run's 122 s, in 31 of 220 steps; no rung helps with this:"
        " mark"
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
    assert [each.title for each in findings(seen)] == ["KEEPS RECOMPILING"]


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


def looked(*rungs: str, slower: bool = True, **changes: Any) -> dict[str, Any]:
    times = {"with_ms": 181.0, "without_ms": 127.0, "low_ms": 41.0, "high_ms": 62.0, "n": 8}
    return {"second_look": {"rungs": list(rungs), "is_slower": slower, **times, **changes}}


def test_batches_with_a_rung_and_without_name_it_with_n_and_interval() -> None:
    finding = first(steady(200.0, evidence=looked("compile")), (took(),))
    assert finding.title == "SLOWER WITH COMPILE" and finding.patch == {"rungs": {"compile": {"enabled": False}}}
    assert finding.alarm == (
        "forward and backward take 181.0 ms with compile, 127.0 ms without"
        " (n = 8 each, slower by 41.0 to 62.0 ms, 95 %)"
    )
    assert finding.why == f"{finding.alarm}; switch compile off"
    assert finding.share_pct == pytest.approx(27.0), "54 of the step's 200 ms"


def test_what_a_slower_rung_may_be_worth_is_counted_on_the_whole_step() -> None:
    """Its optimizer, logging and waits stay, however slow forward and backward have become."""
    seen = steady(48.0, parts={"forward": 10.0, "backward": 28.5}, evidence=looked("amp", with_ms=38.5, without_ms=0.9))
    finding = first(seen, (took("amp"),))
    assert finding.share_pct == pytest.approx(100 * 37.6 / 48)
    assert finding.ceiling_gain_pct == pytest.approx(100 * (48 / (48 - 37.6) - 1))
    worse = first(steady(48.0, evidence=looked("amp", with_ms=90.0, without_ms=1.0)), (took("amp"),))
    assert worse.share_pct == pytest.approx(90.0), (
        "batches of the second look were larger: at most forward and backward"
    )


def test_steps_that_are_slower_than_a_rehearsal_prove_nothing() -> None:
    """Their training_step may do more than call the modules that were rehearsed."""
    for others in (looked("compile", slower=False), looked("amp", slower=False), {}):  # amp is off now
        assert find_slowdown(steady(24.0, evidence=others), (took(eager=10.0, changed=9.0),)) is None


@pytest.mark.parametrize(
    ("seen", "verdicts"),
    [
        (steady(24.0, evidence=looked("compile")), ()),
        (steady(24.0, evidence=looked("compile")), (Verdict(rung="compile", took=False),)),  # off: none of its doing
        (steady(9.0, evidence=looked("compile", low_ms=None)), (took(),)),  # another version's file
        (Measurement(), (took(),)),
    ],
)
def test_what_is_not_certain_is_not_said(seen: Measurement, verdicts: tuple[Verdict, ...]) -> None:
    assert find_slowdown(seen, verdicts) is None


def test_rungs_that_were_looked_at_together_are_named_together() -> None:
    finding = find_slowdown(steady(21.4, evidence=looked("pin", "amp")), (took("pin"), took("amp")))
    assert finding is not None and "with pin or amp," in finding.alarm
    assert finding.patch == {"rungs": {"pin": {"enabled": False}}}


@pytest.mark.parametrize(("took_ms", "named"), [(3.0, True), (1.3, False), (None, False)])
def test_workers_that_cost_more_than_they_save_are_named(took_ms: float | None, named: bool) -> None:
    loss = None if took_ms is None else (took_ms, 1.2)
    seen = on_cpu(step=10.0, data_wait=3.0, evidence={"workers": {"live_workers": 2, "loss_ms": loss}})
    finding = first(seen, (Verdict(rung="workers", took=True, why="2 workers"),))
    assert (finding.title == "SLOWER WITH WORKERS") is named
    if named:
        assert finding.share_pct == pytest.approx(18) and finding.patch == {"rungs": {"workers": {"enabled": False}}}
        assert finding.alarm == "3.00 ms for a batch from a worker, 1.20 ms to make it"
        every = findings(seen, ("workers",), (Verdict(rung="workers", took=True, why="2 workers"),))
        assert every[1].bottleneck == "data_wait" and "more workers" not in every[1].why
        assert "taking batches from workers costs more than making them" in every[1].why
    assert first(seen, (Verdict(rung="workers", took=False, why="off"),)).title != "SLOWER WITH WORKERS"
