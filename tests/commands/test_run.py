"""fastloop run and fastloop plan, as commands: what they leave on disk, say, and end with."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fastloop.commands import run as command
from fastloop.experiments.trials import failures
from fastloop.records import store
from fastloop.records.plan import Change, Plan, Step
from fastloop.records.store import NAMES
from tests.commands.command_line import CONTROL, CommandLine, alive, family, program, run, strictly, wait_for
from tests.trainings import NET

FILES = {
    "config.resolved.yaml",
    "config.diff.yaml",
    "env.json",
    "plan.json",
    "measurement.json",
    "verdicts.json",
    "findings.json",
    "report.md",
    "report.html",
}
PARTIAL = "; the earlier steps are in a/report.md, flagged as partial"


@pytest.fixture
def fastloop(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(tmp_path, capfd, monkeypatch)


def only(folder: Path) -> Path:
    """The one thing in a folder."""
    (there,) = folder.iterdir()
    return there


def names(folder: Path) -> set[str]:
    """What a run wrote, apart from its logger: some releases of Lightning write hyperparameters that are not there."""
    return {path.name for path in folder.iterdir()} - {"hparams.yaml", "metrics.csv"}


def read(folder: Path, name: str) -> Any:
    return strictly((folder / name).read_text())


# -- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.short
def test_a_run_writes_its_directory_and_says_where(fastloop: CommandLine) -> None:
    said = fastloop("run", NET)
    assert (said.code, said.err) == (0, "")
    where = only(only(fastloop.folder / "fastloop-runs"))
    assert where.parent.name == "net" and re.fullmatch(r"\d{8}T\d{6}Z", where.name)
    assert names(where) == FILES <= set(NAMES)
    lines = said.out.splitlines()
    assert re.match(
        r"fastloop [A-Z ,:-]+( \d+ %)?   net batch 4 32-true   1x cpu   steps 2\d-25   window too short: \d", lines[0]
    )
    assert lines[-1] == f"REPORT   {where.relative_to(fastloop.folder)}/report.html"
    assert read(where, "measurement.json")["partial"] is False


@pytest.mark.short
def test_a_run_with_rungs_says_what_took(fastloop: CommandLine) -> None:
    said = fastloop(
        "run",
        NET,
        "rungs.workers={enabled: true, count: 1},rungs.pin.enabled=true",
        "rungs.amp.enabled=true",
        "rungs.batch={enabled: true, micro_batch: 2}",
        "--json",
        "-",
    )
    assert said.code == 0
    took = {verdict["rung"]: verdict["took"] for verdict in said.json["verdicts"]}
    assert took == {"workers": True, "pin": False, "batch": True, "amp": True}
    line = next(line for line in said.err.splitlines() if line.startswith("TOOK"))
    assert line.startswith("TOOK     [approximate] workers (1 live worker")
    assert re.search(r"^INACTIVE pin: needs CUDA", said.err, re.M)
    assert said.json["plan"]["parity_class"] == "approximate"


@pytest.mark.short
def test_the_resolved_configuration_runs_again(fastloop: CommandLine) -> None:
    assert fastloop("run", NET, "run.max_steps=3", "run.seed=7", "recipe.batch=8", "--out", "first").code == 0
    text = (fastloop.folder / "first" / "config.resolved.yaml").read_text()
    base = yaml.safe_load(text)["base"]
    assert text.startswith("base: ") and not os.path.isabs(base)
    assert (fastloop.folder / "first" / base).resolve() == NET
    again = fastloop("run", "first/config.resolved.yaml", "--out", "second")
    assert again.code == 0, again.err
    assert (fastloop.folder / "second" / "config.resolved.yaml").read_text() == text
    first, second = (read(fastloop.folder / name, "measurement.json")["loss"] for name in ("first", "second"))
    assert first == second and len(first) == 3


def test_the_resolved_configuration_of_a_shipped_recipe_names_it(fastloop: CommandLine) -> None:
    said = fastloop(
        "run",
        "gpt2",
        "recipe.size=tiny",
        "run.max_steps=1",
        "trainer.accumulate_grad_batches=1",
        "run.accelerator=cpu",
        "--out",
        "a",
    )
    assert said.code == 0, said.err
    assert (fastloop.folder / "a" / "config.resolved.yaml").read_text().startswith("base: gpt2\n")
    plan = fastloop("config", "diff", "a/config.resolved.yaml", "gpt2")
    assert "run.max_steps: 1 -> 200" in plan.out
    changed = yaml.safe_load((fastloop.folder / "a" / "config.diff.yaml").read_text())
    assert changed == {
        "recipe": {"size": "tiny"},
        "trainer": {"accumulate_grad_batches": 1},
        "run": {"max_steps": 1, "accelerator": "cpu"},
    }


def test_the_diff_is_a_patch(fastloop: CommandLine) -> None:
    assert fastloop("run", NET, "run.max_steps=2", "rungs.amp.enabled=true", "--out", "a").code == 0
    shown = fastloop("config", "show", NET, "--config", "a/config.diff.yaml").out
    assert "run.max_steps: 2 " in shown and "rungs.amp.enabled: true" in shown


def test_env_json_tells_two_runs_apart_by_their_float32_flags(
    fastloop: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = []
    for precision in ("highest", "high"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert fastloop("run", NET, "run.max_steps=1", "--out", precision).code == 0
        flags.append(read(fastloop.folder / precision, "env.json")["torch_flags"])
        assert f"| float32 matrix products | {precision} |" in (fastloop.folder / precision / "report.md").read_text()
    differing = {name for name in flags[0] if flags[0][name] != flags[1][name]}
    assert differing == {"float32_matmul_precision"}
    assert {"cudnn_allow_tf32", "cudnn_benchmark", "deterministic_algorithms"} < set(flags[0])


def test_flags_that_torch_will_not_tell_cost_no_report(fastloop: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> str:  # what torch 2.9 does once a flag was set by its new name
        raise RuntimeError("mixed old and new names")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    assert fastloop("run", NET, "run.max_steps=1", "--out", "a").code == 0
    assert read(fastloop.folder / "a", "env.json")["torch_flags"]["float32_matmul_precision"] is None
    assert "| float32 matrix products | n/a |" in (fastloop.folder / "a" / "report.md").read_text()


def test_disabled_it_is_a_plain_training(fastloop: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLOOP_DISABLE", "1")
    said = fastloop("run", NET, "rungs.amp.enabled=true", "--json", "-")
    assert said.code == 0 and "nothing was measured" in said.err
    assert said.json["measurement"] is None and said.json["verdicts"] is None and said.json["schema"] == 1
    assert list(fastloop.folder.rglob("*.json")) == list(fastloop.folder.rglob("report.md")) == []


# -- where it writes --------------------------------------------------------------------------------------------------


def test_a_directory_that_is_not_empty_is_left_alone_without_force(fastloop: CommandLine) -> None:
    there = fastloop.folder / "there"
    there.mkdir()
    (there / "notes.txt").write_text("mine")
    (there / "report.md").write_text("an earlier run")
    said = fastloop("run", NET, "--out", "there")
    assert said.code == 2
    assert said.err.splitlines() == [
        "fastloop: got --out there",
        "  why the directory exists and is not empty",
        "  do  choose another directory, or add --force to write into this one",
    ]
    assert {path.name: path.read_text() for path in there.iterdir()} == {
        "notes.txt": "mine",
        "report.md": "an earlier run",
    }
    assert fastloop("run", NET, "--out", "there", "--force").code == 0
    assert (there / "notes.txt").read_text() == "mine" and (there / "report.md").read_text().startswith("# fastloop")


def test_forced_over_an_earlier_run_and_failing_it_shows_no_other_runs_report(fastloop: CommandLine) -> None:
    assert fastloop("run", NET, "--out", "there").code == 0
    assert fastloop("run", NET, "recipe.nonsense=1", "--out", "there", "--force").code == 2
    said = fastloop("run", NET, "recipe.does=not even begin", "--out", "there", "--force")
    assert said.code == 1 and "steps before that" not in said.err
    assert (fastloop.folder / "there" / "report.md").is_file(), "a mistake must not cost an earlier run"
    said = fastloop("run", NET, "recipe.at=0", "recipe.does=raise", "--out", "there", "--force")
    assert said.code == 1 and names(fastloop.folder / "there") == set()
    assert "steps before that" not in said.err


@pytest.mark.parametrize("wrong", ["recipe.size=huge", "recipe.batch=x", "trainer.precision=fp8", "run.resume=no.ckpt"])
def test_nothing_is_left_of_a_run_that_could_not_begin(wrong: str, fastloop: CommandLine) -> None:
    said = fastloop("run", NET, wrong)
    assert said.code == 2 and said.err.startswith(f"fastloop: got {wrong.partition('=')[0]}"), said.err
    assert list(fastloop.folder.iterdir()) == []


@pytest.mark.parametrize("name", ["empty.yaml", "safe.yaml"])
def test_a_file_without_a_recipe_is_named(name: str, fastloop: CommandLine) -> None:
    (fastloop.folder / name).touch()
    said = fastloop("run", f"./{name}")
    assert said.code == 2 and said.err.startswith(f"fastloop: got ./{name}\n")
    assert said.err.endswith("  do  write base: with one of cifar10, gpt2, resnet50\n")


@pytest.mark.parametrize("name", ["../../x", "läuft schon", "a b", "n" * 240])
def test_the_name_of_a_configuration_leads_nowhere_else(name: str, fastloop: CommandLine) -> None:
    (fastloop.folder / "in" / "here").mkdir(parents=True)
    path = fastloop.folder / "in" / "here" / f"{name}.yaml"
    path.write_text(f"base: {NET}\nrun: {{max_steps: 1}}\n")
    os.chdir(fastloop.folder / "in" / "here")
    said = fastloop("run", f"{name}.yaml")
    assert said.code == 0, said.err
    where = only(only(Path("fastloop-runs").absolute()))
    assert re.fullmatch(r"[\w.-]{1,80}", where.parent.name) and (where / "report.md").is_file()


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "got", "why"),
    [
        ("trainer.precision=fp8", "trainer.precision: 'fp8'", "bf16-mixed"),
        ("trainer.strategy=fastlop", "trainer.strategy: 'fastlop'", "ddp"),
        ("trainer.logger_api_key=verysecret", "trainer.logger_api_key (command line)", "takes no such argument"),
    ],
)
def test_what_lightning_would_refuse_is_said_at_its_key(wrong: str, got: str, why: str, fastloop: CommandLine) -> None:
    said = fastloop("run", NET, wrong)
    lines = said.err.splitlines()
    assert said.code == 2 and len(lines) == 3, said.err
    assert lines[0].startswith(f"fastloop: got {got}") and why in lines[1]
    assert "verysecret" not in said.err


@pytest.mark.parametrize("nothing", ["recipe.samples=0", "trainer.limit_train_batches=0"])
def test_nothing_to_train_on_is_an_error(nothing: str, fastloop: CommandLine) -> None:
    said = fastloop("run", NET, nothing)
    assert said.code == 1 and said.err.splitlines()[:2] == [
        "fastloop: got a training of 0 optimizer steps",
        "  why there is nothing to train on",
    ]
    assert "samples/s" not in said.out and "inf" not in said.out


def test_barebones_runs(fastloop: CommandLine) -> None:
    assert fastloop("run", NET, "trainer.barebones=true").code == 0


# -- resuming ---------------------------------------------------------------------------------------------------------


class Needs:
    """What a checkpoint may hold that cannot be loaded without running code."""


@pytest.fixture
def checkpoint(fastloop: CommandLine) -> Path:
    said = fastloop(
        "run",
        NET,
        "run.max_steps=8",
        "trainer.enable_checkpointing=true",
        "trainer.limit_train_batches=4",
        "--out",
        "first",
    )
    assert said.code == 0, said.err
    (found,) = (fastloop.folder / "first").rglob("*.ckpt")
    return found


@pytest.mark.short
def test_a_good_checkpoint_is_resumed(checkpoint: Path, fastloop: CommandLine) -> None:
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 8
    said = fastloop(
        "run", NET, f"run.resume={checkpoint}", "run.max_steps=12", "trainer.limit_train_batches=4", "--json", "-"
    )
    assert said.code == 0, said.err
    assert said.json["measurement"]["total_steps"] == 4, "it went on from step 8"


def test_a_checkpoint_that_runs_code_is_refused_and_can_be_trusted(checkpoint: Path, fastloop: CommandLine) -> None:
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, "mine": Needs()}, checkpoint)
    arguments = ["run", NET, f"run.resume={checkpoint}", "run.max_steps=12", "trainer.limit_train_batches=4"]
    said = fastloop(*arguments)
    assert said.code == 2 and said.out == ""
    got, why, do = said.err.splitlines()
    assert got == f"fastloop: got run.resume: {checkpoint} (command line)"
    assert (
        why.startswith("  why it holds more than tensors and plain values") and "tests.commands.test_run.Needs" in why
    )
    assert "--trust-checkpoint" in do and CONTROL.findall(said.err) == []
    assert not (fastloop.folder / "fastloop-runs").exists()
    said = fastloop(*arguments, "--trust-checkpoint", "--json", "-")
    assert said.code == 0, said.err
    assert said.json["measurement"]["total_steps"] == 4


@pytest.mark.parametrize("trust", [[], ["--trust-checkpoint"]])
def test_a_missing_checkpoint(trust: list[str], fastloop: CommandLine) -> None:
    said = fastloop("run", NET, "run.resume=gone.ckpt", *trust)
    assert (said.code, said.err.splitlines()[:2]) == (
        2,
        ["fastloop: got run.resume: 'gone.ckpt' (command line)", "  why there is no such file"],
    )


def test_a_file_that_is_no_checkpoint(fastloop: CommandLine) -> None:
    (fastloop.folder / "x.ckpt").write_bytes(pickle.dumps(Needs))
    said = fastloop("run", NET, "run.resume=x.ckpt")
    assert said.code == 2 and "holds more than tensors and plain values" in said.err


# -- a training that raises -------------------------------------------------------------------------------------------


def test_a_training_that_raises(fastloop: CommandLine) -> None:
    said = fastloop("run", NET, "recipe.at=22", "recipe.does=raise", "--json", "-", "--out", "a")
    assert said.code == 1 and said.json["run_dir"] == "a"
    assert said.json["measurement"]["partial"] is True and said.json["plan"]["rungs"] == []
    lines = said.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert 'net.py", line' in said.err and "in raises" in said.err, "the user's own line is not there"
    assert "ValueError: no luck with the key None" in lines[:-1]
    assert lines[-1] == f"fastloop: the run failed: ValueError: no luck with the key None{PARTIAL}"
    seen = read(fastloop.folder / "a", "measurement.json")
    assert seen["partial"] is True and seen["total_steps"] == 22
    report = (fastloop.folder / "a" / "report.md").read_text()
    assert "PARTIAL: the fit did not end normally" in report and "| ended | early" in report


def test_a_training_that_exits(fastloop: CommandLine) -> None:
    said = fastloop("run", NET, "recipe.at=3", "recipe.does=exit")
    exits = "its own code called sys.exit('the training has had enough')"
    assert said.code == 1 and said.err.startswith(f"fastloop: the run failed: {exits}; the earlier steps are in ")


@pytest.mark.short
def test_interrupted_by_its_own_hand(fastloop: CommandLine) -> None:
    said = fastloop("run", NET, "recipe.at=3", "recipe.does=interrupt", "--out", "a")
    assert said.code == 130 and said.out == ""
    assert said.err.splitlines()[-1] == f"fastloop: interrupted{PARTIAL}"
    assert read(fastloop.folder / "a", "measurement.json")["partial"] is True


def test_secrets_are_nowhere(fastloop: CommandLine) -> None:
    secret = "hunter2-very-secret"
    again = f"recipe.mark=user:{secret}@host"  # nothing in the key of this one says that it holds a secret
    said = [
        fastloop("run", NET, f"recipe.api_key={secret}", again, "--out", "a", *more)
        for more in (["run.max_steps=2"], ["recipe.at=1", "recipe.does=raise", "--force"])
    ]
    said.append(fastloop("run", NET, f"recipe.api_key={secret}", "recipe.batch=x"))
    said.append(fastloop("run", NET, f"recipe.api_key={secret}", f"trainer.precision={secret}"))
    said.append(fastloop("config", "show", NET, f"recipe.api_key={secret}", again))
    said.append(fastloop("rungs", "amp", f"recipe.api_key={secret}", again))
    assert [each.code for each in said] == [0, 1, 2, 2, 0, 2]
    assert "no luck with the key ***" in said[1].err and "recipe.api_key: '***'" in said[4].out
    texts = {path.name: path.read_text() for path in (fastloop.folder / "a").iterdir()}
    assert "recipe.mark=user:***@host" in texts["env.json"] and "mark: user:***@host" in texts["config.resolved.yaml"]
    assert set(texts) >= FILES | {"hparams.yaml"} and "recipe.api_key=***" in texts["env.json"]
    assert "api_key: '***'" in texts["hparams.yaml"], "the recipe saves it as a hyperparameter"
    assert texts["config.resolved.yaml"].splitlines()[1].startswith("# *** replaces a secret")
    assert [name for name, text in texts.items() if secret in text] == []
    assert not [each for each in said if secret in each.out + each.err]


# -- signals ----------------------------------------------------------------------------------------------------------


def stopped(sent: signal.Signals, folder: Path, *more: str, group: bool = False) -> tuple[int, float, str]:
    """Exit code, seconds until every process was gone, and what was said, after a signal to a training at step 22."""
    # An epoch that does not end: what is raised while workers start and end may be lost, and then comes again later.
    arguments = [
        "run",
        NET,
        "run.max_steps=1000000",
        "recipe.at=22",
        f"recipe.mark={folder}/mark",
        "recipe.samples=10000000",
        "--out",
        "a",
        *more,
    ]
    with program(*arguments, cwd=folder) as process:
        wait_for((folder / "mark").is_file)
        time.sleep(0.2)
        all_of_them = family(process)
        begun = time.monotonic()
        (os.killpg if group else os.kill)(process.pid, sent)
        code = process.wait(100)
        wait_for(lambda: not alive(all_of_them))
        spent = time.monotonic() - begun
    assert len(all_of_them) > (1 if more else 0), "there was nothing to take along"
    return code, spent, (folder / "err").read_text()


@pytest.mark.parametrize("group", [True, False], ids=["terminal", "kill"])
def test_ctrl_c(group: bool, tmp_path: Path) -> None:
    code, spent, err = stopped(signal.SIGINT, tmp_path, "recipe.workers=2", group=group)
    assert code == 130 and spent < 50, err
    # Python says what it dropped in a destructor, and torch's workers how they lost their connection, even afterwards.
    assert [line for line in err.splitlines() if line.startswith("fastloop")] == [f"fastloop: interrupted{PARTIAL}"]
    assert read(tmp_path / "a", "measurement.json")["partial"] is True
    assert "PARTIAL" in (tmp_path / "a" / "report.md").read_text()


@pytest.mark.parametrize("group", [True, False], ids=["scheduler", "kill"])
def test_sigterm(group: bool, tmp_path: Path) -> None:
    """A scheduler ends the workers, too: torch's report of their death must not end ours."""
    code, spent, err = stopped(signal.SIGTERM, tmp_path, "recipe.workers=2", group=group)
    assert code == 143 and spent < 50, err
    assert [line for line in err.splitlines() if line.startswith("fastloop")] == [f"fastloop: terminated{PARTIAL}"]
    assert read(tmp_path / "a", "measurement.json")["partial"] is True


