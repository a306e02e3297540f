"""report.html as a parser sees it: whole, offline, escaped, with every number in it."""

from __future__ import annotations

import dataclasses
import functools
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import pytest

from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Plan, Verdict
from fastloop.records.run_files import Environment
from fastloop.report.drawing.html import to_html
from fastloop.report.run import figures, optional_tables, summary, tables
from fastloop.report.run.run_report import CLOSING, build_document
from tests.report.run.test_summary import BOAST
from tests.report.samples import CHANGED, ENVIRONMENT_RECORD, HOSTILE, RUNS

VOID = {"meta", "br", "img", "hr", "input", "link"}
LEFT_OUT = "* `rungs.pin`: Put <batches>. Try it with `--config pin`."


@functools.cache
def made(run: str, **more: Any) -> str:
    """The page of a sample run."""
    seen, findings, verdicts, plan, name = RUNS[run]()
    return page_of(
        seen,
        plan,
        verdicts,
        findings,
        changed_yaml=CHANGED,
        environment=ENVIRONMENT_RECORD,
        name=name,
        left_out=LEFT_OUT,
        **more,
    )


def page_of(*records: Any, **more: Any) -> str:
    """The page of these records."""
    return to_html(build_document(*records, **more))


class Page(HTMLParser):
    """Elements, attributes and visible text of a page; complains of tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.texts).split())


def ids(page: Page) -> list[str]:
    return [value for _, name, value in page.attributes if name == "id" and value]


@pytest.mark.parametrize("run", sorted(RUNS))
def test_it_is_well_formed(run: str) -> None:
    page = Page(made(run))
    assert page.wrong == [] and page.open == []
    assert page.tags.count("h1") == 1 and page.tags.count("main") == 1 and page.tags[:2] == ["html", "head"]
    assert len(ids(page)) == len(set(ids(page))), "two figures share an id"
    assert ("html", "lang", "en") in page.attributes
    viewport = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
    assert "width=device-width, initial-scale=1" in viewport


def test_the_parser_would_complain() -> None:
    assert Page("<p><b>x</p></b>").wrong and Page("<div>").open == ["div"]


@pytest.mark.parametrize("run", sorted(RUNS))
def test_pictures_are_xml_with_a_description(run: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", made(run), flags=re.S)
    assert len(pictures) == {"empty": 0, "cpu": 1, "hostile": 2}.get(run, 3)
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img" and (root.get("aria-label") or "").endswith(".")
    page = Page(made(run))
    figures = [
        (name, value) for tag, name, value in page.attributes if tag == "figure" and name in ("role", "aria-label")
    ]
    assert page.tags.count("figure") == {"empty": 0, "gpt2": 2, "hostile": 3, "straggler": 2, "died": 2}.get(run, 1)
    assert figures.count(("role", "img")) == len(figures) / 2 == page.tags.count("figure")
    assert all(value and value.endswith(".") for name, value in figures if name == "aria-label")


@pytest.mark.parametrize("run", sorted(RUNS))
def test_it_loads_nothing_and_runs_nothing(run: str) -> None:
    text = made(run)
    page = Page(text)
    assert not {"script", "link", "iframe", "img", "object", "embed", "base", "form"} & set(page.tags)
    assert [name for _, name, _ in page.attributes if name.startswith("on")] == []
    links = [value or "" for _, name, value in page.attributes if name in ("href", "xlink:href", "src", "action")]
    assert [link for link in links if not link.startswith("#")] == []
    sheet = re.search(r"<style>(.*?)</style>", text, flags=re.S)
    assert sheet and "@import" not in sheet[1] and "url(" not in sheet[1]
    addresses = set(re.findall(r"\w{1,20}://[^\s\"'<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "names of namespaces only"
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {f"#{name}" for name in ids(page)}


@pytest.mark.parametrize("run", ["resnet50", "gpt2", "tuned", "straggler", "cpu", "partial", "empty"])
def test_every_number_of_the_tables_is_in_it(run: str) -> None:
    seen, findings, verdicts, _, _ = RUNS[run]()
    said = Page(made(run)).said
    shown = [
        tables.tabulate_step(seen),
        tables.tabulate_parts(seen),
        tables.tabulate_rungs(verdicts),
        *optional_tables.tabulate_all(seen),
        tables.tabulate_environment(ENVIRONMENT_RECORD),
    ]
    cells = [" ".join(cell.split()) for table in shown for row in table.rows for cell in row]
    assert len(cells) > 60 and [cell for cell in cells if cell not in said] == []
    assert [finding.why for finding in findings if finding.why[1:] not in said] == []
    for table in shown:
        assert not table.note or table.note in said


def test_a_person_reads_the_cause_first() -> None:
    page = Page(made("resnet50"))
    text = page.said
    order = [
        "Starved by data",
        "Python was decoding JPEGs",
        "at most 2,697 samples/s (8.3x, measured)",
        "Where the step goes",
        "waiting for data 86 %",
        "waiting for data 170 ms",
        "Findings",
        "rungs: workers: enabled: true",
        "The parts of the step",
        "14.400",
        "Where it ran",
        "Left out",
    ]
    places = [text.find(words) for words in order]
    assert -1 not in places and places == sorted(places)
    assert "resnet50 batch 64 x 4 32-true" in text and "Put <batches>." in text


def test_findings_carry_yaml_to_copy() -> None:
    assert re.search(
        r"<pre class=\"copy\"[^>]*>rungs:\n  amp:\n    enabled: true\n    mode: bf16-mixed</pre>", made("gpt2")
    )
    said = Page(made("gpt2")).said
    assert "Also busy, not fast: memory-bound >= " not in said and "Also busy, not fast: memory-bound" in said


@pytest.mark.parametrize("run", ["resnet50", "gpt2", "straggler", "cpu", "tuned"])
def test_nothing_is_said_twice(run: str) -> None:
    """The head says the first finding's reason and ceiling, the cards those of the others."""
    seen, findings, *_ = RUNS[run]()
    said = Page(made(run)).said
    assert [said.count(finding.why[1:]) for finding in findings] == [1] * len(findings)
    assert [
        said.count(summary.describe_ceiling(finding, seen)) for finding in findings[1:] if finding.ceiling_gain_pct
    ] == [1] * (run == "straggler")
    assert said.count("If it were gone") == (run == "straggler") and "none of the step" not in said


