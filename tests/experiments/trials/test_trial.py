"""One training in one fresh process: what comes back, whichever way it went, and what is left of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastloop.errors import ConfigError
from fastloop.experiments.trials import trial
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import (
    Job,
    TrialRequest,
    forget,
    make_environment,
    quote_error,
    read_finished,
    run_trial,
)
from fastloop.records.measurement import Measurement
from fastloop.records.store import decode, dump
from fastloop.records.trial import Trial
from tests.commands.command_line import run
from tests.trainings import NET

SECRET = "sk-nobody-may-see-this"


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.function is not test_a_training_that_went_well:  # which starts as trials do
        request.getfixturevalue("quick_starts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def net(*overrides: str, **settings: object) -> Job:
    return Job(conf=str(NET), overrides=overrides, **settings)  # type: ignore[arg-type]


def test_a_training_that_went_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newborns: Callable[[], list[Any]]
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(trial.supervise, "SAY_S", 0.0)
    monkeypatch.setattr(trial.supervise, "LOOK_S", 0.02)
    job = net("run.max_steps=25", f"recipe.api_key={SECRET}", further_steps=5)
    found = run_trial("arm 1", job, tmp_path / "a" / "1", progress=lines.append)
    assert found.ok and found.cause is None and (found.code, found.last_step, found.tail) == (0, 30, "")
    assert found.measurement is not None and found.measurement.total_steps == 30
    assert found.samples_per_s == found.measurement.samples_per_s > 0
    assert "max_steps: 25\n" in (found.run_dir / "config.resolved.yaml").read_text(), "running that adds no steps"
    names = {path.name for path in found.run_dir.iterdir()}
    assert {"measurement.json", "report.md", "trial.json", "stdout.txt", "stderr.txt", "beat"} <= names
    assert lines and all(line.startswith("arm 1: ") for line in lines)
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 8 and not any(SECRET in text for text in texts)
    assert not newborns()
    again = read_finished(found.run_dir)
    assert again == found, "read on another day it is the same"
    row = json.loads((found.run_dir / "trial.json").read_text())
    assert (row["name"], row["ok"], row["samples_per_s"], row["schema"]) == ("arm 1", True, found.samples_per_s, 1)


def test_a_training_that_raised_and_no_secret_in_what_is_said(tmp_path: Path) -> None:
    (tmp_path / "measurement.json").write_text('{"samples_per_s": 99}')
    found = run_trial(
        "arm", net("recipe.at=25", "run.max_steps=50", "recipe.does=raise", f"recipe.api_key={SECRET}"), tmp_path
    )
    assert not found.ok and found.code == 1 and found.cause is not None and found.samples_per_s is None
    assert found.cause.startswith("exit code 1 at step 25: ValueError: no luck with the key")
    assert "ValueError" in found.tail and found.measurement is not None and found.measurement.partial is True
    assert not any(SECRET in path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert read_finished(tmp_path) is None


def test_a_training_that_prints_its_key_leaves_it_in_no_file(tmp_path: Path) -> None:
    job = net("recipe.at=3", "run.max_steps=5", "recipe.does=tell", f"recipe.api_key={SECRET}", f"recipe.mark={SECRET}")
    found = run_trial("arm", job, tmp_path / "a")
    assert found.ok, found.tail
    assert (tmp_path / "a" / "stdout.txt").read_text().count("logged in with ***\n") == 1, "the key was printed"
    assert "logged in with ***" in (tmp_path / "a" / "stderr.txt").read_text()
    assert not any(SECRET in path.read_text() for path in (tmp_path / "a").iterdir())
    assert (tmp_path / SECRET).is_file(), "the file that the recipe was to write, under the name it was given"


def test_a_rank_that_ended_badly_is_found_by_its_ledger_or_its_record(tmp_path: Path) -> None:
    def found(*ends: Any) -> str | None:
        ranks = tuple({"rank": rank, "ended_by": end} for rank, end in enumerate(ends))
        return trial.describe_dead_rank(tmp_path, Measurement(world_size=2, ranks=ranks))

    assert found(None) is found(None, None) is None, "without a ledger a record may have come too late"
    assert found(None, "ValueError") == "rank 1 died in its fit: ValueError"
    (tmp_path / "ledger.json").write_text(json.dumps({"schema": 1, "rank": 0, "partial": False}))
    assert found(None) == "rank 1 died in its fit: it was killed, or hung", "it left neither record nor ledger"
    assert found(None, None) is None, "on another machine, with a disk of its own"
    ledger = {"schema": 1, "rank": 1, "partial": True, "optimizer_steps": 9, "ended_by": "OSError"}
    (tmp_path / "ledger-1.json").write_text(json.dumps(ledger))
    assert found(None) == found(None, None) == "rank 1 died in its fit at step 9: OSError"


def test_checkpoints_elsewhere_are_left_alone_and_those_of_its_own_are_not(tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "last.ckpt"
    mine.parent.mkdir()
    mine.write_text("of the real run")
    saving = net("run.max_steps=25", f"recipe.elsewhere={mine.parent}")
    found = run_trial("arm", saving, tmp_path / "a")
    assert found.ok and found.unsaved and read_finished(found.run_dir) == found
    assert (found.run_dir / "checkpoints" / "last.ckpt").is_file()
    gradients = run_trial("gradients", replace(saving, variation="gradients"), tmp_path / "b")
    assert gradients.ok, gradients.tail
    assert [path.name for path in mine.parent.iterdir()] == ["last.ckpt"] and mine.read_text() == "of the real run"
    assert not run_trial("arm", net("run.max_steps=25"), tmp_path / "c").unsaved, "nothing was saved there"
    real = run("run", NET, *saving.overrides, cwd=tmp_path)
    assert real.code == 0 and len(list(mine.parent.iterdir())) == 2, real.err
    assert mine.read_bytes() != b"of the real run", "no trial: it writes as ever"


@pytest.mark.slow
def test_a_training_that_hangs_says_where(tmp_path: Path) -> None:
    found = run_trial(
        "arm",
        net("recipe.at=7", "recipe.does=hang", "run.max_steps=25"),
        tmp_path,
        limits=Limits(silent_s=4, grace_s=3),
    )
    assert found.cause == "hung: no step, output or CPU use for 4 s at step 7; it was ended"
    assert "in hangs" in (tmp_path / "stderr.txt").read_text(), "the line it hangs in"
    assert found.measurement is None or found.measurement.partial is True


@pytest.mark.slow
@pytest.mark.multirank
def test_a_rank_that_is_stopped_is_named_with_the_step_it_is_at(tmp_path: Path) -> None:
    stops = net("recipe.at=12", "recipe.does=stop", "recipe.rank=1", "run.devices=2", "run.max_steps=25")
    found = run_trial("arm", stops, tmp_path, limits=Limits(silent_s=5, grace_s=1))
    _, _, process = (tmp_path / "beat.1").read_text().split()
    silent = "hung: no step, output or CPU use for 5 s"
    stopped = f"rank 1 (process {process}) is stopped from outside at step 12, the others at step 12"
    assert (found.cause, found.last_step) == (f"{silent}; {stopped}; it was ended", 12)


def test_what_the_child_says_of_its_configuration_is_the_cause(tmp_path: Path) -> None:
    where = tmp_path / "a"
    found = run_trial("arm", net("recipe.size=huge"), where)
    assert (found.ok, found.code, found.measurement) == (False, 2, None)
    assert found.cause is not None and found.cause.startswith("recipe.size (command line): recipe has no key size")
    assert "\n" not in found.cause and "fastloop: got recipe.size" in found.tail
    (where / "lightning_logs" / "version_0").mkdir(parents=True)  # of a script's trial
    forget(where)
    assert not where.exists()


def test_an_end_without_a_result_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CHILD", "this")
    (tmp_path / "answer.json").write_text('{"per_sample": 1}')
    for variation in ("as_it_is", "flops"):
        found = run_trial("arm", net(variation=variation), tmp_path)
        assert (found.ok, found.code, found.cause) == (False, 0, "it ended without a result")


def test_a_wrong_configuration_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.nonsense"):
        run_trial("arm", net("run.nonsense=1"), tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("name", "value"), [("FASTLOOP_DISABLE", "1"), ("WORLD_SIZE", "2")])
def test_where_a_trial_cannot_be_trusted_it_is_refused(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        run_trial("arm", net(), tmp_path / "a")


def test_a_child_is_no_part_of_another_run() -> None:
    given = {
        "FASTLOOP_RECIPES": "x",
        "FASTLOOP_DISABLE": "0",
        "LOCAL_RANK": "0",
        "MASTER_PORT": "1",
        "PL_GLOBAL_SEED": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "0",
        "HOME": "/h",
        "CUDA_VISIBLE_DEVICES": "1",
        "SLURM_JOB_ID": "3",
        "PYTHONPATH": "/elsewhere",
    }
    child = make_environment(given)
    assert set(child) == {"HOME", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "PYTHONPATH", "PYTHONSAFEPATH"}
    assert str(Path(trial.__file__).parents[3]) in child["PYTHONPATH"].split(os.pathsep)


def test_jobs_are_told_as_they_are_asked() -> None:
    job = Job(conf="a", more=("b",), overrides=("c=1",), hunt_syncs=True)
    request = TrialRequest(job=job, out="x/\udc80")
    assert decode(json.loads(dump(request, ascii_only=True)), TrialRequest) == request
    changed = replace(job.override("d=2"), variation="resident")
    assert changed.overrides == ("c=1", "d=2") and changed.variation == "resident" and job.variation == "as_it_is"
    counted = job.counted()
    assert counted.variation == "flops" and not counted.hunt_syncs and "run.devices=1" in counted.overrides


def test_rates_are_those_of_whole_runs() -> None:
    kept = {"name": "a", "seconds": 1.0, "run_dir": Path("x"), "code": 0, "measurement": Measurement(samples_per_s=5.0)}
    assert Trial(ok=True, cause=None, **kept).samples_per_s == 5.0  # type: ignore[arg-type]
    assert Trial(ok=False, cause="hung", **kept).samples_per_s is None  # type: ignore[arg-type]


@pytest.mark.multirank
def test_two_ranks_read_one_request_and_part(tmp_path: Path, newborns: Callable[[], list[Any]]) -> None:
    found = run_trial("arm", net("run.devices=2", "run.max_steps=30", variation="no_exchange"), tmp_path)
    assert found.ok and found.measurement is not None, found.tail
    assert found.measurement.world_size == 2 and found.measurement.total_steps == 30
    assert not newborns()


@pytest.mark.slow
@pytest.mark.multirank
def test_a_rank_that_hangs_ends_them_all(tmp_path: Path, newborns: Callable[[], list[Any]]) -> None:
    begun = time.monotonic()
    job = net("run.devices=2", "recipe.at=7", "recipe.does=hang", "recipe.rank=1", "run.max_steps=25")
    found = run_trial("arm", job, tmp_path, limits=Limits(silent_s=4, grace_s=2))
    assert not found.ok and found.cause is not None and time.monotonic() - begun < 120
    assert found.cause.startswith("hung: no step, output or CPU use for 4 s at step")
    assert "in hangs" in (tmp_path / "stderr.txt").read_text(), "rank 1 says where it stands"
    assert not newborns()


@pytest.mark.parametrize(
    ("cause", "tail", "quoted"),
    [
        ("exit code 2: do", "fastloop: got a\n  why b\n  do  c", "a: b"),
        ("exit code 1: do", "Traceback …\nfastloop.errors.FastLoopError: got a\n  why b\n  do  c", "a: b"),
        ("exit code 1: x", "ValueError: got a\n  why b", "exit code 1: x"),
        ("SIGKILL", "fastloop: got a\n  why b", "SIGKILL"),
        ("fastloop: the run failed: it hung", "", "it hung"),
    ],
)
def test_our_own_error_in_a_child_is_its_cause(cause: str, tail: str, quoted: str) -> None:
    assert quote_error(cause, tail) == quoted