def test_sigterm_while_a_step_hangs(tmp_path: Path) -> None:
    code, spent, err = stopped(signal.SIGTERM, tmp_path, "recipe.workers=1", "recipe.does=hang")
    assert code == 143 and 2 < spent < 50, err
    seen = read(tmp_path / "a", "measurement.json")
    assert seen["partial"] is True and seen["total_steps"] == 22


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_stopped_before_it_began(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    arguments = ["run", NET, "recipe.does=be slow to begin", f"recipe.mark={tmp_path}/mark"]
    with program(*arguments, cwd=tmp_path) as process:
        wait_for((tmp_path / "mark").is_file)
        assert (tmp_path / "fastloop-runs").is_dir()
        process.send_signal(sent)
        assert process.wait(100) == code
    *slow, last = (tmp_path / "err").read_text().splitlines()
    assert last in ("fastloop: interrupted", "fastloop: terminated")
    assert slow in ([], ["starting: importing torch and Lightning"]), "said where that takes seconds"
    assert not (tmp_path / "fastloop-runs").exists()


# -- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.multirank
def test_two_ranks_write_one_report(tmp_path: Path) -> None:
    arguments = ["run", NET, "run.devices=2", "rungs.overlap.enabled=true", "--json", "two.json", "--out", "a"]
    said = run(*arguments, cwd=tmp_path, executed=True)
    assert said.code == 0, said.err
    assert names(tmp_path / "a") == FILES
    assert len(re.findall(r"^fastloop ", said.out, flags=re.M)) == 1 and said.out.count("REPORT") == 1
    assert "2x cpu" in said.out and "TOOK     [exact] overlap" in said.out
    content = read(tmp_path, "two.json")
    assert content["measurement"]["world_size"] == 2 and content["measurement"]["global_batch"] == 8
    assert content["run_dir"] == "a"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "err", "out", "two.json"]


