"""The files of a run directory: JSON that every parser takes, written whole or not at all."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastloop.records import store
from fastloop.records.measurement import PARTS, Measurement
from fastloop.records.plan import Action, Applied, Change, Finding, Plan, Step, Verdict
from fastloop.records.run_files import FindingsFile, PlanFile, RunRecord, VerdictsFile
from fastloop.report.drawing import html
from fastloop.report.run import files
from tests.commands.command_line import strictly
from tests.report.run.test_summary import SEEN, WAITS

PLAN = Plan(
    steps=(
        Step(
            rung="amp",
            status="planned",
            change=Change(
                wants={"precision.plugin": "bf16-mixed"},
                parity="approximate",
                notes=("mind",),
                facts={"precision": "x"},
                actions=(Action(keys=("a", "b"), when="model", do=lambda site: Applied(undo=lambda: None)),),
            ),
        ),
        Step(rung="pin", status="skipped", reason="needs CUDA"),
    )
)


def test_a_plan() -> None:
    assert strictly(store.dump(PlanFile.of(PLAN))) == {
        "schema": 1,
        "parity_class": "approximate",
        "rungs": [
            {
                "rung": "amp",
                "status": "planned",
                "reason": None,
                "parity_class": "approximate",
                "notes": ["mind"],
                "wants": {"precision.plugin": "bf16-mixed"},
                "actions": ["a", "b"],
                "has_acted": False,
            },
            {
                "rung": "pin",
                "status": "skipped",
                "reason": "needs CUDA",
                "parity_class": "exact",
                "notes": [],
                "wants": {},
                "actions": [],
                "has_acted": False,
            },
        ],
    }


def test_a_measurement_keeps_the_contract() -> None:
    content = strictly(store.dump(Measurement()))
    assert content["schema"] == 1 and set(content["parts_ms"]) == set(PARTS)
    units = (
        "samples_per_s",
        "wall_ms",
        "lead_ms",
        "peak_gib",
        "tflop_per_s",
        "tokens_per_s",
        "joule_per_sample",
        "usd_per_million_samples",
        "watch_us_per_step",
    )
    assert [name for name in units if content[name] is not None] == [], "what was not measured is null, never 0"
    for section in ("parts_ms", "step_ms", "gpu", "mfu"):
        assert content[section] and set(content[section].values()) == {None}
    assert content["loss"] == [] and content["evidence"] == {} and content["partial"] is False
    assert strictly(store.dump(SEEN))["step_ms"]["mean"] == 10.04


def test_verdicts_and_findings() -> None:
    verdicts = VerdictsFile(verdicts=(Verdict(rung="amp", took=None, why="x"),))
    assert store.to_json(verdicts) == {
        "schema": 1,
        "verdicts": [
            {
                "rung": "amp",
                "took": None,
                "why": "x",
                "parity_class": "exact",
                "rehearsed": None,
                "pays_back_after_steps": None,
            }
        ],
    }
    content = store.to_json(FindingsFile(findings=(WAITS, Finding(bottleneck="none", share_pct=None, why="x"))))
    assert content["schema"] == 1 and content["findings"][0]["patch"] == WAITS.patch
    assert content["findings"][1]["patch"] is None and content["findings"][1]["ceiling_gain_pct"] is None


def test_one_run_as_one_object() -> None:
    assert store.to_json(RunRecord(run_dir="a")) == {
        "schema": 1,
        "run_dir": "a",
        "plan": None,
        "measurement": None,
        "verdicts": None,
        "findings": None,
    }
    content = store.to_json(RunRecord(run_dir="a", verdicts=(), findings=(WAITS,)))
    assert content["verdicts"] == [] and content["findings"][0]["bottleneck"] == "data_wait"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (math.nan, None),
        (-math.inf, None),
        (0.0, 0.0),
        (True, True),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), None),
        (np.int64(3), 3),
        (torch.float32, "torch.float32"),
        (Path("a"), "a"),
        ({"b", "a"}, ["a", "b"]),
        ((1, (2,)), [1, [2]]),
        ({1: {None: 2}}, {"1": {"None": 2}}),
        ("ü\x1b", "ü\x1b"),
        (10**30, 10**30),
    ],
)
def test_plain_json(value: Any, plain: Any) -> None:
    for ascii_only in (True, False):
        content = strictly(store.dump({"value": value}, ascii_only=ascii_only))
        assert content == {"value": plain} and type(content["value"]) is type(plain)


def test_ascii_only() -> None:
    assert "ü" in store.dump({"value": "ü"}) and store.dump({"value": "ü"}, ascii_only=True).isascii()


def test_files_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.json").write_text("before")
    full = Path.write_text

    def disk_full(path: Path, text: str, **options: Any) -> int:
        full(path, text[:2], **options)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", disk_full)
        with pytest.raises(OSError, match="No space left"):
            store.write(tmp_path / "a", {"x.json": "after"})
    assert {path.name: path.read_text() for path in (tmp_path / "a").iterdir()} == {"x.json": "before"}
    store.write(tmp_path / "a", {"x.json": "after", "y.md": "ü \udc80"})
    assert {path.name: path.read_text() for path in (tmp_path / "a").iterdir()} == {"x.json": "after", "y.md": "ü ?"}


def test_clearing_takes_what_a_run_writes_and_nothing_else(tmp_path: Path) -> None:
    contents = files.run_files(
        config_yaml="",
        changed_yaml="",
        env_json='{"schema": 1}',
        plan=PLAN,
        seen=SEEN,
        verdicts=(),
        findings=(WAITS,),
        left_out="",
    )
    assert set(contents) <= set(store.NAMES)
    for name, text in contents.items():
        assert not name.endswith(".json") or strictly(text)["schema"] == 1
    store.write(tmp_path, {**contents, "notes.txt": "mine"})
    store.clear(tmp_path)
    store.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_report_to_look_at(tmp_path: Path) -> None:
    assert store.report_in(tmp_path) is None
    store.write(tmp_path, {"report.md": "x"})
    assert store.report_in(tmp_path) == tmp_path / "report.md"
    store.write(tmp_path, {"report.md": "x", "report.html": "y"})
    assert store.report_in(tmp_path) == tmp_path / "report.html"
    store.write(tmp_path, {"headspace.json": "{}"})
    assert (tmp_path / "report.html").is_file()
    store.write(tmp_path, {"report.md": "a later fit without a page"})
    assert store.report_in(tmp_path) == tmp_path / "report.md", "the page of an earlier fit says something else"


def made(**more: Any) -> dict[str, str]:
    return files.run_files(
        config_yaml="",
        changed_yaml="a: 1\n",
        env_json='{"schema": 1}',
        plan=PLAN,
        seen=SEEN,
        verdicts=(),
        findings=(WAITS,),
        **more,
    )


def test_a_run_s_files() -> None:
    contents = made(name="my net", then=("pin",), later=("amp",))
    assert list(contents) == [name for name in store.NAMES if name in contents] and len(contents) == 9
    for name in ("report.md", "report.html"):
        assert "my net" in contents[name] and "a: 1" in contents[name] and "pin" in contents[name]
    assert "STARVED BY DATA" in contents["report.md"] and "Starved by data" in contents["report.html"]
    assert strictly(contents["findings.json"])["findings"][0]["title"] == "STARVED BY DATA"
    assert "There is no report.html" not in contents["report.md"]


@pytest.mark.usefixtures("fresh_templates")
@pytest.mark.parametrize("reason", ["jinja2 is missing", "the template is missing"])
def test_without_a_page_there_are_the_other_files_and_the_reason(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    if reason == "jinja2 is missing":
        monkeypatch.setitem(sys.modules, "jinja2", None)
    else:
        monkeypatch.setattr(html.resources, "files", lambda package: Path("nowhere"))
    contents = made()
    assert "report.html" not in contents and len(contents) == 8
    last = contents["report.md"].strip().splitlines()[-3]
    told = "ModuleNotFoundError: import of jinja2" if reason == "jinja2 is missing" else "FileNotFoundError"
    assert last.startswith(f"There is no report.html: {told}")


def test_json_is_read_back_as_it_was() -> None:
    assert json.loads(store.dump(SEEN))["samples_per_s"] == SEEN.samples_per_s
