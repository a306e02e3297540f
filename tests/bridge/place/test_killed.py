"""SIGKILL, for real: what the last checkpoint says and what comes after it is the epoch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.bridge.launch import ROOT, python
from tests.bridge.place.resumed import BATCH, SAMPLES, fit, shuffled

PROGRAM = Path(__file__).with_name("killed.py")


WORKERS, ONE, THREADS, ROWS = (
    json.dumps(rungs)
    for rungs in (
        {"workers": {"count": 2}},
        {"workers": {"count": 1}},
        {"nodes": {"threads": 2}},
        {"cache": {"store": "device"}},
    )
)


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(
    ("epoch", "batch", "first", "then", "accumulate"),
    [(0, 5, WORKERS, ONE, 1), (1, 1, ROWS, WORKERS, 1), (0, 7, THREADS, ROWS, 3), (1, 5, ROWS, THREADS, 3)],
    ids=["workers", "rows", "threads, accumulating", "rows, accumulating"],
)
def test_killed_in_mid_batch(tmp_path: Path, epoch: int, batch: int, first: str, then: str, accumulate: int) -> None:
    before = {process.pid for process in psutil.process_iter()}
    killed = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), first, str(accumulate), "5", str(epoch), str(batch)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        timeout=200,
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -9, killed.stderr.decode()
    python(PROGRAM, tmp_path, then, str(accumulate), "6", "-1", "0", cwd=ROOT)
    trained, last = json.loads((tmp_path / "resumed.json").read_text())
    whole, _ = fit(json.loads(first), shuffled(), seed=5)
    steps, done = batch // accumulate, batch // accumulate * accumulate * BATCH
    assert last == f"step={-(-8 // accumulate) * epoch + steps}"
    rest = [number for when, numbers, _ in trained if when == epoch for number in numbers]
    assert rest == whole.drawn(epoch)[done:]
    assert sorted(whole.drawn(epoch)[:done] + rest) == list(range(SAMPLES))
    _wait_for_workers(before)


def _wait_for_workers(before: set[int]) -> None:
    """Those of the killed process see that it is gone, and end."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        mine = [each for each in psutil.process_iter(["cmdline"]) if each.pid not in before]
        if not [each for each in mine if "killed.py" in " ".join(each.info["cmdline"] or ())]:
            return
        time.sleep(0.2)
    raise AssertionError("workers of the killed process are still there")