@pytest.mark.multirank
def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    arguments = ["run", NET, "run.devices=2", "run.max_steps=1000000", "recipe.at=3", "--out", "a", "--json", "-"]
    said = run(*arguments, "recipe.does=raise", "recipe.rank=0", cwd=tmp_path)
    assert said.code == 1 and said.json["measurement"]["partial"] is True, said.err
    assert "ValueError: no luck" in said.err and read(tmp_path / "a", "measurement.json")["partial"] is True


@pytest.mark.multirank
def test_two_ranks_are_terminated(tmp_path: Path) -> None:
    code, spent, err = stopped(signal.SIGTERM, tmp_path, "run.devices=2")
    assert code == 143 and spent < 50, err
    assert err.count("fastloop: terminated") == 1


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0"}, True),
        ({"RANK": ""}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"RANK": "2", "LOCAL_RANK": "0"}, False),
        ({"NODE_RANK": "1"}, False),
        ({"SLURM_PROCID": "3"}, False),
    ],
    ids=str,
)
def test_one_rank_speaks(variables: dict[str, str], first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in failures._RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert failures.is_first_rank() is first


# -- plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "samples", "batches", "size"),
    [
        ([], 4, 1, 96),  # 4 samples of 16 + 8 bytes
        (["trainer.accumulate_grad_batches=3"], 12, 1, 96),
        (["trainer.accumulate_grad_batches=3", "run.devices=2"], 24, 1, 96),
        (["rungs.workers={enabled: true, count: 2, prefetch_factor: 3}"], 4, 7, 672),
        (["recipe.workers=2", "recipe.prefetch=5"], 4, 11, 1056),
        (["recipe.workers=2", "recipe.prefetch=5", "rungs.workers.enabled=true"], 4, 11, 1056),
        (["rungs.batch={enabled: true, micro_batch: 2}"], 4, 1, 96),
        (["trainer.accumulate_grad_batches=4", "rungs.batch={enabled: true, micro_batch: 8}"], 16, 1, 384),
        (
            [
                "trainer.accumulate_grad_batches=4",
                "rungs.batch={enabled: true, micro_batch: 8}",
                "rungs.workers={enabled: true, count: 1, prefetch_factor: 2}",
            ],
            16,
            3,
            1152,
        ),
    ],
    ids=[
        "plain",
        "accumulated",
        "two ranks",
        "workers",
        "own workers",
        "own workers stand",
        "split",
        "merge",
        "merge with workers",
    ],
)
def test_the_numbers_of_a_plan(
    arguments: list[str], samples: int, batches: int, size: int, fastloop: CommandLine
) -> None:
    said = fastloop("plan", NET, *arguments, "--json", "-")
    assert said.code == 0, said.err
    found = said.json["samples_per_step"], said.json["batches_in_flight"], said.json["bytes_in_flight"]
    assert found == (samples, batches, size)
    assert f"samples per optimizer step: {samples} (batch 4 x " in said.err
    assert re.search(r"(x 1 rank|x [2-9] ranks)\)$", said.err, flags=re.M)
    assert f"batches in flight: {batches} per rank" in said.err
    assert [path.name for path in fastloop.folder.iterdir()] == []


