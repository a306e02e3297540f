"""The process of one trial: what it reads, and how it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands.command_line import ROOT
from tests.trainings import NET

ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def child(*command: str, folder: Path, **request: Any) -> subprocess.CompletedProcess[str]:
    asked = {
        "conf": str(NET),
        "more": [],
        "overrides": [],
        "variation": "as_it_is",
        "hunt_syncs": False,
        **request,
    }
    (folder / "request").write_text(json.dumps({"job": asked, "out": str(folder / "out")}))
    with (folder / "request").open() as stdin:
        return subprocess.run(
            [sys.executable, *command],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=200,
            cwd=folder,
            env={**os.environ, **ENVIRONMENT},
        )


def test_every_rank_reads_the_same_request_and_the_user_nothing(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\nfrom fastloop.experiments.trials.trial_process import read_request\n"
        "print(read_request().job.conf, repr(sys.stdin.read()))\nsys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-c',"
        " 'from fastloop.experiments.trials.trial_process import read_request; print(read_request())'])"
    )
    first, second = child("-c", code, folder=tmp_path).stdout.splitlines()
    assert first == f"{NET} ''" and str(NET) in second


@pytest.mark.parametrize(
    ("request_of", "code", "said"),
    [({"overrides": ["run.nonsense=1"]}, 2, "run.nonsense"), ({"conf": "no-such-recipe"}, 2, "no-such-recipe")],
    ids=["key", "name"],
)
def test_a_wrong_configuration_is_said_before_torch_is_there(
    request_of: dict[str, Any], code: int, said: str, tmp_path: Path
) -> None:
    without_torch = (
        "import sys; sys.modules['torch'] = None\n"
        "from fastloop.experiments.trials import trial_process; sys.exit(trial_process.main())"
    )
    done = child("-c", without_torch, folder=tmp_path, **request_of)
    assert done.returncode == code and done.stderr.startswith("fastloop: got ") and said in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("quick_starts")
def test_counted_work_is_its_answer(tmp_path: Path) -> None:
    done = child("-m", "fastloop.experiments.trials.trial_process", folder=tmp_path, variation="flops")
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "out" / "answer.json").read_text())
    assert answer["schema"] == 1 and answer["per_sample"] == 16, "4 weights, forward and their gradient"
    assert not (tmp_path / "out" / "measurement.json").exists()


@pytest.mark.usefixtures("quick_starts")
def test_a_training_that_leaves_by_itself_is_told_by_its_words(tmp_path: Path) -> None:
    done = child(
        "-m",
        "fastloop.experiments.trials.trial_process",
        folder=tmp_path,
        overrides=["recipe.does=exit", "recipe.at=2"],
    )
    assert done.returncode == 1 and "the training has had enough" in done.stderr
