"""The report of a search."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fastloop.records.store import decode
from fastloop.records.tuning import TuningFile
from fastloop.report.experiments import tune_report
from tests.report.made_experiments import TUNES, tune
from tests.report.run.test_figures import texts
from tests.report.run.test_html import Page


def opened(content: dict[str, Any]) -> TuningFile:
    """As a report reads it from its file."""
    found = decode(content, TuningFile)
    assert found is not None
    return found


@pytest.mark.parametrize("run", sorted(TUNES))
def test_any_content_makes_a_whole_report(run: str) -> None:
    content = TUNES[run]()
    both = tune_report.reports(opened(content))
    page, text = Page(both["report.html"]), both["report.md"]
    assert page.wrong == [] and page.open == [] and "script" not in page.tags
    assert "could not be drawn" not in page.said and not re.search(r"\b(nan|inf)\b", page.said)
    assert page.tags.count("svg") == (0 if run == "nothing" else 2) and tune_report.CLOSING in text
    assert not any("\n" in line or line != line.rstrip() for line in tune_report.lines(opened(content)))


def test_the_whole_answer() -> None:
    content = tune([(0, 700.0, ""), (2, 402.0, ""), (8, 121.2, ""), (16, None, "killed\nby the system")], 8)
    assert tune_report.lines(opened(content | {"as_it_is": 0, "why": "it is the quickest"})) == [
        "fastloop BEST rungs.workers.count = 8   resnet50: tune workers",
        "STEP     0 (as it is): 700, 2: 402, 8 (best): 121 ms",
        "WHY      it is the quickest",
        "FAILED   16: killed by the system",
        "PATCH    rungs.workers {enabled: true, count: 8}",
        "FILES    fastloop-runs/tune",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (tune([(0, 5.0, ""), (2, 5.0, "")], None), "NOTHING TO GAIN FROM rungs.workers.count"),
        (TUNES["all-failed"](), "NO VALUE RAN OF rungs.workers.count"),
        ({}, "NO VALUE RAN OF n/a"),
        (tune([(0, 5.0, "")], 0), "BEST rungs.workers.count = 0"),
    ],
    ids=["none", "failed", "empty", "zero"],
)
def test_the_headline(content: dict[str, Any], said: str) -> None:
    assert tune_report.verdict(opened(content)) == said and tune_report.lines(opened(content))[0].startswith(
        f"fastloop {said}"
    )


def test_the_patch_is_yaml_to_copy() -> None:
    page = tune_report.reports(opened(TUNES["workers"]()))["report.html"]
    assert re.search(r'<pre class="copy"[^>]*>rungs:\n  workers:\n    enabled: true\n    count: 8</pre>', page)
    assert "YAML patch" not in tune_report.reports(opened(TUNES["all-failed"]()))["report.html"]


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ([1, 2, 4, 8], [0, 1, 2, 3]),
        ([0, 1, 2, 4], [-1, 0, 1, 2]),
        ([64, 512, 128], [6, 7, 9]),
        ([1, 2, 3], [1, 2, 3]),
        ([-1, 1, 2], [-1, 1, 2]),
        (["b", "a"], [0, 1]),
        ([1, None, 4], [0, 1, 2]),
        ([5], [5]),
    ],
    ids=["doubling", "zero", "unsorted", "linear", "negative", "names", "unknown", "one"],
)
def test_where_values_stand(values: list[Any], places: list[float]) -> None:
    points = tune_report.make_marks(opened({"points": [{"value": value, "step_ms": 1.0} for value in values]}))
    assert [point.at for point in points] == pytest.approx(places)


def test_the_best_is_marked_and_failures_are_crosses_with_causes() -> None:
    content = TUNES["batch"]()
    wide, narrow = (picture.markup for picture in tune_report.make_document(opened(content)).pictures)
    assert "best: 256, 95 ms" in texts(wide) and "x 512: out of memory, rank 0" in texts(wide)
    assert "x 512: out of memory, rank 0" in texts(narrow) and wide.count("#2a9d74") > 0
    assert len(re.findall(r"<use [^>]*stroke: #d9480f", wide)) == 2
    failed = tune_report.make_document(opened(TUNES["all-failed"]())).pictures[0].markup
    assert "#2a9d74" not in failed and len(re.findall(r"<use [^>]*stroke: #d9480f", failed)) == 2


def test_values_that_stand_too_close_are_not_all_named() -> None:
    wide, narrow = (texts(picture.markup) for picture in tune_report.make_document(opened(TUNES["linear"]())).pictures)
    assert "1" in narrow and "32" in narrow and len(narrow) < len(wide) - 10


def test_a_search_that_was_stopped_has_no_verdict() -> None:
    content = TUNES["workers"]() | {"partial": True, "best": None, "patch": None, "why": "it was stopped"}
    assert tune_report.verdict(opened(content)) == "NOT FINISHED rungs.workers.count"
    assert tune_report.lines(opened(content))[0].endswith("PARTIAL: the search did not end")


def test_no_speed_up_is_claimed() -> None:
    for run in TUNES.values():
        page = Page(tune_report.reports(opened(run() | {"hardware": {}}))["report.html"])
        assert not re.search(r"\d(\.\d+)?x\b|speed-up of|faster", page.said)