def test_a_plan_trains_nothing_and_says_what_each_rung_would_do(fastloop: CommandLine) -> None:
    said = fastloop("plan", NET, "--config", "safe", "recipe.at=0", "recipe.does=raise")
    lines = said.out.splitlines()
    assert (said.code, said.err) == (0, "")
    assert lines[0].startswith("net: 1x cpu, SingleDeviceStrategy, 32-true, ")
    assert re.search(r"^planned  workers   loader.num_workers=\d, .*\[exact\]$", said.out, flags=re.M)
    assert re.search(r"^skipped  pin       needs CUDA", said.out, flags=re.M)
    assert "no rung is enabled; try --config safe" in fastloop("plan", NET).out


def test_a_plan_under_strict(fastloop: CommandLine) -> None:
    said = fastloop("plan", NET, "rungs.pin.enabled=true", "strict=true")
    assert said.code == 2
    assert said.err.splitlines()[0] == "fastloop: got rungs.pin (command line)"
    why = "  why with strict: true, a rung that cannot apply is an error: needs CUDA"
    assert said.err.splitlines()[1].startswith(why)
    assert said.err.splitlines()[2] == "  do  write rungs.pin.enabled: false, or strict: false"


def test_a_plan_for_an_empty_dataset(fastloop: CommandLine) -> None:
    said = fastloop("plan", NET, "recipe.samples=0")
    assert said.code == 1 and "fastloop: got a train loader of 0 batches\n" in said.err


