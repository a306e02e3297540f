"""The report of a climb: what it may claim, and the ladder it leaves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastloop.config import loading
from fastloop.records.climb import ClimbFile
from fastloop.records.store import decode
from fastloop.report.drawing.document import strip_unprintable
from fastloop.report.drawing.html import draw_reports
from fastloop.report.experiments import climb_report
from fastloop.report.run.tables import Table
from tests.report.made_experiments import BROKEN, CLAIMLESS, CLIMBS, JAPANESE, climb, rung
from tests.report.run.test_html import Page
from tests.report.samples import HOSTILE


def opened(content: dict[str, Any]) -> ClimbFile:
    """As a report reads it from its file."""
    found = decode(content, ClimbFile)
    assert found is not None
    return found


RATIO = re.compile(r"\d(\.\d+)?x\b")


@pytest.mark.parametrize(
    ("run", "said", "tone"),
    [
        ("climbed", "CONFIRMED FASTER 7.52x", "good"),
        ("screened", "1 RUNG KEPT, NOTHING CONFIRMED", "unknown"),
        ("long", "2 RUNGS KEPT, NOTHING CONFIRMED", "unknown"),
        ("none-kept", "NOTHING TO GAIN", "good"),
        ("unproven", "NOT CONFIRMED: PARITY FAILED", "unknown"),
        ("nothing", "NOT FINISHED", "unknown"),
    ],
)
def test_the_headline(run: str, said: str, tone: str) -> None:
    content = CLIMBS[run]()
    assert climb_report.describe_verdict(opened(content)) == said and climb_report.write_lines(opened(content))[
        0
    ].startswith(f"fastloop {said}")
    assert f'<header class="{tone}">' in draw_reports(climb_report.make_document(opened(content)))["report.html"]


def test_fresh_runs_that_contradict_the_climbs_own_are_told() -> None:
    """Seen on gpt2: of 11.1x, 5.05x were left, since compile was refused in the fresh runs."""
    content = CLIMBS["climbed"]()
    assert not any(line.startswith("NOTE") for line in climb_report.write_lines(opened(content))), "they agree"
    content["confirmed"] |= {"ratio": 3.1, "ci95": [3.0, 3.2], "inactive": {"compile": "there is a compiler"}}
    (note,) = [line for line in climb_report.write_lines(opened(content)) if line.startswith("NOTE")]
    assert "the climb's own runs gave 7.58x, the fresh ones 3.10x" in note
    assert "without effect in the fresh runs: compile (there is a compiler)" in note
    content["confirmed"]["parity"] = BROKEN
    (note,) = [line for line in climb_report.write_lines(opened(content)) if line.startswith("NOTE")]
    assert not RATIO.search(note) and "compile" in note, "another training has no speed-up"


@pytest.mark.parametrize("run", ["screened", "long", "none-kept", "unproven", "nulls"])
def test_without_a_confirmation_there_is_no_ratio_at_all(run: str) -> None:
    content = CLIMBS[run]() | {"hardware": {}}
    ladder = climb_report.write_ladder_yaml(opened(content))
    both = draw_reports(climb_report.make_document(opened(content)))
    text = "\n".join(climb_report.write_lines(opened(content))) + Page(both["report.html"]).said + both["report.md"]
    assert not RATIO.search(text) and not RATIO.search(ladder)
    assert RATIO.search(climb_report.write_ladder_yaml(opened(CLIMBS["climbed"]()))), "the pattern would find one"


def test_the_rates_are_those_of_the_fresh_runs_where_there_are_any() -> None:
    """Seen: rates of single runs of the climb beside the ratio of its fresh runs."""
    content = CLIMBS["climbed"]()
    rate = next(line for line in climb_report.write_lines(opened(content)) if line.startswith("RATE"))
    assert rate == "RATE     naive 345 samples/s (743 ms a step), top 2,612 samples/s (98 ms a step)", "an older file"
    content["confirmed"] |= {"naive_samples_per_s": 320.0, "top_samples_per_s": 2400.0}
    rate = next(line for line in climb_report.write_lines(opened(content)) if line.startswith("RATE"))
    fresh = "naive 320 samples/s (800 ms a step), top 2,400 samples/s (107 ms a step), medians of the fresh runs"
    assert rate == f"RATE     {fresh}"
    assert fresh in " ".join(climb_report.write_ladder_yaml(opened(content)).replace("#", "").split())
    assert any(line == f"Naive{fresh[5:]}." for line in climb_report.make_document(opened(content)).also)


def test_a_confirmation_that_is_not_faster_confirms_nothing() -> None:
    proof = {"ratio": 1.0, "ci95": [0.99, 1.01], "verdict": "no_difference", "runs": 5, "parity": None}
    assert (
        climb_report.describe_verdict(opened(climb([rung("a", 9, 1)], 8.0, confirmed=proof)))
        == "NOT CONFIRMED: NO DIFFERENCE"
    )
    other = {**proof, "ratio": 1.2, "ci95": [1.1, 1.3], "verdict": "faster", "parity": CLAIMLESS}
    said = climb_report.describe_verdict(opened(climb([rung("a", 9, 1)], 8.0, confirmed=other)))
    assert said == "CONFIRMED FASTER 1.20x, NO PARITY CLAIMED"


def test_a_budget_that_ran_out_is_not_nothing_to_gain() -> None:
    assert climb_report.describe_verdict(opened(climb([], 743.0, stopped="the budget is gone"))) == "NOT FINISHED"
    assert (
        climb_report.describe_verdict(opened(climb([], 743.0, stopped="no ceiling is above 3 %"))) == "NOTHING TO GAIN"
    )
    assert climb_report.describe_verdict(opened(climb([], 743.0, partial=True))) == "NOT FINISHED"


def test_nothing_to_gain_has_its_reason_beneath() -> None:
    none = climb([rung("amp", 743, -2, kept=False)], 743.0, stopped="nothing to gain: no ceiling is above 3 %")
    assert climb_report.write_lines(opened(none))[0].startswith("fastloop NOTHING TO GAIN ")
    assert climb_report.write_lines(opened(none))[1] == "WHY      no ceiling is above 3 %"
    assert climb_report.make_document(opened(none)).lede == "no ceiling is above 3 %"


def test_a_faster_rung_that_broke_the_training_is_not_nothing_to_gain() -> None:
    lost = rung("amp", 743, 200, kept=False, parity=BROKEN)
    content = climb([lost, rung("pin", 743, -2, kept=False, parity=BROKEN)], 743.0, stopped="no rung is left")
    assert climb_report.describe_verdict(opened(content)) == "NOTHING KEPT: PARITY FAILED"
    assert climb_report.write_lines(opened(content))[1] == "WHY      Faster, but parity failed: amp"
    assert '<header class="unknown">' in draw_reports(climb_report.make_document(opened(content)))["report.html"]
    slower = climb([rung("pin", 743, -2, kept=False, parity=BROKEN)], 743.0)
    assert climb_report.describe_verdict(opened(slower)) == "NOTHING TO GAIN"


@pytest.mark.parametrize("ended", ["odd", "undecided"])
def test_without_an_answer_it_is_not_nothing_to_gain(ended: str) -> None:
    open_, other = (rung(name, 743, 200, kept=False, **{"try": name}) for name in ("amp", "pin"))
    content = climb([open_ | {"ended": ended}, other | {"ended": "not_faster"}], 743.0)
    assert climb_report.describe_verdict(opened(content)) == "NOTHING KEPT, SOME INCONCLUSIVE"
    assert climb_report.write_lines(opened(content))[1] == "WHY      No clear result for amp"
    assert '<header class="unknown">' in draw_reports(climb_report.make_document(opened(content)))["report.html"]
    answered = climb([open_ | {"ended": ended}, open_ | {"ended": "not_faster"}], 743.0)
    assert climb_report.describe_verdict(opened(answered)) == "NOTHING TO GAIN"


@pytest.mark.parametrize("run", sorted(CLIMBS))
def test_at_most_fourteen_lines_and_every_rung_in_them(run: str) -> None:
    content = CLIMBS[run]()
    lines = climb_report.write_lines(opened(content))
    assert len(lines) <= 14 and not any("\n" in line or line != line.rstrip() for line in lines)
    text = "\n".join(lines)
    for one in content.get("rungs") or ():
        assert strip_unprintable(one["rung"]).strip() in text
    assert ("PARTIAL" in lines[0]) is bool(content.get("partial"))


def test_what_is_unknown_has_no_line() -> None:
    content = opened({"run_dir": "a", "partial": True, "ladders_samples_per_s": {"full": None}})
    assert not [line for line in climb_report.write_lines(content) if "n/a" in line]
    assert not climb_report.make_document(content).also


def test_the_lines_say_predicted_measured_and_why_not() -> None:
    lines = climb_report.write_lines(opened(CLIMBS["climbed"]()))
    assert "KEPT     workers: saved 560 ms (95 % interval 556 to 564, predicted 590)" in lines
    assert "NOT KEPT layout: not faster within the noise" in lines
    assert "STOPPED  no ceiling is above 3 %; 14.1 of 20 min spent" in lines
    ended = climb_report.write_lines(opened(climb([], 743.0, stopped="the budget is gone")))
    assert sum("the budget is gone" in line for line in ended) == 1 and "STOPPED  14.1 of 20 min spent" in ended
    assert "CEILINGS replayed batches 2,697, resident batch 2,720 samples/s" in lines


def test_a_short_time_is_in_seconds() -> None:
    for budget_s, spent_s, says in (
        (40.0, 25.4, "25.4 of 40 s"),
        (120.0, 39.8, "39.8 of 120 s"),
        (300.0, 90, "1.5 of 5 min"),
    ):
        short = climb([], 743.0, stopped="the budget is gone", budget_s=budget_s, spent_s=spent_s)
        assert f"STOPPED  {says} spent" in climb_report.write_lines(opened(short))


@pytest.mark.parametrize("run", sorted(CLIMBS))
def test_both_reports_hold_every_cell_and_the_ladder(run: str) -> None:
    content = CLIMBS[run]()
    both = draw_reports(climb_report.make_document(opened(content)))
    text, page = both["report.md"], Page(both["report.html"])
    plain = " ".join(text.replace("\\", "").split())
    cells = [
        " ".join(strip_unprintable(cell).split())
        for section in climb_report.make_document(opened(content)).sections
        if section.table
        for row in section.table.rows
        for cell in row
    ]
    assert [cell for cell in cells if cell not in page.said or cell.replace("\\", "") not in plain] == []
    assert page.wrong == [] and page.open == [] and "script" not in page.tags
    assert " ".join(climb_report.write_ladder_yaml(opened(content)).split()) in page.said


def ceilings(content: dict[str, Any]) -> Table:
    (table,) = [
        section.table for section in climb_report.make_document(opened(content)).sections if section.title == "Ceilings"
    ]
    assert table is not None
    return table


def test_a_ceiling_that_no_trial_has_measured_says_so() -> None:
    measured = CLIMBS["climbed"]()
    assert ceilings(measured).note.startswith("Each is from a trial with a cost removed. ")
    notes = {"resident": "same as replayed: copies take 1 ms", "resident_top": "same as replayed: copies take 2 ms"}
    content = measured | {"ceilings_notes": notes}
    assert ceilings(content).note.startswith(
        "Each is from a trial with a cost removed; resident batch same as replayed: copies take 1 ms; resident batch of"
        " the top same as replayed: copies take 2 ms. "
    )
    assert any(
        line.endswith("resident batch 2,720 (same as replayed: copies take 1 ms) samples/s")
        for line in climb_report.write_lines(opened(content))
    )
    text = draw_reports(climb_report.make_document(opened(content)))
    assert all("copies take 2 ms" in text[name] for name in ("report.md", "report.html"))


def test_ceilings_and_ways_are_told_by_name() -> None:
    content = CLIMBS["climbed"]() | {"ceilings_top_samples_per_s": {"replayed": 3100.0, "resident": 2900.0}}
    content["rungs"][0]["try"] = "workers-persistent"
    said = "\n".join(climb_report.write_lines(opened(content)))
    assert (
        "CEILINGS replayed batches 2,697, resident batch 2,720; of the top: resident batch 2,900, replayed batches"
        " 3,100 samples/s"
        in said
        and "workers-persistent: saved" in said
    )
    assert "workers-persistent: saved" in climb_report.write_ladder_yaml(opened(content))
    assert "of the top" not in "\n".join(climb_report.write_lines(opened(CLIMBS["climbed"]()))), "where none is known"
    alone = climb_report.write_lines(opened(content | {"ceilings_samples_per_s": {}}))
    assert "CEILINGS of the top: resident batch 2,900, replayed batches 3,100 samples/s" in alone


def test_ceilings_of_both_ends_stand_side_by_side() -> None:
    content = CLIMBS["climbed"]() | {"ceilings_top_samples_per_s": {"resident": 2650.0, "no_exchange": 2640.0}}
    table = ceilings(content)
    assert tuple(table.rows) == (
        ("replayed batches", "2,697.0", "n/a"),
        ("resident batch", "2,720.0", "2,650.0"),
        ("no exchange", "n/a", "2,640.0"),
    )


def loaded(content: dict[str, Any], folder: Path) -> loading.Config:
    path = folder / "ladder.yaml"
    path.write_text(climb_report.write_ladder_yaml(opened(content)), encoding="utf-8")
    return loading.load("resnet50", more=[str(path)])


def test_the_ladder_is_the_stack_and_loads(tmp_path: Path) -> None:
    content = CLIMBS["climbed"]()
    assert yaml.safe_load(climb_report.write_ladder_yaml(opened(content))) == content["stack"]
    ladder = loaded(content, tmp_path).ladder
    assert {name for name, one in ladder.rungs() if one.enabled} == {"workers", "pin", "prefetch", "amp", "batch"}
    assert ladder.workers.count == 8 and ladder.amp.mode == "bf16-mixed"


def test_an_empty_ladder_loads(tmp_path: Path) -> None:
    assert not any(one.enabled for _, one in loaded(CLIMBS["none-kept"](), tmp_path).ladder.rungs())


def test_each_rung_stands_under_its_figures() -> None:
    text = " ".join(climb_report.write_ladder_yaml(opened(CLIMBS["climbed"]())).replace("#", "").split())
    head, workers = text.split("rungs:", 1)
    assert "7.52x (7.31 to 7.74, 95 %, 5 runs of each), parity approximate, passed" in head
    assert "1x NVIDIA H200, torch 2.11.0" in head and "2026-11-03" in head
    assert workers.strip().startswith(
        "workers: saved 560 ms (95 % interval 556 to 564, predicted 590), step 743 to 183 ms; parity exact, passed"
    )
    assert "layout" not in text, "what was rolled back is no part of the ladder"
    stack = {"rungs": {"pin": {"enabled": True}}}
    assert "# enabled from the start\n  pin:" in climb_report.write_ladder_yaml(opened(climb([], 743.0, stack=stack)))


def test_a_ladder_of_several_rungs_is_told_once() -> None:
    patch = {"rungs": {"amp": {"enabled": True}, "fused": {"enabled": True}}}
    whole = rung("amp+fused", 743, 200, patch=patch, **{"try": "ladder-bf16"}, idle={"cache": "no epoch ended"})
    content = opened(climb([whole], 543.0))
    text = climb_report.write_ladder_yaml(content)
    assert text.count("saved 200 ms") == 1 and "# ladder-bf16, as above\n  fused:" in text
    assert "IDLE     cache: no effect here, see report.md" in climb_report.write_lines(content)
    assert "* cache: no epoch ended" in draw_reports(climb_report.make_document(content))["report.md"]


@pytest.mark.parametrize(
    "text",
    [HOSTILE, "a\nrungs: {pin: {enabled: true}}", "x\r  amp: 1", "\x85 y: 1", "\u2028 z: 1", JAPANESE],
    ids=["markup", "newline", "return", "nel", "line", "wide"],
)
def test_no_text_leaves_its_comment(text: str, tmp_path: Path) -> None:
    one = rung("amp", 743, 5, parity={**BROKEN, "class": text, "why": text}, why=text)
    content = climb([one], 738.0, name=text, hardware={"device_name": text}, date=text, stopped=text)
    content["rungs"].append({**one, "rung": text})
    content["rungs"][1]["patch"] = content["rungs"][0]["patch"]
    assert yaml.safe_load(climb_report.write_ladder_yaml(opened(content))) == {"rungs": {"amp": {"enabled": True}}}
    assert loaded(content, tmp_path).ladder.amp.enabled
