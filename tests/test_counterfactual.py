"""`benchmarks/counterfactual.py`: each remedy tried for real, and whether the first finding named a good one."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import ROOT
from benchmarks.counterfactual import REMEDY, Script


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_a_script_with_one_rung() -> None:
    asked = ("--scripts", "tabular", "--rungs", "host", "--size", "tiny", "--steps", "40", "--forked")
    command = [sys.executable, "-m", "benchmarks.counterfactual", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    # A first finding with a patch gets a run of its own: which finding comes first is for the clock.
    watched, *runs, told = (json.loads(line) for line in done.stdout.splitlines())
    host = next(each for each in runs if each["arm"] == "host")
    assert watched["exit_code"] == host["exit_code"] == 0 and watched["speed"] == 1.0
    assert host["took"] == ["host"] and told["ranking"] == [["host", host["speed"]]]
    assert told["finding"] is not None and told["holds"] in (True, False, None)


def judged(finding: str, patch: dict[str, Any] | None, **late_ms: float) -> Any:
    script = Script("tabular", Path(), Namespace())
    script.findings = [{"bottleneck": finding, "share_pct": 40.0}]
    for arm, ms in late_ms.items():
        run = {"timed": True, "finished": True, "late_ms": ms, "took": [arm]}
        script.runs[REMEDY if arm == "remedy" else arm].append(run)
    return script.judge(patch)["holds"]


def test_a_finding_holds_if_its_remedy_is_about_as_good_as_the_best_rung() -> None:
    patch = {"rungs": {"amp": {"enabled": True}}}
    assert judged("fp32_math", patch, watched=10.0, amp=5.0, host=9.0, remedy=5.5) is True
    assert judged("launch_bound", patch, watched=10.0, amp=5.0, host=9.0, remedy=9.0) is False


def test_nothing_found_holds_if_nothing_helps() -> None:
    assert judged("none", None, watched=10.0, amp=9.5) is True
    assert judged("none", None, watched=10.0, amp=8.0) is False
    assert judged("host_other", None, watched=10.0, amp=8.0) is None, "told in words alone"


def test_merged_batches_count_as_what_they_were() -> None:
    """Hooks see one batch for a window of four: 30 ms each are 7.5 for what were 10."""
    script = Script("bert", Path(), Namespace())
    script.runs["watched"] = [{"timed": True, "finished": True, "late_ms": 10.0, "batches": 240}]
    script.runs["batch"] = [{"timed": True, "finished": True, "late_ms": 30.0, "batches": 60}]
    assert script.rate("batch") == pytest.approx(4 / 3)
