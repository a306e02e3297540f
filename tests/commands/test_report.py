"""fastloop report: show what a run directory holds, whole or not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fastloop.commands.report import report, to_open
from fastloop.errors import ConfigError
from fastloop.records.measurement import Measurement
from fastloop.records.store import to_json
from tests.commands.command_line import refuse_reading

pytestmark = pytest.mark.usefixtures("here")


def a_run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "report.md").write_text("# fastloop report\n\nköln\n", encoding="utf-8")
    contents = {
        "plan": {"rungs": []},
        "measurement": {"steps": 3},
        "verdicts": {"verdicts": [{"rung": "amp"}]},
        "findings": {"findings": []},
    }
    for name, content in contents.items():
        (path / f"{name}.json").write_text(json.dumps({"schema": 1, **content}))
    return path


def test_text_and_object(here: Path) -> None:
    a_run(here / "run")
    answer = report("run")
    assert answer.text == "# fastloop report\n\nköln"
    assert answer.json == {
        "schema": 1,
        "run_dir": "run",
        "plan": {"schema": 1, "parity_class": "exact", "rungs": []},
        "findings": [],
        "measurement": to_json(Measurement(steps=3)),
        "verdicts": [
            {
                "rung": "amp",
                "took": None,
                "why": "",
                "parity_class": "exact",
                "rehearsed": None,
                "pays_back_after_steps": None,
            }
        ],
    }, "keys that an older run lacks are there, as not measured"


def test_the_object_of_an_experiment_is_its_own(here: Path) -> None:
    a_run(here / "run")
    (here / "run" / "comparison.json").write_text('{"schema": 1, "run_dir": "elsewhere", "verdict": "faster"}')
    assert report("run").json == {"schema": 1, "run_dir": "run", "verdict": "faster"}


def test_the_path_that_a_run_ends_with(here: Path) -> None:
    a_run(here / "run")
    assert report("run/report.md") == report("run") == report("run/")
    assert to_open("run") == "run/report.md"
    (here / "run" / "report.html").write_text("<p>report")
    assert report("run/report.html") == report("run") and to_open("run") == "run/report.html"


def test_a_page_alone_is_no_run(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "report.html").write_text("<p>report")
    with pytest.raises(ConfigError, match=r"it contains no report\.md"):
        report("run/report.html")


@pytest.mark.parametrize("broken", ["", "{", "[1]", "\udc80"])
def test_a_broken_file_is_null_and_the_rest_is_there(broken: str, here: Path) -> None:
    (a_run(here / "run") / "verdicts.json").write_bytes(broken.encode("utf-8", "surrogateescape"))
    (here / "run" / "plan.json").unlink()
    answer = report("run").json
    assert answer is not None and answer["verdicts"] is None and answer["plan"] is None
    assert answer["measurement"]["steps"] == 3


def test_a_report_that_cannot_be_read_is_no_bug_of_ours(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(here / "run")
    refuse_reading(monkeypatch)
    with pytest.raises(ConfigError, match="it cannot be read: Permission denied") as caught:
        report("run")
    assert caught.value.got == "run/report.md"


def test_where_there_is_none_the_newest_run_is_named(here: Path) -> None:
    for age, name in enumerate(["new", "old"]):
        path = a_run(here / "fastloop-runs" / "net" / name) / "report.md"
        os.utime(path, (1e9 - age, 1e9 - age))
    for asked in (".", "fastloop-runs", "fastloop-runs/net", "net"):
        with pytest.raises(ConfigError) as caught:
            report(asked)
        why = "there is no such directory" if asked == "net" else "it contains no report.md"
        assert (caught.value.got, caught.value.why) == (f"run directory {asked}", why)
        assert caught.value.do == "write the directory of one run, such as fastloop-runs/net/new"


@pytest.mark.parametrize("asked", ["nowhere", "file", "x" * 300])
def test_there_is_nothing(asked: str, here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match="why there is no such directory") as caught:
        report(asked)
    assert caught.value.do == "write the directory that fastloop run printed, below fastloop-runs/"
