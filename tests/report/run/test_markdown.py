"""report.md as a reader of Markdown sees it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from fastloop.ladder import Ladder
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Finding, Plan, Step, Verdict
from fastloop.records.run_files import Environment
from fastloop.records.store import decode
from fastloop.report.drawing.markdown import to_markdown
from fastloop.report.run import optional_tables
from fastloop.report.run.run_report import CLOSING, build_document
from tests.report import samples
from tests.report.run.test_summary import BOAST, SEEN, WAITS, planned

MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt
NASTY = "a|b \\| c\n| --- |\r\n<lambda> <b>x</b> `code` **bold** __init__ num_workers ~~gone~~ *x*"
"""Everything that could end a cell or a table, or be taken for markup."""
ENVIRONMENT = {
    "versions": {"python": "3.11", "torch": "2.11"},
    "commit": "abc",
    "dirty": True,
    "hardware": {"usable_cpus": 2, "gpus": [{"name": "NVIDIA H200"}, {"name": None}]},
    "torch_flags": {"float32_matmul_precision": "high"},
}


def made(
    seen: Measurement = SEEN,
    plan: Plan | None = None,
    verdicts: Any = (),
    findings: Any = (WAITS,),
    note: str = "",
    **more: Any,
) -> str:
    more = {"changed_yaml": "run: {max_steps: 3}\n", "environment": ENVIRONMENT, **more}
    more["environment"] = decode(more["environment"], Environment)
    return to_markdown(build_document(seen, plan or Plan(), verdicts, findings, **more), note)


def sections(text: str) -> dict[str, str]:
    return dict(re.findall(r"^## (.*?)\n\n(.*?)(?=\n## |\Z)", text, flags=re.M | re.S))


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table as they are shown, by a renderer of GitHub's tables."""
    found: list[list[list[str]]] = []
    tokens = MarkdownIt("commonmark").enable("table").enable("strikethrough").parse(text)
    for number, token in enumerate(tokens):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open"):
            cell = tokens[number + 1]
            found[-1][-1].append("".join(child.content for child in cell.children or ()))
    return found


def markup(text: str) -> set[str]:
    """Kinds of inline markup in the tables."""
    tokens = MarkdownIt("commonmark").enable("table").enable("strikethrough").parse(text)
    return {child.type for token in tokens if token.children for child in token.children} - {"text", "softbreak"}


def test_every_table_has_as_many_cells_in_each_row_as_in_its_head() -> None:
    verdicts = [
        Verdict(rung="amp", took=True, why=NASTY),
        Verdict(rung="pin", took=False, why="x"),
        Verdict(rung="batch", took=None, why=""),
    ]
    findings = [dataclasses.replace(WAITS, why=NASTY), Finding(bottleneck="none", share_pct=None, why="x")]
    text = made(plan=planned("amp"), verdicts=verdicts, findings=findings)
    found = tables(text)
    assert [(len(table), len(table[0])) for table in found] == [(16, 2), (14, 4), (4, 4), (7, 2)]
    assert [row for table in found for row in table if len(row) != len(table[0])] == []
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith(" |")


def test_reasons_are_shown_as_they_were_written() -> None:
    text = made(plan=planned("amp"), verdicts=[Verdict(rung="amp", took=True, why=NASTY)])
    table = tables(text)[2]
    assert table[1] == ["amp", "yes", " ".join(NASTY.split()), "exact"]
    assert markup(sections(text)["Rungs"]) == set()
    assert "num_workers" in text, "an underscore inside a word needs no escape and is easier to read without"


def test_notes_are_shown_as_they_were_written() -> None:
    steps = (
        Step(rung="pin", status="skipped", change=Change(notes=("not planned",))),
        Step(rung="amp", status="planned", change=Change(notes=(NASTY,))),
    )
    text = sections(made(plan=Plan(steps=steps), verdicts=[Verdict(rung="amp", took=True, why="x")]))["Rungs"]
    assert text.splitlines()[-1].startswith("* `amp`: a")
    assert markup(text) == {"code_inline"} and "not planned" not in text
    assert "Parity class of the plan: exact." in text


def test_the_renderer_would_show_what_is_not_escaped() -> None:
    assert tables("| a | b |\n| --- | --- |\n| x|y | z |\n") != tables("| a | b |\n| --- | --- |\n| x\\|y | z |\n")
    assert markup("__init__ <b>") == {"strong_open", "strong_close", "html_inline"}


def test_a_fence_outlives_the_fences_inside() -> None:
    text = made(changed_yaml="recipe: |\n  ```\n  ````\n")
    blocks = [token for token in MarkdownIt().parse(text) if token.type == "fence"]
    assert [block.info for block in blocks] == ["", "yaml", "yaml"]
    assert blocks[2].content == "recipe: |\n  ```\n  ````\n" and "STARVED" in blocks[0].content


def test_what_was_not_measured_is_na_and_never_0() -> None:
    text = made(Measurement(total_steps=3, warmup_steps=20), findings=())
    values = dict(tables(text)[0][1:])
    assert values == {
        "steps in the window": "0 of 3, too short to be reliable",
        "ended": "normally",
        "step time, mean": "n/a",
        "median (p10 to p90)": "n/a (n/a to n/a)",
        "of that, waiting for data": "n/a",
        "watching cost": "n/a",
        "samples per second, all ranks": "n/a",
        "samples per step, all ranks": "n/a",
        "peak device memory": "n/a",
        "host runs ahead of the device by": "n/a",
        "device work still queued when the host has issued a step": "n/a",
        "host blocked in forward, backward, optimizer": "n/a",
        "samples per loader batch, one rank": "n/a",
        "precision": "n/a",
        "devices": "1x cpu",
    }
    assert sections(text)["Loss"].strip() == "n/a"
    assert "Nothing was watched." in text and "Findings" not in sections(text)
    assert "None is switched on." in sections(text)["Rungs"]


