"""A script as an arm: what it is told, what comes back, and what is named where nothing does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastloop.config.loading import diff
from fastloop.errors import ConfigError
from fastloop.experiments.ab import script_arms
from fastloop.experiments.ab.arms import Arm, Ask
from fastloop.experiments.ab.script_arms import ScriptArm, make_command, runs_under_this_python
from fastloop.experiments.trials import supervise
from fastloop.experiments.trials.supervise import Ended, Limits
from fastloop.experiments.trials.trial import read_finished
from fastloop.records.measurement import Measurement
from fastloop.records.store import decode
from fastloop.records.trial import GradientAnswer, ScriptEvent, Trial
from tests.commands.command_line import run
from tests.trainings import TRAIN

SECRET = "sk-nobody-may-see-this"


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_starts: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def arm(args: str = "", **settings: Any) -> ScriptArm:
    return ScriptArm(name="arm", command=make_command(str(TRAIN), args), **settings)


def test_what_surely_runs_under_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for place, name in ((own, "python"), (own, "torchrun"), (own, "srun"), (other, "python3")):
        place.mkdir(exist_ok=True)
        (place / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", os.pathsep.join((str(own), str(other))))
    assert runs_under_this_python([str(own / "python"), "x.py"]) and runs_under_this_python(["torchrun", "x.py"])
    assert not runs_under_this_python(["python3", "x.py"]), "of another environment"
    assert not runs_under_this_python(["srun", "python", "x.py"]), "maybe of another machine"
    assert not runs_under_this_python(["nothing"])


def told(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newborns: Callable[[], list[Any]]) -> None:
    """One that trains in full order, and then fails for want of what a whole training would have left."""
    for name, value in {
        "MASTER_PORT": "1",
        "RANK": "0",
        "PL_TRAINER_X": "mine",
        "PL_GLOBAL_SEED": "99",
        "PYTHONPATH": "relative",
        "FASTLOOP_RECIPES": "x",
    }.items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    tries: Arm = arm("--does 'fails later' --tell seen.json", seed=5, overrides=("rungs.amp.enabled=true",))
    ask = Ask(seed=2, steps=40, warmup=7, ledger=True)
    found = tries.run("arm 1", tmp_path / "a" / "1", ask, progress=lines.append)
    assert found.ok and found.cause is None and found.last_step == 40 and found.measurement is not None
    assert (found.measurement.total_steps, found.measurement.warmup_steps) == (40, 7)
    assert found.samples_per_s == found.measurement.samples_per_s > 0
    assert found.after_fit == "exit code 1 at step 40: ValueError: no checkpoint to test" and found.lacked_checkpoint
    assert "arm 1: its fit was measured; the code after it needs a checkpoint, but these runs write none" in lines
    names = {path.name for path in found.run_dir.iterdir()}
    assert {"measurement.json", "report.md", "ledger.json", "trial.json", "stdout.txt", "stderr.txt", "beat"} <= names
    verdicts = told(found.run_dir / "verdicts.json")["verdicts"]
    assert [(each["rung"], each["took"]) for each in verdicts] == [("amp", True)]
    assert read_finished(found.run_dir) == found and told(found.run_dir / "trial.json")["name"] == "arm 1"
    seen = told(tmp_path / "seen.json")
    environ: Mapping[str, str] = seen["environ"]
    assert (environ["PL_GLOBAL_SEED"], environ["PL_TRAINER_X"], seen["cwd"]) == ("7", "mine", str(tmp_path))
    assert not {"MASTER_PORT", "RANK", "FASTLOOP_RECIPES", "PYTHONSAFEPATH"} & set(environ)
    assert environ["PYTHONPATH"].split(os.pathsep)[1:] == ["relative"] and seen["path"][0] == str(TRAIN.parent)
    assert len(seen["losses"]) == 40
    assert not newborns() and not list(tmp_path.glob("fastloop-exec-*"))


@pytest.mark.slow
def test_runs_with_another_seed_are_other_trainings(tmp_path: Path) -> None:
    for seed in (1, 2):
        arm(f"--epochs 1 --tell {seed}.json").run("arm", tmp_path / str(seed), Ask(seed=seed, steps=4, warmup=1))
    losses = [told(tmp_path / f"{seed}.json")["losses"] for seed in (1, 2)]
    assert len(losses[0]) == len(losses[1]) == 4 and losses[0] != losses[1]


LOGS = """
import pathlib, torch, lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