def test_where_there_is_nothing_to_gain_there_is_no_list_of_findings() -> None:
    said = Page(made("tuned")).said
    assert "Nothing to gain" in said and " Findings " not in said and ">none<" not in made("tuned")
    assert " Findings " in Page(made("cpu")).said


def test_titles_next_steps_and_details_are_shown() -> None:
    finding = Finding(
        bottleneck="compute_bound",
        share_pct=90.0,
        why="x",
        detail=("gemm takes 70 %", "hot"),
        title="NOTHING TO GAIN: GPU WELL USED",
    )
    seen = RUNS["resnet50"]().seen
    text = page_of(
        seen,
        Plan(),
        (),
        [finding],
        changed_yaml="",
        environment=Environment(),
        then=("prefetch", "cache"),
        later=("amp",),
    )
    said = Page(text).said
    assert "Nothing to gain: GPU well used" in said and "gemm takes 70 %" in said
    assert "Then: prefetch, cache" in said and "Later: amp" in said and '<header class="good">' in text


@pytest.mark.parametrize(
    ("run", "tone"), [("resnet50", "bad"), ("tuned", "good"), ("empty", "unknown"), ("partial", "bad")]
)
def test_the_tone(run: str, tone: str) -> None:
    assert f'<header class="{tone}">' in made(run)


def test_partial_and_short_are_flagged() -> None:
    assert '<span class="flag">PARTIAL: the fit did not end normally</span>' in made("partial")
    assert '<span class="flag">window too short: 6 steps</span>' in made("partial")
    assert 'class="flag"' not in made("resnet50")
    ends = "(rank 0: RuntimeError, rank 1: ValueError)"
    assert f'<span class="flag">PARTIAL: the fit did not end normally {ends}</span>' in made("died")


