"""What scripts of strangers are held to, and that `benchmarks/first_contact.py` tells what became of each run."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import first_contact
from benchmarks.cases import ROOT

FOREIGN = sorted((ROOT / "benchmarks" / "foreign").glob("*.py"))


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.stem)
def test_a_strangers_script_is_short_and_has_never_heard_of_us(path: Path) -> None:
    text = path.read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imports and not [node for node in imports if "fastloop" in ast.unparse(node)]
    assert len(text.splitlines()) <= 100
    assert all(f'"{option}"' in text for option in ("--steps", "--devices", "--size"))


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the benchmark; returns its lines."""

    def run_benchmark(*arguments: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["first_contact", "--size", "tiny", *arguments])
        first_contact.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run_benchmark


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_the_same_script_plain_and_watched(run: Run) -> None:
    found = {row["arm"]: row for row in run("--scripts", "tabular", "--arms", "plain,watched", "--steps", "400")}
    plain, watched = found["plain"], found["watched"]
    assert plain["exit_code"] == watched["exit_code"] == 0 and plain["batches"] == watched["batches"] == 400
    assert plain["metrics"] == watched["metrics"] and "train_loss" in plain["metrics"], "watching changed the training"
    assert 0 < plain["first_to_last_s"] < plain["train_s"] < plain["process_s"]
    assert 0.8 * plain["train_s"] < sum(plain["spent_s"].values()) < 1.2 * plain["train_s"]
    assert "findings" not in plain and watched["findings"] and watched["total_steps"] == 400
    assert watched["said"][0].startswith("fastloop ")


def test_what_takes_too_long_is_killed_and_said_to_be(run: Run, tmp_path: Path) -> None:
    (row,) = run("--scripts", "tabular", "--arms", "watched", "--limit", "0.5", "--keep", str(tmp_path))
    assert row["over_limit"] and row["exit_code"] is None and row["process_s"] < 150
    assert not [each.pid for each in psutil.process_iter(["cwd"]) if str(tmp_path) in (each.info["cwd"] or "")]


@pytest.mark.usefixtures("quick_starts")
def test_a_script_that_fails_shows_its_end(run: Run) -> None:
    (row,) = run("--scripts", "tabular", "--arms", "plain", "--args", "tabular: --no-such-option")
    assert row["exit_code"] == 2 and row["fits"] == 0 and "--no-such-option" in row["tail"][-1]


def made_row(arm: str, late_ms: float, **more: Any) -> dict[str, Any]:
    row = {"what": "first_contact", "script": "gan", "arm": arm, "exit_code": 0, "over_limit": False, "timed": True}
    times = {
        "process_s": 10 * late_ms,
        "train_s": 5 * late_ms,
        "first_batch_s": 1.0,
        "first_to_last_s": late_ms,
        "late_ms": late_ms,
    }
    return {**row, **times, "finished": True, **more}


def test_the_table_holds_each_arm_against_plain() -> None:
    skipped = {"skipped": {"compile": "a | b"}, "took": ["amp"], "one_time_s": {"compile": 41.25}}
    rows = [
        made_row("full", 30.0, **skipped),
        made_row("plain", 10.0),
        made_row("plain", 20.0),
        made_row("plain", 11.0),
    ]
    head, _, plain, full = first_contact.summarize(rows).splitlines()
    assert plain.startswith("| gan | plain | 3 | exit 0 | 110.0 (100.0 to 200.0) | 55.0 (50.0 to 100.0) | 1.0 (1.0 to ")
    assert "| 11.0 (10.0 to 20.0) |" in plain
    assert "| 2.31 | 2.31 | 2.31 | amp | compile: a / b | compile 41.2 |" in full
    assert {line.count("|") for line in (head, plain, full)} == {head.count("|")}


def test_a_ratio_of_several_runs_has_its_interval() -> None:
    plain = [made_row("plain", 10.0), made_row("plain", 10.2)]
    slower = first_contact.compare([made_row("full", 20.0), made_row("full", 20.4)], plain, "late_ms")
    ratio, low, high = (float(text.strip("()")) for text in slower.replace("to ", "").split())
    assert ratio == 2.0 and 1.8 < low < 2.0 < high < 2.2


def test_runs_that_were_not_alone_or_died_have_no_time() -> None:
    rows = [made_row("plain", 10.0), made_row("full", 5.0, timed=False), made_row("safe", 5.0, finished=False)]
    rows.append(made_row("watched", 5.0, exit_code=None, over_limit=True, finished=False))
    lines = first_contact.summarize(rows).splitlines()[3:]
    assert len(lines) == 3 and all(line.count("n/a |") == 8 for line in lines)
    assert "over the limit" in lines[0]