def test_what_was_measured() -> None:
    values = dict(tables(made(dataclasses.replace(SEEN, global_batch=1024, peak_gib=1.5)))[0][1:])
    assert values["step time, mean"] == "10.040 ms" and values["median (p10 to p90)"] == "10.000 ms (9.000 to 12.000)"
    assert values["samples per step, all ranks"] == "1,024" and values["peak device memory"] == "1.50 GiB"
    assert values["steps in the window"] == "40 of 60" and values["watching cost"] == "3.4 us a step"
    second = dataclasses.replace(WAITS, bottleneck="h2d", title="SLOW COPIES")
    found = sections(made(findings=(WAITS, second)))["Findings"]
    assert "(82.0 % of the step) `data_wait`" in found
    assert "rungs:\n  workers:\n    enabled: true\n    count: 3" in found
    assert "If it were gone: at most 6,173 samples/s (an estimate)" in found.partition("h2d")[2]


def test_partial_is_said_twice() -> None:
    text = made(dataclasses.replace(SEEN, partial=True))
    assert "PARTIAL: the fit did not end normally" in text.split("## ")[0]
    assert dict(tables(text)[0][1:])["ended"].startswith("early")


def test_losses() -> None:
    rising = dataclasses.replace(SEEN, loss=tuple(float(number) for number in range(10)))
    assert "first fifth 0.5000, of the last fifth 8.5000 (10 points" in sections(made(rising))["Loss"]
    diverged = dataclasses.replace(SEEN, loss=(1.0, 1.0, float("nan"), float("inf"), float("nan")))
    assert "last fifth n/a" in sections(made(diverged))["Loss"]
    assert "3 of them are not finite numbers." in sections(made(diverged))["Loss"]


def test_where_it_ran() -> None:
    values = dict(tables(made())[-1][1:])
    assert values == {
        "GPUs": "NVIDIA H200, n/a",
        "CPUs usable": "2",
        "commit": "abc, with changes",
        "python": "3.11",
        "torch": "2.11",
        "float32 matrix products": "high",
    }
    empty = {"hardware": None, "versions": None, "commit": None, "torch_flags": None, "dirty": None}
    values = dict(tables(made(environment=empty))[-1][1:])
    assert values == {"GPUs": "none", "CPUs usable": "n/a", "commit": "n/a", "float32 matrix products": "n/a"}


@pytest.mark.parametrize("run", sorted(samples.RUNS))
def test_every_sample_is_drawn_whole(run: str) -> None:
    seen, findings, verdicts, plan, name = samples.RUNS[run]()
    text = made(seen, plan, verdicts, findings, name=name, environment=samples.ENVIRONMENT, note="a *note*")
    found = tables(text)
    assert [row for table in found for row in table if len(row) != len(table[0])] == []
    assert found and markup(text) <= {"code_inline", "strong_open", "strong_close"} and "a \\*note\\*" in text
    titles = [table.title for table in optional_tables.tabulate_all(seen)]
    assert [title for title in titles if f"\n## {title}\n" not in text] == []
    shown = {cell for table in found for row in table for cell in row}
    wanted = {
        " ".join(cell.split()) for table in optional_tables.tabulate_all(seen) for row in table.rows for cell in row
    }
    assert run == "hostile" or wanted <= shown, wanted - shown


def test_details_stand_below_the_findings() -> None:
    text = made(
        findings=[dataclasses.replace(WAITS, detail=("train.py:8 Tensor.item()", "hot", "<b>"))],
        seen=dataclasses.replace(SEEN, state=("hot",)),
    )
    assert sections(text)["Findings"].count("* train.py:8 Tensor.item()\n* \\<b>\n\n```yaml") == 1
    assert sections(text)["What these figures depend on"].strip() == "* hot"


def test_next_steps_and_titles_are_said() -> None:
    text = made(then=("pin",), later=("amp",), findings=[dataclasses.replace(WAITS, title="A TITLE")], name="net")
    assert "fastloop A TITLE 82 %   net" in text and "THEN     pin     LATER  amp" in text


def test_an_empty_run_has_every_section() -> None:
    text = made(Measurement(), findings=(), changed_yaml="", environment={}, left_out="* `rungs.pin`: x")
    assert list(sections(text)) == [
        "Loss",
        "The step",
        "The parts of the step",
        "Rungs",
        "Configuration that differs from the baseline",
        "Where it ran",
        "Not measured",
        "Left out, and how to try it",
    ]
    assert text.startswith("# fastloop report\n\n```\nfastloop NOT MEASURED") and text.endswith(f"{CLOSING}\n")
    assert "Left out" not in made()


def test_no_word_of_a_speed_up_but_that_there_is_none() -> None:
    verdicts = [Verdict(rung=name, took=True, why="why") for name, _ in Ladder().rungs()]
    text = made(plan=planned("amp"), verdicts=verdicts)
    assert text.count(CLOSING) == 1
    assert BOAST.findall(text.replace(CLOSING, "")) == []
