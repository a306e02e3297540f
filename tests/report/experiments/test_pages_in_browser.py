"""The pages of experiments as people see them: nothing scrolls sideways, no label lies over another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastloop.report.drawing.document import Document
from fastloop.report.drawing.html import to_html
from fastloop.report.experiments import ab_report, climb_report, tune_report
from tests.report import browser
from tests.report.browser import Browser
from tests.report.experiments.test_climb_report import opened as opened_climb
from tests.report.experiments.test_tune_report import opened as opened_tuning
from tests.report.made_experiments import AB, CLIMBS, TUNES, result_of

WIDTHS = (375, 1280)
PAGES: dict[str, Callable[[], Document]] = {
    **{f"ab-{run}": lambda run=run: ab_report.make_document(result_of(AB[run]())) for run in ("six", "huge", "same")},  # type: ignore[misc]
    **{
        f"climb-{run}": lambda run=run: climb_report.make_document(opened_climb(CLIMBS[run]()))
        for run in ("climbed", "long")
    },  # type: ignore[misc]
    **{
        f"tune-{run}": lambda run=run: tune_report.make_document(opened_tuning(TUNES[run]()))
        for run in ("names", "linear")
    },  # type: ignore[misc]
}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return browser.installed(tmp_path_factory.mktemp("chromium"))


@pytest.mark.parametrize("name", sorted(PAGES))
def test_no_page_scrolls_sideways_and_no_label_lies_over_another(chromium: Browser, name: str) -> None:
    looks: list[Any] = chromium.look(to_html(PAGES[name]()), *WIDTHS)
    assert [(seen.view, seen.width) for seen in looks] == [(width, width) for width in WIDTHS]
    assert [seen.overlaps for seen in looks] == ["", ""]
    assert looks[0].height > looks[1].height > 500
