"""SIGKILL, for real: what the last checkpoint says and what comes after it is the epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests import preloaded
from tests.bridge.launch import ROOT, python
from tests.bridge.place.resumed import BATCH, SAMPLES, fit, shuffled
from tests.feeds.dali.folders import make_folder
from tests.rungs.test_dali import Sees, load

PROGRAM = Path(__file__).with_name("killed.py")
_LOADED = {name: value for name, value in os.environ.items() if preloaded.become.is_read_when_loaded(name)}
"""The variables that a fork cannot change: without them the programs would be executed."""


WORKERS, ONE, THREADS, ROWS, DALI, KEPT = (
    json.dumps(rungs)
    for rungs in (
        {"workers": {"count": 2}},
        {"workers": {"count": 1}},
        {"nodes": {"threads": 2}},
        {"cache": {"store": "device"}},
        {"dali": {"threads": 2}},
        {"cache": {"store": "disk", "path": "KEPT"}},
    )
)


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(
    ("epoch", "batch", "first", "then", "accumulate"),
    [(0, 5, WORKERS, ONE, 1), (1, 1, ROWS, WORKERS, 1), (0, 7, THREADS, ROWS, 3), (1, 5, ROWS, THREADS, 3)],
    ids=["workers", "rows", "threads, accumulating", "rows, accumulating"],
)
def test_killed_in_mid_batch(tmp_path: Path, epoch: int, batch: int, first: str, then: str, accumulate: int) -> None:
    ((trained, last),) = _kill_and_resume(tmp_path, first, then, accumulate, epoch, batch)
    whole, _ = fit(json.loads(first), shuffled(), seed=5)
    steps, done = batch // accumulate, batch // accumulate * accumulate * BATCH
    assert last == f"step={-(-8 // accumulate) * epoch + steps}"
    rest = [number for when, numbers, _ in trained if when == epoch for number in numbers]
    assert rest == whole.drawn(epoch)[done:]
    assert sorted(whole.drawn(epoch)[:done] + rest) == list(range(SAMPLES))


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(
    ("first", "then", "accumulate"),
    [(DALI, KEPT, 1), (KEPT, DALI, 3), (DALI, WORKERS, 3)],
    ids=["dali", "kept, accumulating", "dali, accumulating"],
)
def test_killed_while_an_engine_loads_pictures(tmp_path: Path, first: str, then: str, accumulate: int) -> None:
    """L5, K2: twenty pictures in batches of six, killed in the fourth of the second epoch."""
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    pytest.importorskip("torchvision")
    folder = make_folder(tmp_path / "pictures")
    first, then = (rungs.replace("KEPT", str(tmp_path / "kept")) for rungs in (first, then))
    ((labels, last),) = _kill_and_resume(tmp_path, first, then, accumulate, 1, 3, folder)
    whole = Sees()
    torch.manual_seed(0)
    fit(None, load(folder, still=True), seed=5, module=whole)  # type: ignore[arg-type]
    assert (last, labels) == (f"step={-(-4 // accumulate) + 3 // accumulate}", whole.labels[4 + 3 :])


@pytest.mark.multirank
@pytest.mark.usefixtures("quick_starts")
def test_two_ranks_killed_while_a_cache_fills(tmp_path: Path) -> None:
    """D15, K2: what each rank trained on before its checkpoint and what they resume with is the epoch, each once."""
    pytest.importorskip("torchvision")
    folder, kept = make_folder(tmp_path / "pictures"), KEPT.replace("KEPT", str(tmp_path / "kept"))
    ranks = _kill_and_resume(tmp_path, kept, kept, 1, 1, 1, folder, ranks=2)
    assert {last for _, last in ranks} == {"step=3"}
    whole = _train_whole_epochs(tmp_path / "whole", kept, folder)
    assert [labels for labels, _ in ranks] == [labels[3:] for labels in whole]
    assert sorted(chain(*(chain(*labels[2:]) for labels in whole))) == list(range(20))


def _train_whole_epochs(folder: Path, rungs: str, pictures: Path) -> list[Any]:
    """What each of two ranks trains on that nobody kills."""
    folder.mkdir()
    python(PROGRAM, folder, rungs, "1", "2", "5", "9", "0", pictures, cwd=ROOT)
    return [json.loads((folder / f"resumed{rank}.json").read_text())[0] for rank in (0, 1)]


def _kill_and_resume(
    folder: Path, first: str, then: str, accumulate: int, epoch: int, batch: int, *pictures: Path, ranks: int = 1
) -> list[Any]:
    """What each rank of the resumed run trained on, and the checkpoint it began at. Its seed is another one."""
    before = {process.pid for process in psutil.process_iter()}
    killed = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), first, *map(str, (accumulate, ranks, 5, epoch, batch)), *pictures],
        cwd=ROOT,
        env={**_LOADED, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        timeout=200,
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -9, killed.stderr.decode()
    python(PROGRAM, folder, then, str(accumulate), str(ranks), "6", "-1", "0", *pictures, cwd=ROOT)
    _wait_for_workers(before)
    found = []
    for rank in range(ranks):
        assert json.loads((folder / f"killed{rank}.json").read_text()) == list(json.loads(first))
        trained, last, planned = json.loads((folder / f"resumed{rank}.json").read_text())
        assert planned == list(json.loads(then))
        found.append((trained, last))
    return found


def _wait_for_workers(before: set[int]) -> None:
    """Those of the killed process see that it is gone, and end."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        mine = [each for each in psutil.process_iter(["cmdline"]) if each.pid not in before]
        if not [each for each in mine if "killed.py" in " ".join(each.info["cmdline"] or ())]:
            return
        time.sleep(0.2)
    raise AssertionError("workers of the killed process are still there")
