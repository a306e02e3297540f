"""The report of a search."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fastloop.records.store import decode
from fastloop.records.tuning import TuningFile
from fastloop.report.drawing.html import draw_reports
from fastloop.report.experiments import tune_report
from tests.report.made_experiments import TUNES, tune
from tests.report.run.test_html import Page


def opened(content: dict[str, Any]) -> TuningFile:
    """As a report reads it from its file."""
    found = decode(content, TuningFile)
    assert found is not None
    return found


@pytest.mark.parametrize("run", sorted(TUNES))
def test_any_content_makes_a_whole_report(run: str) -> None:
    content = TUNES[run]()
    both = draw_reports(tune_report.make_document(opened(content)))
    page, text = Page(both["report.html"]), both["report.md"]
    assert page.wrong == [] and page.open == [] and "script" not in page.tags
    assert not re.search(r"\b(nan|inf)\b", page.said)
    assert page.tags.count("figure") == (run != "nothing") and tune_report.CLOSING in text
    assert not any("\n" in line or line != line.rstrip() for line in tune_report.write_lines(opened(content)))


def test_the_whole_answer() -> None:
    content = tune([(0, 700.0, ""), (2, 402.0, ""), (8, 121.2, ""), (16, None, "killed\nby the system")], 8)
    assert tune_report.write_lines(opened(content | {"as_it_is": 0, "why": "it is the quickest"})) == [
        "fastloop BEST rungs.workers.count = 8   resnet50: tune workers",
        "STEP     0 (unchanged): 700, 2: 402, 8 (best): 121 ms",
        "WHY      it is the quickest",
        "FAILED   16: killed by the system",
        "PATCH    rungs.workers {enabled: true, count: 8}",
        "FILES    fastloop-runs/tune",
    ]


def test_doubts_are_flagged_with_their_values() -> None:
    busy = "CPUs were oversubscribed"
    for times, said in (
        (
            [(0, 700.0, busy), (2, 402.0, "window too short"), (8, 121.2, busy), (16, None, "killed")],
            f"0, 8: {busy}; 2: ",
        ),
        ([(0, 700.0, busy), (2, 402.0, busy)], f"all: {busy}"),
    ):
        found = opened(tune(times, 2))
        (line,) = (each for each in tune_report.write_lines(found) if each.startswith("FLAG"))
        assert line.startswith(f"FLAG     {said}") and tune_report.make_document(found).flags[0].endswith(busy)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (tune([(0, 5.0, ""), (2, 5.0, "")], None), "NOTHING TO GAIN FROM rungs.workers.count"),
        (tune([(0, 5.0, "")], None) | {"as_it_is": 0}, "NOTHING TRIED FOR rungs.workers.count"),
        (tune([(0, 5.0, ""), (2, None, "no")], None) | {"as_it_is": 0}, "NO VALUE RAN FOR rungs.workers.count"),
        (TUNES["all-failed"](), "NO VALUE RAN FOR rungs.workers.count"),
        ({}, "NO VALUE RAN FOR n/a"),
        (tune([(0, 5.0, "")], 0), "BEST rungs.workers.count = 0"),
    ],
    ids=["none", "only the base", "only the base ran", "failed", "empty", "zero"],
)
def test_the_headline(content: dict[str, Any], said: str) -> None:
    assert tune_report.describe_verdict(opened(content)) == said and tune_report.write_lines(opened(content))[
        0
    ].startswith(f"fastloop {said}")


def test_the_patch_is_yaml_to_copy() -> None:
    page = draw_reports(tune_report.make_document(opened(TUNES["workers"]())))["report.html"]
    assert re.search(r'<pre class="copy"[^>]*>rungs:\n  workers:\n    enabled: true\n    count: 8</pre>', page)
    assert "YAML patch" not in draw_reports(tune_report.make_document(opened(TUNES["all-failed"]())))["report.html"]


@pytest.mark.parametrize(
    ("values", "order"),
    [([64, 512, 128], ["64", "128", "512"]), (["b", "a"], ["b", "a"]), ([0.5, 0, 2], ["0", "0.5", "2"])],
    ids=["numbers", "names", "fractions"],
)
def test_the_order_of_values(values: list[Any], order: list[str]) -> None:
    tuning = opened({"points": [{"value": value, "step_ms": 1.0} for value in values]})
    assert [tune_report.name_point(tuning, point) for point in tune_report.list_points(tuning)] == order


def test_the_best_is_marked_and_failures_have_their_causes() -> None:
    (chart,) = tune_report.chart(opened(TUNES["batch"]()))
    rows = {row.name: row for row in chart.rows}
    best, failed = rows["256 (best)"], rows["512"]
    assert (best.value, best.weight, best.bars[0].end) == ("95 ms", "strong", 95.0)
    assert (failed.value, failed.note, failed.bars) == ("failed", "out of memory, rank 0", ())
    assert len({row.bars[0].color for row in chart.rows if row.bars}) == 2
    assert not any(row.bars for row in tune_report.chart(opened(TUNES["all-failed"]()))[0].rows)


def test_a_search_that_was_stopped_has_no_verdict() -> None:
    content = TUNES["workers"]() | {"partial": True, "best": None, "patch": None, "why": "it was stopped"}
    assert tune_report.describe_verdict(opened(content)) == "NOT FINISHED rungs.workers.count"
    assert tune_report.write_lines(opened(content))[0].endswith("PARTIAL: the search did not finish")


def test_no_speed_up_is_claimed() -> None:
    for run in TUNES.values():
        page = Page(draw_reports(tune_report.make_document(opened(run() | {"hardware": {}})))["report.html"])
        assert not re.search(r"\d(\.\d+)?x\b|speed-up of|faster", page.said)