trainer = pl.Trainer(accelerator="cpu", max_steps=8, enable_checkpointing=False, log_every_n_steps=1)
trainer.fit(BoringModel())
pathlib.Path("read.txt").write_text(" ".join(each.name for each in pathlib.Path(trainer.log_dir).iterdir()))
"""


@pytest.mark.slow
def test_the_logs_of_a_trial_are_in_its_folder(tmp_path: Path) -> None:
    script = tmp_path / "logs.py"
    script.write_text(LOGS)
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True)
    in_a_shell = [*(tmp_path / "lightning_logs").iterdir()]
    assert [each.name for each in in_a_shell] == ["version_0"] and Path("read.txt").read_text()
    Path("read.txt").unlink()
    for number in range(2):
        logs = ScriptArm(name="arm", command=make_command(str(script)))
        found = logs.run("arm", tmp_path / "a" / str(number), Ask(steps=8, warmup=2))
        assert found.ok and found.code == 0, found.tail
        assert [each.name for each in (found.run_dir / "lightning_logs").iterdir()] == ["version_0"]
        assert Path("read.txt").read_text(), "the script finds its own logs"
    assert [*(tmp_path / "lightning_logs").iterdir()] == in_a_shell


def ckpts() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path("ckpts").iterdir())}


@pytest.mark.slow
def test_the_users_checkpoints_stay_as_they_are(tmp_path: Path) -> None:
    script = (sys.executable, TRAIN, "--ckpts", "ckpts", "--epochs")
    real = run("exec", "--out", "real", "--", *script, "1", cwd=tmp_path)
    before = ckpts()
    assert real.code == 0 and set(before) == {"last.ckpt", "epoch=0-step=60.ckpt"}, "the real run saves"
    tries = arm("--epochs 9 --ckpts ckpts")
    for name, ask in {"timed": Ask(steps=30, warmup=5), "gradients": Ask(variation="gradients")}.items():
        found = tries.run(name, tmp_path / name, ask)
        assert found.ok and (found.began, found.unsaved) == (60, True), found.cause
        assert ckpts() == before
    again = run("exec", "--out", "again", "--", *script, "2", cwd=tmp_path)
    assert again.code == 0 and ckpts() != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "ask", "cause"),
    [
        ("--does never", Ask(), "train.py made a Trainer, but never called fit"),
        ("--does exits --epochs 1", Ask(steps=60), "exit code 3 at step 25"),
        (
            "--epochs 1",
            Ask(steps=90, warmup=70),
            "the fit of train.py ended after 64 steps, before the window, which opens after 70",
        ),
        (f"--does raises --api-key {SECRET}", Ask(), "exit code 1 at step 25: ValueError: no luck with the key ***"),
    ],
    ids=["never", "exits", "short", "raises"],
)
def test_why_there_is_no_rate(args: str, ask: Ask, cause: str, tmp_path: Path) -> None:
    (tmp_path / "measurement.json").write_text('{"samples_per_s": 99}')
    found = arm(args).run("arm", tmp_path, ask)
    assert not found.ok and found.samples_per_s is None and read_finished(tmp_path) is None
    assert found.cause is not None and found.cause.startswith(cause)
    assert not any(SECRET in path.read_text() for path in tmp_path.glob("*.json"))
    assert SECRET not in found.tail and ("ValueError" in found.tail) is ("raises" in args)


@pytest.mark.slow
def test_a_script_that_hangs_is_ended_and_says_where(tmp_path: Path, newborns: Callable[[], list[Any]]) -> None:
    found = arm("--does hangs").run("arm", tmp_path, Ask(), limits=Limits(silent_s=6, grace_s=2))
    assert found.cause is not None
    assert re.fullmatch(r"hung: no step, output or CPU use for 6 s at step \d+; it was ended", found.cause)
    assert "in misbehave" in (tmp_path / "stderr.txt").read_text(), "the line it hangs in"
    assert not newborns()


UNEVEN = f"""
import runpy
from fastloop.bridge.watch import session
session.LIMIT_S = 4.0  # the first rank's patience with the other, which waits for the first
if __name__ == "__main__":
    runpy.run_path({str(TRAIN.parents[1] / "planted_scripts" / "uneven.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.multirank
def test_a_run_in_which_a_rank_died_has_failed_although_the_first_ended_well(tmp_path: Path) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN)
    tries = ScriptArm(name="arm", command=make_command(str(script)))
    found = tries.run("arm", tmp_path, Ask(steps=60, warmup=5, ledger=True))
    assert found.code == 0 and found.measurement is not None and not found.measurement.partial, "rank 0 saw nothing"
    assert found.measurement.total_steps == 45 and not told(tmp_path / "ledger.json")["partial"]
    assert not found.ok and found.samples_per_s is None and read_finished(tmp_path) is None
    # It may be killed with the run, when rank 0 has gone, before it has said that the connection was closed.
    assert re.match(r"rank 1 died in its fit( at step 45: RuntimeError: .+|: it was killed)", found.cause or "")


def test_what_is_no_lightning_script(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('hello')\n")
    tries = ScriptArm(name="arm", command=make_command("plain.py"))
    found = tries.run("arm", tmp_path / "a", Ask())
    assert (found.ok, found.code, found.last_step) == (False, 0, None)
    assert found.cause is not None and found.cause.startswith("plain.py ended without creating a Trainer")
    assert (tmp_path / "a" / "stdout.txt").read_text() == "hello\n"
    gone = ScriptArm(name="arm", command=("no-such-program",)).run("arm", tmp_path / "b", Ask())
    assert gone.code == 127 and gone.cause is not None and "No such file" in gone.cause


# -- causes that need no run ------------------------------------------------------------------------------------------

WELL = Ended(code=0, cause=None, seconds=1.0, last_step=9, tail="")
KILLED = Ended(code=-9, cause="killed by SIGKILL at step 9", seconds=1.0, last_step=9, tail="")


@pytest.mark.parametrize(
    ("measured", "ended", "cause"),
    [
        ({"partial": False, "samples_per_s": 3.0, "total_steps": 30}, WELL, None),
        ({"partial": False, "samples_per_s": 3.0, "total_steps": 30}, KILLED, None),
        ({"partial": True, "samples_per_s": 3.0, "total_steps": 9}, KILLED, "killed by SIGKILL at step 9"),
        (
            {"partial": True, "samples_per_s": None, "total_steps": 9},
            WELL,
            "x exited after 9 steps, inside its fit: SystemExit: 0",
        ),
        (
            {"partial": False, "samples_per_s": None, "total_steps": 20},
            WELL,
            "the fit of x ended after 20 steps, before the window, which opens after 20",
        ),
        (None, KILLED, "killed by SIGKILL at step 9"),
        (None, WELL, "x ended without creating a Trainer"),
    ],
    ids=["well", "killed-after-the-fit", "killed", "exited", "short", "killed-before", "none"],
)
def test_a_fit_that_came_to_its_end_counts(measured: dict[str, Any] | None, ended: Ended, cause: str | None) -> None:
    events = [] if measured is None else [ScriptEvent(event="exception", why="SystemExit: 0")]
    found = script_arms._find_cause("x", decode(measured, Measurement), 20, ended, events)
    assert found is cause if cause is None else str(found).startswith(cause)


def test_a_fit_ends_on_all_its_ranks() -> None:
    whole = Measurement(samples_per_s=3.0, total_steps=30, world_size=2)
    died = ScriptEvent(event="exception", rank=1, step=12, measured=True, why="RuntimeError: closed")
    cause = script_arms._find_cause("x", whole, 20, WELL, [ScriptEvent(event="fit_ended", measured=True), died])
    assert cause == "rank 1 died in its fit at step 12: RuntimeError: closed"
    assert script_arms._find_cause("x", whole, 20, WELL, [replace(died, measured=False)]) is None, "of another fit"


@pytest.mark.parametrize(("answer", "code", "ok"), [({"deviation": 0.0}, 0, True), (None, 0, False), (None, 1, False)])
def test_gradients_are_an_answer_and_no_rate(
    answer: dict[str, Any] | None, code: int, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[dict[str, Any]] = []

    def supervised(command: list[str], folder: Path, **_: Any) -> Ended:
        (path,) = (each.partition("=")[2] for each in command if each.startswith("FASTLOOP_EXEC="))
        orders.append(told(Path(path)))
        if answer is not None:
            (folder / "answer.json").write_text(json.dumps(answer))
        return Ended(code=code, cause="exit code 1: x" if code else None, seconds=1.0, last_step=None, tail="")

    monkeypatch.setattr(supervise, "supervise", supervised)
    ask = Ask(variation="gradients", steps=5, reference=Path("base"))
    found: Trial = arm(overrides=("rungs.amp.enabled=true",)).run("arm", tmp_path / "a", ask)
    assert (found.ok, found.answer, found.samples_per_s) == (ok, decode(answer, GradientAnswer), None)
    assert found.cause == {0: None if ok else found.cause, 1: "exit code 1: x"}[code]
    assert orders[0]["reference"] == str(tmp_path / "base") and orders[0]["max_steps"] is None
    assert orders[0]["config"]["rungs"] == {"amp": {"enabled": True}}
    assert orders[0]["config"]["watch"] == {"enabled": False}, "what nobody reads is not timed"


# -- what cannot be asked ---------------------------------------------------------------------------------------------


def test_the_configuration_is_the_callbacks(tmp_path: Path) -> None:
    base, fast = arm().config(), arm(more=("workers",), overrides=("watch.warmup_steps=3",)).config()
    assert {key for key, *_ in diff(base, fast)} == {"rungs.workers.enabled", "watch.warmup_steps"}
    (tmp_path / "patch.yaml").write_text("rungs: {amp: {enabled: true}}\ntrainer:\n  gradient_clip_val: 1.0\n")
    with pytest.raises(ConfigError, match=r"trainer\.gradient_clip_val \(patch\.yaml:3\)\n  why trainer describes"):
        arm(more=("patch.yaml",)).config()
    for override in ("run.max_steps=5", "recipe.size=tiny"):
        with pytest.raises(
            ConfigError, match=r"\(command line\)\n  why (run|recipe) describes a run, but a script sets"
        ):
            arm(overrides=(override,)).config()
    with pytest.raises(ConfigError, match=r"rungs\.worker \(command line\)"):
        arm(overrides=("rungs.worker.count=2",)).run("arm", tmp_path / "a", Ask())
    assert not (tmp_path / "a").exists()


def test_the_command_behind_a_script(tmp_path: Path) -> None:
    assert make_command(str(TRAIN), "--lr 0.1 --name 'a b'")[1:] == (str(TRAIN), "--lr", "0.1", "--name", "a b")
    assert make_command(str(TRAIN))[0] == sys.executable
    assert make_command(f"env -i python {TRAIN}", "-x") == ("env", "-i", "python", str(TRAIN), "-x")
    spaced = tmp_path / "my scripts" / "train it.py"
    spaced.parent.mkdir()
    spaced.touch()
    assert make_command(str(spaced), "-x") == (sys.executable, str(spaced), "-x")
    assert make_command(f"env -i python '{spaced}'") == ("env", "-i", "python", str(spaced))
    with pytest.raises(ConfigError, match=r"--script no\.py\n  why there is no such file"):
        make_command("no.py")
    with pytest.raises(ConfigError, match="belong in --args") as caught:
        make_command(f"'{spaced}' --lr 0.1", "--name 'a b'")
    assert caught.value.do == f"write --script '{spaced}' --args '--lr 0.1 --name '\"'\"'a b'\"'\"''"
    with pytest.raises(ConfigError, match="belong in --args") as caught:
        make_command(f"{TRAIN} --lr 0.1")
    assert caught.value.do == f"write --script {TRAIN} --args '--lr 0.1'"
    (tmp_path / "src").mkdir()
    with pytest.raises(ConfigError, match=r"it is a directory, not a script\n  do  write the path of a script"):
        make_command(str(tmp_path / "src"))
    for name in ("model.py", "train.py"):
        (tmp_path / "src" / name).touch()
    with pytest.raises(ConfigError, match=r"do  write a script in it: .*/src/train\.py"):
        make_command(str(tmp_path / "src"))
    (tmp_path / "my dir").mkdir()
    (tmp_path / "my dir" / "train.py").touch()
    with pytest.raises(
        ConfigError, match=r"it is a directory, not a script\n  do  write a script in it: '.*/my dir/train"
    ):
        make_command(str(tmp_path / "my dir"))
    with pytest.raises(ConfigError, match="cannot be parsed"):
        make_command(str(TRAIN), "'open")
    with pytest.raises(ConfigError, match="there is no such command"):
        make_command("torchrum train.py")


@pytest.mark.parametrize(("name", "value"), [("FASTLOOP_DISABLE", "1"), ("WORLD_SIZE", "2")])
def test_where_a_run_cannot_be_trusted_it_is_refused(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        arm().run("arm", tmp_path / "a", Ask())
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("variation", ["flops", "rates", "loader"])
def test_what_a_script_cannot_show(variation: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="that is not visible from its Trainer"):
        arm().run("arm", tmp_path / "a", Ask(variation=variation))
