"""The queue of benchmarks: limits that end all a part started, a budget, exit codes, and a GPU for each queue."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import run_all
from benchmarks.run_all import Part

START_ANOTHER = """
import pathlib, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
pathlib.Path({path!r}).write_text(str(other.pid))
print("begun")
time.sleep(300)
"""


def run(parts: list[Part], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run_all", *arguments])
    return run_all.main(parts)


def test_what_takes_too_long_is_killed_with_all_it_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = START_ANOTHER.format(path=str(tmp_path / "pid"))
    parts = [Part("hangs", 1, 8, ["-c", hangs]), Part("fails", 1, 60, ["-c", "print('{s}'); raise SystemExit(3)"])]
    assert run(parts, monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hangs: begun" and lines[1].startswith("hangs: == killed at its limit of 8 s, ")
    assert lines[2] == "fails: 50" and lines[3].startswith("fails: == exit 3, ")
    left, until = int((tmp_path / "pid").read_text()), time.monotonic() + 100
    while psutil.pid_exists(left) and psutil.Process(left).status() != "zombie":
        assert time.monotonic() < until, "the process in a session of its own goes on"
        time.sleep(0.05)


def test_what_the_budget_has_no_room_for_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Part("large", 1000, 900, ["-c", "print(1)"]), Part("small", 10, 20, ["-c", "print(2)"])]
    assert run(parts, monkeypatch, "--budget", "100") == 0
    first, second, last, *_ = capsys.readouterr().out.splitlines()
    assert (
        re.fullmatch(r"large: == left out: takes 1000 s, (100|9\d) s left", first)
        and second == "small: 2"
        and "exit 0" in last
    )
    assert [part.limit_s for part in run_all.choose(parts, "small=7,large")] == [7, 900]
    with pytest.raises(SystemExit, match="got none"):
        run_all.choose(parts, "none")


def test_the_last_word_on_each_case_stands_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [
        {"case": "a", "n": 1, "median_ms": 5.0},
        {"case": "b", "error": "x"},
        {"case": "a", "n": 2, "median_ms": 6.0},
    ]
    prints = (
        f"print({json.dumps(told[0])!r}, {json.dumps(told[1])!r}, 'FAILED t', {json.dumps(told[2])!r}, sep=chr(10))"
    )
    assert run([Part("p", 1, 60, ["-c", prints])], monkeypatch, "--log", str(tmp_path / "log")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "log").read_text().splitlines() == lines[:5]
    assert lines[5:8] == ['== p: a {"n": 2, "median_ms": 6.0}', '== p: b {"error": "x"}', "== p: FAILED t "]


def test_each_gpu_has_a_queue_and_its_share_of_the_cpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b")
    tells = "import json, os, time; time.sleep(1)\n"
    tells += "print(json.dumps([os.environ['CUDA_VISIBLE_DEVICES'], sorted(os.sched_getaffinity(0))]))"
    assert run([Part(str(n), 1, 60, ["-c", tells]) for n in range(4)], monkeypatch, "--per-gpu") == 0
    said = [json.loads(line[3:]) for line in capsys.readouterr().out.splitlines() if ": [" in line]
    cpus = {gpu: set(seen) for gpu, seen in said}
    assert len(said) == 4 and cpus.keys() == {"a", "b"} and cpus["a"] | cpus["b"] == os.sched_getaffinity(0)
    assert len(cpus["a"] | cpus["b"]) == 1 or not cpus["a"] & cpus["b"]


def test_the_table_names_what_there_is() -> None:
    parts = run_all.read_table(run_all.__doc__ or "")
    assert len(parts) == 14 and {"tests", "first_contact", "compile_scope"} < {part.name for part in parts}
    for part in parts:
        module, folder = part.command[1], run_all.ROOT / "benchmarks"
        if module != "pytest":
            known = (run_all.ROOT / f"{module.replace('.', '/')}.py").read_text() + (folder / "cases.py").read_text()
            assert [word for word in part.command[2:] if word.startswith("--") and f'"{word}"' not in known] == []
