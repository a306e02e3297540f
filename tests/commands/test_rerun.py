"""With what a run can be run again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fastloop.commands.rerun import find_configuration, is_run, name_base, name_command, to_prove
from fastloop.config.layers import classify_patch
from fastloop.config.loading import load_callback_config, to_yaml
from fastloop.records.plan import Finding
from tests.trainings import NET

pytestmark = pytest.mark.short


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "measurement.json").write_text("{}")
    return tmp_path


def test_a_configuration_with_a_recipe_can_be_run_again(here: Path) -> None:
    path = here / "a" / "config.resolved.yaml"
    assert find_configuration(Path("a")) is None, "there is none"
    path.write_text(f"base: {NET}\n" + to_yaml(load_callback_config(None)[0]).replace("recipe: {}\n", ""))
    assert find_configuration(Path("a")) == Path("a/config.resolved.yaml") and find_configuration(here / "a") == path
    path.write_text("base: cifar10\n")
    assert find_configuration(Path("a")) is not None


def test_a_scripts_cannot_nor_one_whose_recipe_is_gone(here: Path) -> None:
    path = here / "a" / "config.resolved.yaml"
    path.write_text(to_yaml(load_callback_config("safe")[0]))
    assert find_configuration(Path("a")) is None
    path.write_text("base: ../gone/net.yaml\n")
    assert find_configuration(Path("a")) is None


def test_what_is_a_run(here: Path) -> None:
    assert is_run("a") and is_run("a/") and is_run(str(here / "a"))
    assert not is_run("b") and not is_run(str(NET)) and not is_run("a/measurement.json") and not is_run("x" * 300)
    (here / "b").mkdir()
    assert not is_run("b"), "a directory without a run"
    (here / "a").rename(here / "gpt2")
    assert not is_run("gpt2") and is_run("./gpt2"), "a recipe's name means the recipe"


def find(*rungs: Any) -> list[Finding]:
    return [Finding(bottleneck="h2d"), *(Finding(bottleneck="data_wait", patch={"rungs": each}) for each in rungs)]


WORKERS = find({"workers": {"enabled": True}}, {"pin": {"enabled": True}})


@pytest.mark.parametrize(
    ("argv", "base"),
    [
        (["train.py"], "--script train.py"),
        (["my train.py", "--lr", "0.1"], "--script 'my train.py' --args '--lr 0.1'"),
        (["-c"], "--script train.py"),
        (None, "--script train.py"),
        ([], "--script train.py"),
    ],
)
def test_a_scripts_patch_is_proven_on_the_script(argv: Any, base: str, here: Path) -> None:
    (here / "a" / "config.resolved.yaml").write_text(to_yaml(load_callback_config(None)[0]))
    (here / "a" / "env.json").write_text(json.dumps({"argv": argv}))
    assert to_prove(WORKERS, name_base(Path("a"))) == f"fastloop ab {base} --vs workers"
    assert to_prove(find(), "gpt2") is None


def test_a_command_is_proven_as_it_was_run() -> None:
    command = [sys.executable, "my train.py", "--lr", "0.1"]
    assert name_command(command, "safe") == "--script 'my train.py' --args '--lr 0.1' --config safe"
    assert "hunter2" not in name_command([*command, "--api-key", "hunter2-very-secret"])
    assert name_command(["torchrun", "train.py", "--lr", "1"]) == "--script 'torchrun train.py --lr 1'"
    assert name_command(["/another/python3", "train.py"]) == "--script '/another/python3 train.py'"


@pytest.mark.parametrize(
    ("rungs", "vs"),
    [
        ({"pin": {"enabled": True}, "prefetch": {"enabled": True}}, "pin,prefetch"),
        ({"batch": {"enabled": True, "micro_batch": 32}}, "rungs.batch.enabled=true,rungs.batch.micro_batch=32"),
    ],
)
def test_a_recipes_patch_is_proven_on_its_configuration(rungs: Any, vs: str, here: Path) -> None:
    (here / "a" / "config.resolved.yaml").write_text("base: cifar10\n")
    asked = to_prove(find(rungs), name_base(Path("a")))
    assert asked == f"fastloop ab a/config.resolved.yaml --vs {vs}"
    layered = [classify_patch(part) for part in vs.split(",")]
    assert all(kind in ("more", "override") for kind, _ in layered)
