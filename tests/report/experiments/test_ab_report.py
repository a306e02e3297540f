"""The report of an A/B: what it may say, and that it says all of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import fastloop.report
from fastloop.judge.verdict import _explain_verdict
from fastloop.report.drawing.document import strip_unprintable
from fastloop.report.drawing.html import draw_reports
from fastloop.report.experiments import ab_report
from tests.report.made_experiments import AB, JAPANESE, LONG, judged, result_of
from tests.report.made_experiments import versus as made
from tests.report.run.test_html import Page

RATIO = re.compile(r"\d\.\d+x")


def test_the_whole_answer() -> None:
    content = AB["faster"]()
    content["flags"] = ["a foreign process was there"]
    content["failures"] = [{"arm": "amp", "run": "run-1", "cause": "killed", "last_step": 41, "tail": "x"}]
    assert ab_report.write_lines(result_of(content)) == [
        "fastloop FASTER 1.32x   resnet50: base vs amp",
        "RATE     base 343 samples/s, amp 453 (medians of 5 runs of each; 95 % interval of the ratio 1.29 to 1.35)",
        "PARITY   approximate, passed: ledger equal, gradient 3.1e-3 (limit 0.05), loss +0.1 % (limit 0.5 %)",
        "INACTIVE amp: pin (needs CUDA): no credit",
        "FLAG     a foreign process was there",
        "FAILED   amp, run-1: killed, last step 41",
        "ON       1x NVIDIA H200, torch 2.11.0, lightning 2.6.6, fastloop 0.1.0, driver 580.159.04",
        "FILES    fastloop-runs/resnet50/20261103T101500",
    ]


@pytest.mark.parametrize(
    ("base", "arm", "says"),
    [
        ({}, {"compile_s": 41.2, "planned_steps": 80}, "after about 412 steps; but your run has 80"),
        ({}, {"compile_s": 41.2, "planned_steps": 5_000}, "after about 412 steps; your run has 5,000"),
        ({"compile_s": 21.0}, {"compile_s": 41.0}, "up to 20 s in a run, which pays back after about 200 steps"),
        ({}, {"compile_s": 4.0, "planned_steps": 80}, None),
        ({"step_ms": 50.0}, {"compile_s": 41.2}, None),
        ({"step_ms": None}, {"compile_s": 41.2}, None),
    ],
)
def test_what_a_compile_takes_is_held_against_the_users_own_run(base: Any, arm: Any, says: str | None) -> None:
    """Trials do not count it, and may be longer or shorter than that run."""
    content = AB["faster"]()
    content["arms"][0] |= {"step_ms": 300.0, **base}
    content["arms"][1] |= {"step_ms": 200.0, **arm}
    lines = [line for line in ab_report.write_lines(result_of(content)) if line.startswith("PAY-BACK")]
    assert len(lines) == (says is not None) and all(line.endswith(says or "") for line in lines), lines


@pytest.mark.parametrize(("mde", "said"), [(5254.31, "5,254 %"), (3.14, "3.1 %")])
def test_the_smallest_visible_difference_has_one_format(mde: float, said: str) -> None:
    """Seen: 5,254.3 % beside the verdict's 5254 %."""
    content = AB["faster"]()
    content["comparisons"][0] |= {"verdict": "inconclusive", "mde_pct": mde}
    text = "\n".join(ab_report.write_lines(result_of(content)))
    assert f"smallest visible difference {said}\n" in text
    assert f": 3 runs this noisy can only show differences above {said};" in _explain_verdict("inconclusive", 3, mde, 3)


