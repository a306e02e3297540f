"""The lines a person reads first: at most twelve, every reason in them, no word of a speed-up."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from fastloop.ladder import Ladder
from fastloop.records.measurement import PARTS, Measurement
from fastloop.records.plan import Change, Finding, Plan, Rehearsed, Step, Verdict
from fastloop.records.run_files import PlanFile
from fastloop.records.yaml_text import dump_on_one_line
from fastloop.report.run import summary
from tests.report import samples

BOAST = re.compile(r"speed[- ]?ups?|faster|speeds? up|\d\s*(x|times) (as fast|the speed)|\bgain", re.IGNORECASE)
"""What only a comparison of several runs may say."""
WAITS = Finding(
    bottleneck="data_wait",
    share_pct=82.0,
    why="the device was idle for 8 of 10 ms",
    patch={"rungs": {"workers": {"enabled": True, "count": 3}}},
    ceiling_gain_pct=400.0,
    title="STARVED BY DATA",
)
SEEN = Measurement(
    steps=40,
    total_steps=60,
    warmup_steps=20,
    samples_per_s=1234.56,
    window_too_short=False,
    step_ms={"mean": 10.04, "median": 10.0, "p10": 9.0, "p90": 12.0},
    parts_ms={"data_wait": 8.2},
    lead_ms=3.14,
    watch_us_per_step=3.4,
    device="cuda",
    world_size=2,
    loss=(2.0, 1.0),
)


def planned(*rungs: str, parity: Any = "approximate") -> Plan:
    return Plan(steps=tuple(Step(rung=rung, status="planned", change=Change(parity=parity)) for rung in rungs))


def test_the_whole() -> None:
    verdicts = [
        Verdict(rung="workers", took=True, why="4 live workers"),
        Verdict(rung="amp", took=True, why="bf16"),
        Verdict(rung="pin", took=False, why="needs CUDA"),
        Verdict(rung="fused", took=None, why="not seen"),
    ]
    lines = summary.write_lines(SEEN, planned("workers", "amp"), verdicts, [WAITS], report="runs/x/report.md")
    assert lines == [
        "fastloop STARVED BY DATA 82 %   2x cuda   steps 21-60",
        "  the device was idle for 8 of 10 ms",
        "step 10.0 ms |WWWWWWWWWWWWWWWWWW....| Wait 8.2  ...not split 1.84",
        "1,235 samples/s   lead 3.1 ms   GPU fed 18 %   watching cost 3.4 us a step",
        "if data were free: at most 6,173 samples/s (an estimate)",
        "TOOK     [approximate] workers (4 live workers); amp (bf16)",
        "INACTIVE pin: needs CUDA",
        "UNKNOWN  fused: not seen",
        "FIX      rungs.workers {enabled: true, count: 3}",
        "REPORT   runs/x/report.md",
    ]


@pytest.mark.parametrize(
    ("parity", "acted", "said"), [("approximate", True, True), ("approximate", False, False), ("exact", True, False)]
)
def test_a_rung_that_is_off_but_has_trained_differently_is_told(parity: Any, acted: bool, said: bool) -> None:
    """Read from its file, too: that is what `exec` shows."""
    change = Change(wants={"loader.num_workers": 4}, parity=parity, notes=("random augmentations differ",))
    step = Step(rung="workers", status="skipped", reason="taking a batch took longer", change=change, has_acted=acted)
    plan = PlanFile.of(Plan(steps=(step,))).to_plan()
    verdicts = [Verdict(rung="workers", took=False, why="taking a batch took longer"), Verdict(rung="host", took=True)]
    lines = summary.write_lines(SEEN, plan, verdicts, [])
    line = "CHANGES  workers was on for the first steps: random augmentations differ"
    assert (line in lines) is said
    assert any(each.startswith(f"TOOK     [{'approximate' if said else 'exact'}]") for each in lines)


@pytest.mark.parametrize("parity", ["approximate", "exact"])
def test_samples_that_differ_are_told(parity: Any) -> None:
    notes = ("each worker is a process", "random augmentations may differ from a run without workers (Flip)")
    step = Step(
        rung="workers", status="planned", change=Change(wants={"loader.num_workers": 4}, parity=parity, notes=notes)
    )
    took = [Verdict(rung="workers", took=True, why="4 live workers")]
    lines = summary.write_lines(SEEN, Plan(steps=(step,)), took, [])
    assert (f"CHANGES  workers: {notes[1]}" in lines) is (parity == "approximate")


def test_what_a_rung_changes_besides_is_said_once_it_took() -> None:
    said = Change(wants={"step.micro_batch": 32}, notes=("hooks count\nsteps", "validation stays"))
    quiet = Change(wants={"loader.num_workers": 4}, notes=("workers compete for CPUs",))
    plan = Plan(
        steps=(
            Step(rung="batch", status="planned", change=said),
            Step(rung="workers", status="planned", change=quiet),
        )
    )
    both = [Verdict(rung="batch", took=True, why="x"), Verdict(rung="workers", took=True, why="y")]
    changes = [line for line in summary.write_lines(SEEN, plan, both, []) if line.startswith("CHANGES")]
    assert changes == ["CHANGES  batch: hooks count steps; validation stays"]
    refused = [dataclasses.replace(both[0], took=False), both[1]]
    assert not [line for line in summary.write_lines(SEEN, plan, refused, []) if line.startswith("CHANGES")]


@pytest.mark.parametrize("parity", ["exact", "approximate", "changes-training"])
def test_what_took_is_under_the_plans_parity_class(parity: str) -> None:
    verdicts = [Verdict(rung="amp", took=True, why="x")]
    (line,) = [
        line for line in summary.write_lines(SEEN, planned("amp", parity=parity), verdicts, []) if "TOOK" in line
    ]
    assert line == f"TOOK     [{parity}] amp (x)"
    assert not [line for line in summary.write_lines(SEEN, planned("amp"), [], []) if "TOOK" in line]


def test_what_was_not_measured_is_na_and_never_0() -> None:
    lines = summary.write_lines(Measurement(total_steps=3), Plan(), [], [])
    assert lines == [
        "fastloop NOT MEASURED   1x cpu   3 steps, none of them measured",
        "step n/a",
        "n/a samples/s   watching cost n/a",
    ]


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"partial": True}, "PARTIAL: the fit did not end normally"),
        ({"window_too_short": True}, "window too short for the loader's queues"),
        ({"window_too_short": True, "steps": 1}, "window too short: 1 step"),
        ({"window_too_short": True, "steps": 9}, "window too short: 9 steps"),
    ],
)
def test_flags(change: dict[str, Any], flag: str) -> None:
    first = summary.write_lines(dataclasses.replace(SEEN, **change), Plan(), [], [WAITS])[0]
    assert first.endswith(f"   {flag}")
    assert flag not in summary.write_lines(SEEN, Plan(), [], [WAITS])[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"first_step": 21}, "steps 22-61"),
        ({"first_step": None}, "steps 21-60"),
        ({"first_step": 21, "total_steps": 5000}, "steps 22-61"),
        ({"steps": 0, "total_steps": 1}, "1 step, none of them measured"),
        ({"steps": 0, "total_steps": 0}, "0 steps, none of them measured"),
        ({"steps": 0, "total_steps": None}, "steps n/a: not watched"),
    ],
)
def test_the_steps_measured_are_those_of_the_window_and_not_the_last_ones(change: dict[str, Any], said: str) -> None:
    assert summary.describe_window(dataclasses.replace(SEEN, **change)) == said


@pytest.mark.parametrize(
    ("mean", "text"),
    [
        (0.6012, "step 0.601 ms"),
        (1.0, "step 1.0 ms"),
        (489.64, "step 489.6 ms"),
        (0.0, "step 0.0 ms"),
        (None, "step n/a"),
    ],
)
def test_a_short_step_has_more_digits(mean: float | None, text: str) -> None:
    seen = dataclasses.replace(SEEN, step_ms={"mean": mean}, parts_ms={})
    assert text in summary.write_lines(seen, Plan(), [], [])


def test_a_rounding_error_is_no_part_of_the_step() -> None:
    parts = {"data_wait": 6.0, "forward": 4.0, "unexplained": 1e-15}
    seen = dataclasses.replace(SEEN, step_ms={"mean": 10.0}, parts_ms=parts)
    assert summary.write_lines(seen, Plan(), [], [])[1].endswith("| Wait 6  fwd 4")


@pytest.mark.parametrize(("device", "free"), [("cpu", "the loop itself"), ("cuda", "launches")])
def test_nothing_is_launched_on_the_cpu(device: str, free: str) -> None:
    finding = dataclasses.replace(WAITS, bottleneck="launch_bound")
    line = summary.describe_first_ceiling(dataclasses.replace(SEEN, device=device), [finding])
    assert line.startswith(f"if {free} were free: at most")


@pytest.mark.parametrize(("median", "estimate", "there"), [(9.0, True, True), (1.0, True, False), (1.0, False, True)])
def test_no_ceiling_is_estimated_from_means_that_a_few_long_steps_distort(
    median: float, estimate: bool, there: bool
) -> None:
    seen = dataclasses.replace(SEEN, step_ms={"mean": 10.0, "median": median})
    finding = dataclasses.replace(WAITS, ceiling_is_estimate=estimate)
    assert bool(summary.describe_first_ceiling(seen, [finding])) is there


@pytest.mark.parametrize("inactive", range(12))
@pytest.mark.parametrize("unknown", [0, 1, 7])
@pytest.mark.parametrize("report", [None, "r.md"])
def test_at_most_twelve_lines_and_no_reason_left_out(inactive: int, unknown: int, report: str | None) -> None:
    verdicts = [
        Verdict(rung=f"rung{number}", took=took, why=f"reason {number}.")
        for number, took in enumerate([False] * inactive + [None] * unknown + [True] * 2)
    ]
    findings = [dataclasses.replace(WAITS, patch={"rungs": {f"fix{number}": {"enabled": True}}}) for number in range(4)]
    lines = summary.write_lines(SEEN, planned("rung0"), verdicts, findings, report)
    assert len(lines) <= 12
    text = "\n".join(lines)
    for verdict in verdicts:
        kind = {True: "TOOK", False: "INACTIVE", None: "UNKNOWN"}[verdict.took]
        line = next(line for line in lines if verdict.rung in re.findall(r"\w+", line))
        assert line.startswith(kind) and verdict.why in line
    assert [f"fix{number}" for number in range(4) if f"rungs.fix{number} {{enabled: true}}" not in text] == []
    assert report is None or lines[-1] == f"REPORT   {report}"
    shared = [len(re.findall(r"reason", line)) for line in lines if line.startswith("INACTIVE")]
    assert len(lines) == 12 or max(shared, default=1) == 1, "joined without need"
    assert max(shared, default=1) <= 2 * min(shared, default=1) + 1, "one line has nearly all of them"
    if inactive + unknown <= 1:
        assert text.count("\nINACTIVE") == inactive and text.count("\nUNKNOWN") == unknown, "joined without need"


def test_rungs_whose_reasons_begin_alike_share_a_line() -> None:
    reasons = {
        "pin": "needs CUDA; this run is on cpu, where nothing is copied to a device",
        "overlap": "needs DDP with several devices; the strategy is SingleDeviceStrategy",
        "prefetch": "needs CUDA; this run is on cpu, where there is no copy to overlap",
    }
    verdicts = [Verdict(rung=rung, took=False, why=why) for rung, why in reasons.items()]
    assert [line for line in summary.write_lines(SEEN, Plan(), verdicts, [WAITS]) if line.startswith("INACTIVE")] == [
        "INACTIVE pin, prefetch: needs CUDA",
        f"INACTIVE overlap: {reasons['overlap']}",
    ]


def test_a_patch_says_against_what_it_helps_where_that_is_not_the_headline() -> None:
    fixes = {"LOOP OVERHEAD": None, "STARVED BY DATA": "workers", "BUSY": "amp", "BUSY TOO": "amp"}
    findings = [
        dataclasses.replace(WAITS, title=title, patch=rung and {"rungs": {rung: {"enabled": True}}})
        for title, rung in fixes.items()
    ]
    lines = summary.write_lines(SEEN, Plan(), [], findings)
    assert [line for line in lines if line.startswith("FIX")] == [
        "FIX      rungs.workers {enabled: true} (against STARVED BY DATA)",
        f"FIX      rungs.amp {{enabled: true}} (against BUSY, {WAITS.share_pct:.0f} % of the step)",
    ]
    assert "FIX      rungs.amp {enabled: true}" in summary.write_lines(SEEN, Plan(), [], findings[2:])


def test_all_kinds_of_lines_together_are_twelve() -> None:
    seen, findings, verdicts, plan, name = samples.gpt2()
    verdicts = tuple(Verdict(rung=f"{took}", took=took, why="x") for took in (True, False, None))
    seen = dataclasses.replace(seen, partial=True, state=("hot",), tokens_per_s=1.0)
    lines = summary.write_lines(seen, plan, verdicts, findings, "r.md", name, ("a",), ("b",))
    assert len(lines) <= 12 and [line.split()[0] for line in lines[-8:]] == [
        "TOOK",
        "INACTIVE",
        "UNKNOWN",
        "SYNC",
        "NOTE",
        "FIX",
        "THEN",
        "REPORT",
    ]


def test_ranks_say_what_ended_them() -> None:
    seen, findings, verdicts, plan, name = samples.died()
    first = summary.write_lines(seen, plan, verdicts, findings, None, name)[0]
    assert first.endswith("PARTIAL: the fit did not end normally (rank 0: RuntimeError, rank 1: ValueError)")
    alone = dataclasses.replace(
        seen, partial=False, ranks=(seen.ranks[0] | {"ended_by": None, "partial": False}, seen.ranks[1])
    )
    assert summary.list_flags(alone) == ["PARTIAL: the fit did not end normally (rank 1: ValueError)"]


def test_a_reason_of_several_lines_takes_one() -> None:
    verdicts = [Verdict(rung="compile", took=False, why="RuntimeError: first\n  second\r\nthird")]
    lines = summary.write_lines(SEEN, Plan(), verdicts, [dataclasses.replace(WAITS, why="a\nb")])
    assert "  a b" in lines and [line for line in lines if "\n" in line or "\r" in line] == []
    assert "INACTIVE compile: RuntimeError: first   second third" in lines


def test_the_first_screen_of_the_naive_resnet50() -> None:
    seen, findings, verdicts, plan, name = samples.resnet50()
    lines = summary.write_lines(
        seen, plan, verdicts, findings, "r.md", name, then=("prefetch", "cache"), later=("amp",)
    )
    assert lines == [
        "fastloop STARVED BY DATA 86 %   resnet50 batch 64 x 4 32-true   1x H200   steps 51-250",
        "  the GPU was idle for 86 % of each step: Python was decoding JPEGs",
        "step 197.5 ms |WWWWWWWWWWWWWWWWWWWfbb| Wait 170  h2d 3.9  fwd 7.6  bwd 14.4  others 2",
        "324 samples/s   lead 0.0 ms   GPU fed 14 % (NVML busy 13 %)   0.577 J/sample   watching cost 18.0 us a step",
        "7.9 TFLOP/s = 11.8 % of fp32 and 0.8 % of bf16   tensor cores 2 % active",
        "if data were free: at most 2,697 samples/s (8.3x, measured)   now: 0 workers, 16 CPUs usable",
        "FIX      rungs.workers {enabled: true}",
        "THEN     prefetch, cache     LATER  amp",
        "REPORT   r.md",
    ]


def test_of_several_loaders_the_one_without_workers_is_named() -> None:
    seen, findings, verdicts, plan, name = samples.resnet50()
    loader = {**seen.evidence["loader"], "without_workers": {"'map' (Rows)": None}}
    seen = dataclasses.replace(seen, evidence={**seen.evidence, "loader": loader})
    lines = summary.write_lines(seen, plan, verdicts, findings, "r.md", name)
    assert any("   now: 0 workers in 'map' (Rows), 16 CPUs usable" in line for line in lines)


def test_the_first_screen_of_the_naive_gpt2() -> None:
    seen, findings, verdicts, plan, name = samples.gpt2()
    text = "\n".join(summary.write_lines(seen, plan, verdicts, findings, name=name, later=("amp",)))
    for words in (
        "BUSY, NOT FAST: FP32 MATH 97 %   gpt2 batch 8 x 8 32-true",
        "also BUSY, NOT FAST: MEMORY-BOUND: elementwise",
        "NVML busy 99.7 %",
        ">= 36.2 TFLOP/s: at least 54 % of fp32 and 3.66 % of bf16",
        "tensor cores 0 % active",
        "41,472 tokens/s",
        "NOTE     the board is at its power limit; a step took 12 % longer at step 590 than in the timed window: SM",
        "\nLATER    amp",
    ):
        assert words in text


def test_a_finding_s_title_is_said() -> None:
    lines = summary.write_lines(SEEN, Plan(), [], [dataclasses.replace(WAITS, title=title) for title in ("A", "B C")])
    assert lines[0].startswith("fastloop A 82 %   ") and lines[2].startswith("  also B C: ")


@pytest.mark.parametrize("before", [1, 2, 4])
def test_growing_memory_is_told_however_many_findings_come_before_it(before: int) -> None:
    """It comes last, because it costs no time until it ends the training."""
    creep = Finding(bottleneck="memory_creep", share_pct=None, why="Net.history keeps graphs", title="MEMORY GROWS")
    others = [dataclasses.replace(WAITS, title=f"OTHER {number}", why=f"why {number}") for number in range(before)]
    told = [line for line in summary.write_lines(SEEN, Plan(), [], [*others, creep]) if line.startswith("  ")]
    assert told[-1] == "  also MEMORY GROWS: Net.history keeps graphs"
    assert len(told) == min(before, summary.EXPLAINED) + 1, "other findings stay in the report"


def test_every_part_has_a_letter_of_its_own() -> None:
    assert set(summary.STYLES) == set(PARTS)
    letters = [style.short[0] for style in summary.STYLES.values()]
    assert len(set(letters)) == len(letters), "two parts share a letter of the bar"


@pytest.mark.parametrize("run", sorted(samples.RUNS))
def test_forty_columns_hold_the_verdict_and_the_bar(run: str) -> None:
    seen, findings, verdicts, plan, name = samples.RUNS[run]()
    lines = summary.write_lines(seen, plan, verdicts, findings, "r.md", name, then=("a",), later=("b",))
    assert len(lines) <= 12 and not any("\n" in line for line in lines)
    if run not in ("empty", "hostile"):
        (bar,) = [line for line in lines if line.startswith("step ")]
        assert bar.rindex("|") < 40 and len(bar[bar.index("|") + 1 : bar.rindex("|")]) == summary.BAR_CELLS
        assert len(lines[0].partition("   ")[0]) <= 40


@pytest.mark.parametrize(
    ("parts", "bar"),
    [
        ({"forward": 1.0}, "ffffffffffffffffffffff"),
        ({"forward": 0.5, "backward": 0.25}, "fffffffffffbbbbbb....."),
        ({"forward": 0.5, "backward": None}, "fffffffffff..........."),
        ({"data_wait": 0.0, "forward": 1.0}, "f" * 22),
        ({"forward": 0.6, "backward": 0.6, "unexplained": -0.2}, "fffffffffffbbbbbbbbbbb"),
        ({"forward": float("nan"), "backward": 1.0}, "b" * 22),
    ],
)
def test_the_bar_is_drawn_from_what_is_known(parts: dict[str, Any], bar: str) -> None:
    seen = dataclasses.replace(SEEN, step_ms={"mean": 1.0}, parts_ms=parts)
    line = next(line for line in summary.write_lines(seen, Plan(), [], []) if line.startswith("step"))
    assert line.startswith(f"step 1.0 ms |{bar}| ")


@pytest.mark.parametrize("step", [{}, {"mean": None}, {"mean": 0.0}, {"mean": float("nan")}])
def test_no_bar_without_a_step(step: dict[str, Any]) -> None:
    lines = summary.write_lines(dataclasses.replace(SEEN, step_ms=step), Plan(), [], [])
    assert lines[1].startswith("step ") and "|" not in lines[1]
    assert "|" in summary.write_lines(SEEN, Plan(), [], [])[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ceiling_gain_pct": 700.0, "ceiling_is_estimate": False}, "at most 9,876 samples/s (8.0x, measured)"),
        ({"ceiling_gain_pct": 3.0, "ceiling_is_estimate": False}, "at most 1,272 samples/s (1.03x, measured)"),
        ({"ceiling_gain_pct": 24.0, "ceiling_is_estimate": False}, "at most 1,531 samples/s (1.24x, measured)"),
        ({"ceiling_gain_pct": 3.0}, "at most 1,272 samples/s (an estimate)"),
        ({"ceiling_gain_pct": None}, None),
        ({"ceiling_gain_pct": float("inf")}, None),
    ],
)
def test_a_ceiling_says_whether_it_was_measured(change: dict[str, Any], said: str | None) -> None:
    finding = dataclasses.replace(WAITS, **change)
    assert summary.describe_ceiling(finding, SEEN) == said
    assert summary.describe_ceiling(finding, dataclasses.replace(SEEN, samples_per_s=None)) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"micro_batch": 8}, "batch 8"),
        ({"micro_batch": 8, "global_batch": 64}, "batch 8 x 4"),
        ({"micro_batch": 8, "global_batch": 16}, "batch 8"),
        ({"micro_batch": 3, "global_batch": 64, "precision": "p"}, "batch 3 p"),
    ],
)
def test_the_setting_is_said_as_far_as_it_is_known(change: dict[str, Any], said: str) -> None:
    assert summary.describe_setting(dataclasses.replace(SEEN, **change)) == said


def test_there_is_no_color() -> None:
    for run in samples.RUNS.values():
        seen, findings, verdicts, plan, name = run()
        assert "\x1b" not in "".join(summary.write_lines(seen, plan, verdicts, findings, "r", name))


def test_no_word_of_a_speed_up() -> None:
    reasons = [Verdict(rung=name, took=took, why="why") for name, _ in Ladder().rungs() for took in (True, False, None)]
    lines = summary.write_lines(SEEN, planned(), reasons, [WAITS], "report.md")
    assert BOAST.findall("\n".join(lines)) == []
    assert BOAST.findall("1.8x as fast; a speed-up of 3; FASTER than; gains 5 %")


ONCE = {"compile": 41.2, "validation_compile": 9.87, "workers": 3.21, "rehearsal": 0.0, "autotune": None, "new": 2.0}


def test_one_time_costs_are_one_line() -> None:
    seen = dataclasses.replace(SEEN, one_time_s=ONCE)
    lines = summary.write_lines(seen, planned(), [], [WAITS])
    assert "ONE-TIME compile 41 s, validation compile 9.9 s, workers 3.2 s, new 2.0 s" in lines
    for nothing in ({}, {"compile": 0.0, "workers": None}):
        quiet = summary.write_lines(dataclasses.replace(SEEN, one_time_s=nothing), planned(), [], [WAITS])
        assert not [line for line in quiet if "ONE-TIME" in line], nothing


@pytest.mark.parametrize(
    ("changed_ms", "after", "once", "said"),
    [
        (
            28.0,
            3417.0,
            ONCE,
            "compile took 41 s; 12 ms less on the rehearsed batch (no verdict):"
            " would pay back after about 3,400 steps; this run has 60",
        ),
        (
            28.0,
            3417.0,
            {},
            "compile: 12 ms less on the rehearsed batch (no verdict):"
            " would pay back after about 3,400 steps; this run has 60",
        ),
        (
            28.0,
            None,
            ONCE,
            "compile took 41 s; 12 ms less on the rehearsed batch (no verdict): pay-back time unknown; this run has"
            " 60 steps",
        ),
        (
            42.5,
            None,
            ONCE,
            "compile took 41 s; 2.5 ms more on the rehearsed batch (no verdict): would not pay back; this run has 60"
            " steps",
        ),
        (
            40.0,
            None,
            ONCE,
            "compile took 41 s; no change on the rehearsed batch (no verdict): would not pay back; this run has 60"
            " steps",
        ),
        (
            28.0,
            7.0,
            ONCE,
            "compile took 41 s; 12 ms less on the rehearsed batch (no verdict):"
            " would pay back after about 7 steps; this run has 60",
        ),
    ],
)
def test_a_rehearsal_says_when_it_would_pay_back(changed_ms: float, after: float, once: Any, said: str) -> None:
    tried = Rehearsed(deviation=1e-3, eager_ms=40.0, changed_ms=changed_ms)
    verdict = Verdict(rung="compile", took=False, why="no", rehearsed=tried, pays_back_after_steps=after)
    lines = summary.write_lines(dataclasses.replace(SEEN, one_time_s=once), planned(), [verdict], [WAITS])
    assert f"PAY-BACK {said}" in lines and not BOAST.findall(said)
    without = [Verdict(rung="amp", took=True, rehearsed=Rehearsed()), Verdict(rung="pin", took=True)]
    assert summary.list_pay_backs(SEEN, without) == []
    free = Verdict(rung="amp", took=True, rehearsed=Rehearsed(eager_ms=40.0, changed_ms=20.0))
    assert summary.list_pay_backs(dataclasses.replace(SEEN, one_time_s=ONCE), [free]) == [], "it costs nothing once"


def test_what_a_rung_saves_is_beyond_those_kept_before_it() -> None:
    tried = [("amp", True, 25.0), ("layout", False, 30.0), ("compile", True, 20.0)]
    verdicts = [
        Verdict(rung=rung, took=took, rehearsed=Rehearsed(eager_ms=40.0, changed_ms=ms, of_batch=True))
        for rung, took, ms in tried
    ]
    verdicts[-1] = dataclasses.replace(verdicts[-1], pays_back_after_steps=8240.0)
    (line,) = summary.list_pay_backs(dataclasses.replace(SEEN, one_time_s=ONCE), verdicts)
    assert line.startswith(
        "compile took 41 s; 5 ms less on the rehearsed batch (no verdict): would pay back after about"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"share_pct": 6.6}, "STARVED BY DATA 7 %"),
        ({"share_pct": None}, "STARVED BY DATA"),
        ({"alarm": "3 ms a batch"}, "STARVED BY DATA: 3 ms a batch"),
        ({"title": "NOTHING TO GAIN: GPU WELL USED"}, "NOTHING TO GAIN: GPU WELL USED"),
    ],
)
def test_the_headline_has_its_share_without_which_it_may_exaggerate(change: dict[str, Any], words: str) -> None:
    lines = summary.write_lines(SEEN, Plan(), [], [dataclasses.replace(WAITS, **change), WAITS])
    assert lines[0].partition("   ")[0] == f"fastloop {words}" and lines[2].startswith("  also STARVED BY DATA: ")


def test_an_alarm_stands_in_the_first_line_and_all_fits() -> None:
    storm = Finding(bottleneck="host_other", why="x", title="KEEPS RECOMPILING", alarm="37 times, 98 s of 122 s")
    slow = Finding(bottleneck="compute_bound", why="y", title="SLOWER WITH COMPILE", alarm="n = 60")
    tried = Rehearsed(eager_ms=4.0, changed_ms=3.0)
    verdicts = [
        Verdict(rung=name, took=took, why="w", rehearsed=tried, pays_back_after_steps=9.0)
        for name, _ in Ladder().rungs()
        for took in (True, False, None)
    ]
    seen = dataclasses.replace(SEEN, one_time_s=ONCE, tflop_per_s=3.0, state=("throttled",))
    lines = summary.write_lines(seen, planned(), verdicts, [storm, slow, WAITS], "report.md")
    assert lines[0].startswith("fastloop KEEPS RECOMPILING: 37 times, 98 s of 122 s; n = 60   ")
    assert len(lines) <= 12 and sum("pay back" in line for line in lines) == 1, "all in one line"
    assert lines[0].partition("   ")[0] == "fastloop KEEPS RECOMPILING: 37 times, 98 s of 122 s; n = 60"


def test_patches() -> None:
    assert dump_on_one_line(None) == "" == dump_on_one_line({})
    patch = {"rungs": {"amp": {"mode": "tf32", "enabled": True}, "pin": {"enabled": False}}}
    assert dump_on_one_line(patch) == 'rungs.amp {mode: "tf32", enabled: true}, rungs.pin {enabled: false}'
    assert dump_on_one_line({"strict": True, "trainer": {"accumulate": 4}}) == "strict: true, trainer.accumulate: 4"