def test_an_empty_run_says_so() -> None:
    said = Page(made("empty")).said
    assert "Not measured" in said and "n/a: no step was measured." in said and "Nothing was watched." in said
    assert "nan" not in said.lower().replace("scanning", "") and " 0.0 ms" not in said


def test_hostile_names_stay_text() -> None:
    text = made("hostile")
    page = Page(text)
    assert "script" not in page.tags and page.tags.count("style") == 1 and page.tags.count("title") == 1
    assert page.said.count("<script>alert('x')</script>") > 10 and "{{ 7 * 7 }}" in page.said and "49" not in page.said
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", text)
    assert "Infinity" not in text and not re.search(r"\b(nan|inf)\b", page.said)
    assert HOSTILE.strip(" \x00\x01").startswith("</title>")


@pytest.mark.parametrize("run", sorted(RUNS))
def test_it_is_small(run: str) -> None:
    assert len(made(run).encode()) < 300_000


def test_ten_thousand_losses_stay_small() -> None:
    seen = Measurement(
        steps=9000,
        total_steps=10_000,
        loss=tuple(1 / (1 + step % 97) for step in range(10_000)),
        timeline=tuple(
            {"t_s": float(second), "sm_active_pct": second * 7.7 % 100, "watts": 300.0} for second in range(600)
        ),
    )
    text = page_of(seen, Plan(), (), (), changed_yaml="", environment=Environment())
    assert "<svg" in text and len(text.encode()) < 150_000


def test_no_word_of_a_speed_up_but_that_there_is_none() -> None:
    seen, findings, _, plan, name = RUNS["straggler"]()
    verdicts = [Verdict(rung="amp", took=True, why="why")]
    text = page_of(seen, plan, verdicts, findings, changed_yaml="", environment=Environment(), name=name)
    assert BOAST.findall(Page(text).said.replace(CLOSING, "")) == []
    assert CLOSING in text


def test_the_sheet_knows_phones_dark_rooms_and_paper() -> None:
    text = made("cpu")
    assert "@media (prefers-color-scheme: dark)" in text and "@media print" in text
    assert "@media (max-width: 40rem)" in text and "color-scheme: light dark" in text
    assert text.count("currentColor") >= 3


def test_tables_have_headers() -> None:
    page = Page(made("gpt2"))
    scopes = [value for tag, name, value in page.attributes if tag == "th" and name == "scope"]
    assert page.tags.count("th") == len(scopes) and set(scopes) == {"col", "row"}
    assert page.tags.count("table") == page.tags.count("thead") > 8


@pytest.mark.parametrize(
    ("title", "tone"),
    [
        ("SINGLE PAUSES", "unknown"),
        ("NO BOTTLENECK FOUND", "unknown"),
        ("NO SINGLE BOTTLENECK", "unknown"),
        ("NOTHING TO GAIN", "good"),
    ],
)
def test_a_bottleneck_that_was_not_found_is_no_good_news(title: str, tone: str) -> None:
    finding = Finding(bottleneck="none", share_pct=None, why="", title=title)
    text = page_of(Measurement(), Plan(), (), [finding], changed_yaml="", environment=Environment())
    assert f'<header class="{tone}">' in text


def test_a_picture_that_cannot_be_drawn_is_the_only_one_missing() -> None:
    seen, findings, verdicts, plan, _ = RUNS["gpt2"]()
    too_large = dataclasses.replace(seen, loss=(1e308, -1e308, 0.0))
    whole, lacking = (
        page_of(each, plan, verdicts, findings, changed_yaml="", environment=ENVIRONMENT_RECORD)
        for each in (seen, too_large)
    )
    assert whole.count("<svg") == lacking.count("<svg") + 1 and "This picture could not be drawn" not in whole
    assert lacking.count('<p class="soft">This picture could not be drawn: ') == 1


def test_a_picture_of_numbers_that_are_none_is_the_only_one_missing() -> None:
    seen = RUNS["gpt2"]().seen
    wrong = dataclasses.replace(seen, loss=("a", "b", "c"))  # type: ignore[arg-type]
    assert "could not be drawn: TypeError" in str(figures.draw(wrong)["loss"])
    assert set(figures.draw(wrong)) == set(figures.draw(seen))