def test_a_reason_is_given_once() -> None:
    content = AB["faster"]()
    content["arms"][1] |= {"active_rungs": [], "inactive_rungs": ["amp"], "inactive_why": {"amp": "no CUDA"}}
    content["comparisons"][0] |= {"verdict": "inconclusive", "why": "no changed rung took effect: amp (no CUDA)"}
    assert "\n".join(ab_report.write_lines(result_of(content))).count("no CUDA") == 1


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("faster", "FASTER 1.32x"),
        ("parity", "PARITY FAILED"),
        ("base-failed", "FAILED"),
        ("one-run", "INSUFFICIENT"),
        ("nulls", "INSUFFICIENT"),
        ("nothing", "INSUFFICIENT"),
        ("slower", "SLOWER 0.899x"),
        ("same", "NO DIFFERENCE"),
        ("huge", "FASTER 8.12x"),
        ("six", "FASTER 1.05x, PARITY NOT SHOWN"),
    ],
)
def test_the_headline(run: str, said: str) -> None:
    content = AB[run]()
    assert re.split(" {3}|$", ab_report.write_lines(result_of(content))[0])[0] == f"fastloop {said}"
    assert (
        f"<h1>{said[:1]}{said[1:].lower()}</h1>"
        in draw_reports(ab_report.make_document(result_of(content)))["report.html"]
    )


@pytest.mark.parametrize("run", sorted(AB))
def test_at_most_fourteen_lines_and_every_failure_in_them(run: str) -> None:
    content = AB[run]()
    lines = ab_report.write_lines(result_of(content))
    assert 2 < len(lines) <= 14 and not any("\n" in line or line != line.rstrip() for line in lines)
    for failure in content.get("failures") or ():
        assert any(f"{failure['arm']}, {failure['run']}: {failure['cause']}" in line for line in lines)
    assert ("PARTIAL" in lines[0]) is bool(content.get("partial"))


@pytest.mark.parametrize("run", ["parity", "one-run", "same", "base-failed"])
def test_no_ratio_is_claimed_where_none_is_shown(run: str) -> None:
    content = AB[run]()
    (header,) = re.findall(
        r"<header.*?</header>", draw_reports(ab_report.make_document(result_of(content)))["report.html"], flags=re.S
    )
    assert not any(RATIO.search(line) for line in ab_report.write_lines(result_of(content))) and not RATIO.search(
        header
    )
    assert RATIO.search(ab_report.write_lines(result_of(AB["faster"]()))[0]), "the pattern would find one"


def test_of_several_arms_the_best_stands_first_and_each_has_a_line() -> None:
    content = AB["six"]()
    order = [one.arm for one, _ in ab_report.rank_arms(result_of(content))]
    assert order[:2] == [LONG, JAPANESE] and order[3:] == ["layout", "amp", "broken"]
    text = "\n".join(ab_report.write_lines(result_of(content)))
    assert "NO DIFFERENCE   \u5c4e" in text and "SLOWER 0.90x   layout (0.88 to 0.92, 95 %, parity passed)" in text
    assert "PARITY FAILED   amp: approximate, FAILED: ledger equal, gradient 0.75 (limit 0.05) FAILED" in text
    assert "FAILED   broken: out of memory" in text
    first = text.splitlines()[0]
    assert "   PARITY FAILED: amp   PARTIAL" in first, "exit code 3 is explained where people look"
    assert "PARITY" not in ab_report.write_lines(result_of(AB["faster"]()))[0]


def test_a_shown_parity_goes_before_a_larger_ratio_without_one() -> None:
    arms = {"base": 1.0, "bold": 2.0, "sure": 1.5}
    parity = {"class": "approximate", "passed": None, "why": "not tested", "gates": []}
    content = made(arms, [judged("bold", 2.0, parity=parity), judged("sure", 1.5)])
    assert ab_report.describe_verdict(result_of(content)) == "FASTER 1.50x"


def test_unequal_numbers_of_runs_are_said() -> None:
    content = AB["faster"]()
    content["arms"][1]["samples_per_s"].pop()
    assert "(medians of 5 and 4 runs; 95 % interval" in ab_report.write_lines(result_of(content))[1]
    assert "(1 run of each; no interval)" in ab_report.write_lines(result_of(AB["one-run"]()))[1]


