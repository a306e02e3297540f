"""The lines a person reads first: at most twelve, every reason in them, no word of a speed-up."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from fastloop.ladder import Ladder
from fastloop.measurement import Measurement
from fastloop.records import Change, Finding, Plan, Step, Verdict
from fastloop.report import summary

BOAST = re.compile(r"speed[- ]?ups?|faster|speeds? up|\d\s*(x|times) (as fast|the speed)|\bgain", re.IGNORECASE)
"""What only a comparison of several runs may say."""
WAITS = Finding(bottleneck="data_wait", share_pct=82.0, why="the device had nothing to do for 8 of 10 ms",
                patch={"rungs": {"workers": {"enabled": True, "count": 3}}}, ceiling_gain_pct=400.0)  # fmt: skip
SEEN = Measurement(steps=40, total_steps=60, warmup_steps=20, samples_per_s=1234.56, window_too_short=False,
                   step_ms={"mean": 10.04, "median": 10.0, "p10": 9.0, "p90": 12.0}, parts_ms={"data_wait": 8.2},
                   lead_ms=3.14, watch_us_per_step=3.4, device="cuda", world_size=2, loss=(2.0, 1.0))  # fmt: skip


def planned(*rungs: str, parity: Any = "approximate") -> Plan:
    return Plan(steps=tuple(Step(rung=rung, status="planned", change=Change(parity=parity)) for rung in rungs))


def test_the_whole() -> None:
    verdicts = [Verdict(rung="workers", took=True, why="4 live workers"), Verdict(rung="amp", took=True, why="bf16"),
                Verdict(rung="pin", took=False, why="needs CUDA"), Verdict(rung="fused", took=None, why="not seen")]
    lines = summary.lines(SEEN, planned("workers", "amp"), verdicts, [WAITS], report="runs/x/report.md")
    assert lines == [
        "fastloop STARVED BY DATA   2x cuda   steps 20-60",
        "  the device had nothing to do for 8 of 10 ms",
        "step 10.0 ms   wait for data 8.2 ms   1,234.6 samples/s   lead 3.1 ms   watching cost 3.4 us a step",
        "TOOK     [approximate] workers (4 live workers); amp (bf16)",
        "INACTIVE pin: needs CUDA",
        "UNKNOWN  fused: not seen",
        "FIX      rungs.workers {enabled: true, count: 3}",
        "REPORT   runs/x/report.md",
    ]  # fmt: skip


@pytest.mark.parametrize("parity", ["exact", "approximate", "changes-training"])
def test_what_took_is_under_the_plans_parity_class(parity: str) -> None:
    verdicts = [Verdict(rung="amp", took=True, why="x")]
    (line,) = [line for line in summary.lines(SEEN, planned("amp", parity=parity), verdicts, []) if "TOOK" in line]
    assert line == f"TOOK     [{parity}] amp (x)"
    assert not [line for line in summary.lines(SEEN, planned("amp"), [], []) if "TOOK" in line]


def test_what_was_not_measured_is_na_and_never_0() -> None:
    lines = summary.lines(Measurement(total_steps=3), Plan(), [], [])
    assert lines == ["fastloop NOT MEASURED   1x cpu   3 steps, none of them measured",
                     "step n/a   wait for data n/a   n/a samples/s   watching cost n/a"]  # fmt: skip
    assert "TOO SHORT TO JUDGE" in summary.lines(Measurement(), Plan(), [], [WAITS])[0]


@pytest.mark.parametrize(
    ("value", "form", "unit", "text"),
    [(None, ",.1f", "ms", "n/a"), (0.0, ",.1f", "ms", "0.0 ms"), (1234.5, ",.1f", "", "1,234.5"), (7, ",d", "", "7"),
     (float("nan"), ",.1f", "ms", "n/a"), (float("inf"), ",.1f", "samples/s", "n/a")],
)  # fmt: skip
def test_numbers(value: Any, form: str, unit: str, text: str) -> None:
    assert summary.number(value, form, unit) == text


@pytest.mark.parametrize(
    ("change", "flag"),
    [({"partial": True}, "PARTIAL: the fit did not end normally"),
     ({"window_too_short": True}, "window too short for its queues"),
     ({"window_too_short": True, "steps": 1}, "window too short: 1 step"),
     ({"window_too_short": True, "steps": 9}, "window too short: 9 steps")],
)  # fmt: skip
def test_flags(change: dict[str, Any], flag: str) -> None:
    first = summary.lines(dataclasses.replace(SEEN, **change), Plan(), [], [WAITS])[0]
    assert first.endswith(f"   {flag}")
    assert flag not in summary.lines(SEEN, Plan(), [], [WAITS])[0]


@pytest.mark.parametrize("inactive", range(12))
@pytest.mark.parametrize("unknown", [0, 1, 7])
@pytest.mark.parametrize("report", [None, "r.md"])
def test_at_most_twelve_lines_and_no_reason_left_out(inactive: int, unknown: int, report: str | None) -> None:
    verdicts = [Verdict(rung=f"rung{number}", took=took, why=f"reason {number}.") for number, took in
                enumerate([False] * inactive + [None] * unknown + [True] * 2)]  # fmt: skip
    findings = [dataclasses.replace(WAITS, patch={"rungs": {f"fix{number}": {"enabled": True}}}) for number in range(4)]
    lines = summary.lines(SEEN, planned("rung0"), verdicts, findings, report)
    assert len(lines) <= 12
    text = "\n".join(lines)
    for verdict in verdicts:
        kind = {True: "TOOK", False: "INACTIVE", None: "UNKNOWN"}[verdict.took]
        line = next(line for line in lines if verdict.rung in re.findall(r"\w+", line))
        assert line.startswith(kind) and verdict.why in line
    assert [f"fix{number}" for number in range(4) if f"rungs.fix{number} {{enabled: true}}" not in text] == []
    assert report is None or lines[-1] == f"REPORT   {report}"
    if inactive + unknown <= 2:
        assert text.count("\nINACTIVE") == inactive and text.count("\nUNKNOWN") == unknown, "joined without need"


def test_a_reason_of_several_lines_takes_one() -> None:
    verdicts = [Verdict(rung="compile", took=False, why="RuntimeError: first\n  second\r\nthird")]
    lines = summary.lines(SEEN, Plan(), verdicts, [dataclasses.replace(WAITS, why="a\nb")])
    assert "  a b" in lines and len(lines) == 5
    assert lines[3] == "INACTIVE compile: RuntimeError: first   second third"


def test_no_word_of_a_speed_up() -> None:
    reasons = [Verdict(rung=name, took=took, why="why") for name, _ in Ladder().rungs() for took in (True, False, None)]
    lines = summary.lines(SEEN, planned(), reasons, [WAITS], "report.md")
    assert BOAST.findall("\n".join(lines)) == []
    assert BOAST.findall("1.8x as fast; a speed-up of 3; FASTER than; gains 5 %")


def test_patches() -> None:
    assert summary.yaml_patch(None) == "" == summary.yaml_patch({})
    patch = {"rungs": {"amp": {"mode": "tf32", "enabled": True}, "pin": {"enabled": False}}}
    assert summary.yaml_patch(patch) == 'rungs.amp {mode: "tf32", enabled: true}, rungs.pin {enabled: false}'