def test_a_plans_lines() -> None:
    change = Change(wants={"a.b": 1, "c": None}, parity="approximate", notes=("mind the gap",))
    steps = (
        Step(rung="amp", status="planned", change=change),
        Step(rung="pin", status="skipped", reason="no"),
        Step(rung="batch", status="waiting", change=change, reason="waits for x"),
    )
    assert command.describe_plan(Plan(steps=steps)) == [
        "planned  amp       a.b=1, c=None  [approximate]",
        "                   note: mind the gap",
        "skipped  pin       no",
        "waiting  batch     waits for x",
        "                   note: mind the gap",
    ]


def test_a_full_disk_fails_a_run_that_still_tells_what_it_measured(
    fastloop: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(where: Path, contents: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "write", fill)
    with pytest.warns(UserWarning, match="could not be written"):
        said = fastloop("run", NET, "--json", "-", "--out", "a")
    assert said.code == 1 and said.json["measurement"]["total_steps"] > 0
    assert "fastloop: got run directory a\n  why it cannot be written: No space left on device\n  do  free" in said.err


def test_the_json_of_a_run_and_of_its_report_are_one(fastloop: CommandLine) -> None:
    ran = fastloop("run", NET, "rungs.amp.enabled=true", "--json", "-", "--out", "a").json
    assert fastloop("report", "a", "--json", "-").json == json.loads(json.dumps(ran))