def test_medians_that_point_the_other_way_are_explained() -> None:
    def rate(ratio: float, arm: float, **more: Any) -> str:
        return ab_report.write_lines(result_of(made({"base": 344.0, "b": arm}, [judged("b", ratio, **more)])))[1]

    said = "the medians point the other way because only the ratio corrects for the order of the runs"
    assert said in rate(1.32, 300.0) and said in rate(0.8, 400.0)
    assert said not in rate(1.32, 400.0) and said not in rate(0.8, 300.0)
    assert said not in rate(1.01, 300.0, half=0.2), "no ratio is claimed"


def test_arms_that_are_judged_together_say_so() -> None:
    def told(alpha: float, arms: int = 3) -> tuple[str, str]:
        names = [f"arm{number}" for number in range(arms)]
        content = made({"base": 1.0, **dict.fromkeys(names, 1.3)}, [judged(name, 1.3, alpha=alpha) for name in names])
        return "\n".join(ab_report.write_lines(result_of(content))), draw_reports(
            ab_report.make_document(result_of(content))
        )["report.md"]

    said = "with 3 arms, each interval is at 98.33 %, so that all hold together with 95 % confidence"
    lines, report = told(0.05 / 3)
    assert f"ARMS     {said}" in lines and f"{said}." in report.replace("\\", "")
    assert "each interval is at 99.58 %" in told(0.05 / 12)[0], "with looks"
    assert "together" not in told(0.05)[0], "an older file: each for itself"
    assert "together" not in told(0.05, arms=1)[0]


@pytest.mark.parametrize("run", sorted(AB))
def test_both_reports_hold_every_cell(run: str) -> None:
    content = AB[run]()
    text, page = (
        draw_reports(ab_report.make_document(result_of(content)))["report.md"],
        Page(draw_reports(ab_report.make_document(result_of(content)))["report.html"]),
    )
    plain = " ".join(text.replace("\\", "").split())
    document = ab_report.make_document(result_of(content))
    rows = [row for section in document.sections if section.table for row in section.table.rows]
    cells = [" ".join(strip_unprintable(cell).split()) for row in rows for cell in row]
    assert [cell for cell in cells if cell not in page.said] == [] and page.wrong == [] and page.open == []
    assert [cell for cell in cells if cell.replace("\\", "") not in plain] == []
    titles = {section.title for section in document.sections}
    assert {
        "Arms",
        "Against the base",
        "Parity",
        "Configuration that differs",
        "Every run, in order",
        "How to read and repeat this",
        "Where it ran",
    } <= titles


def test_the_page_is_offline_and_hostile_names_stay_text() -> None:
    text = draw_reports(ab_report.make_document(result_of(AB["six"]())))["report.html"]
    page = Page(text)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags) and "<script>alert('x')" in page.said
    assert set(re.findall(r"\w{1,20}://[^\s\"'<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) and len(text) < 150_000


def test_failures_have_their_stderr_and_unknowns_are_na() -> None:
    said = Page(draw_reports(ab_report.make_document(result_of(AB["six"]())))["report.html"]).said
    assert "Failed: broken" in said and "Traceback <script>" in said and "torch.OutOfMemoryError" in said
    assert (
        "n/a: no run finished."
        in Page(draw_reports(ab_report.make_document(result_of(AB["base-failed"]())))["report.html"]).said
    )
    row = next(row for row in ab_report._tabulate_arms(result_of(AB["six"]())).rows if row[0] == "broken")
    assert row == ("broken", "n/a", "n/a", "n/a", "n/a", "0", "none", "none", "out of memory")


def test_how_it_was_done_is_said() -> None:
    content = AB["faster"]()
    text = draw_reports(ab_report.make_document(result_of(content)))["report.md"]
    assert "300 steps a run, 101 of them before the window." in text
    text = draw_reports(ab_report.make_document(result_of(content | {"ended_at": 282})))["report.md"]
    assert "282 steps a run (300 requested), 101 of them before the window." in text.replace("\\", "")
    assert "four times out of five" in text and "rungs.amp.enabled" in text


def test_reports_know_no_torch_and_no_commands() -> None:
    folder = Path(fastloop.report.__file__).parent
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert "fastloop.report.run" in imported
    assert [name for name in imported if name.startswith(("torch", "lightning", "fastloop.commands"))] == []
