"""What fastloop exec says once its command has ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastloop.commands import exec_answer
from fastloop.records import store
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding
from fastloop.records.run_files import FINDINGS, MEASUREMENT, FindingsFile
from fastloop.records.trial import ScriptEvent


def test_what_could_not_be_written_is_in_the_object_too(tmp_path: Path) -> None:
    answer = exec_answer.answer("train", tmp_path, 0, [ScriptEvent(event="unwritten", why="no room")], ["x"], None)
    assert answer.json is not None and answer.json["notes"][1:] == ["the report could not be written: no room"]
    assert answer.text == f"fastloop: {answer.json['notes'][0]}"


@pytest.mark.parametrize(
    ("disabled", "why"), [("", "train.py made a Trainer, but never called fit"), ("1", "FASTLOOP_DISABLE is set")]
)
def test_the_object_says_why_nothing_was_measured(
    disabled: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTLOOP_DISABLE", disabled)
    command = ["python", "train.py"]
    answer = exec_answer.answer("train", tmp_path, 0, [ScriptEvent(event="constructed")], command, None)
    assert answer.json is not None and answer.json["notes"] == [f"nothing was measured: {why}"]


def test_it_ends_with_how_to_prove_its_fix(tmp_path: Path) -> None:
    patch = {"rungs": {"workers": {"enabled": True}}}
    found = FindingsFile(findings=(Finding(bottleneck="data_wait", patch=patch),))
    store.save(tmp_path, {MEASUREMENT: Measurement(), FINDINGS: found})
    command = [sys.executable, "train.py", "--lr", "1"]
    answer = exec_answer.answer("train", tmp_path, 0, [], command, None)
    assert answer.text.splitlines()[-1] == "PROVE    fastloop ab --script train.py --args '--lr 1' --vs workers"


def test_a_script_that_ran_with_another_python_is_told_so(tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    ends = "ended with exit code 1 before it made a Trainer"
    for command, more in (  # the file's name: not.py "ended", not "not ended"
        ([str(other), "train.py"], f"; it ran with {other}, but fastloop is installed for {sys.executable}"),
        ([sys.executable, "train.py"], ""),
        (["sh", "train.sh"], ""),
    ):
        answer = exec_answer.answer("train", tmp_path, 1, [], command, None)
        assert (
            answer.text == f"fastloop: nothing was measured: {command[1] if command[0] != 'sh' else 'sh'} {ends}{more}"
        )
