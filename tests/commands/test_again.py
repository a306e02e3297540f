"""With what a run can be run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastloop.commands.again import configuration, is_run
from fastloop.config import from_callback, to_yaml
from tests.commands.command_line import NET

pytestmark = pytest.mark.short


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "measurement.json").write_text("{}")
    return tmp_path


def test_a_configuration_with_a_recipe_can_be_run_again(here: Path) -> None:
    path = here / "a" / "config.resolved.yaml"
    assert configuration(Path("a")) is None, "there is none"
    path.write_text(f"base: {NET}\n" + to_yaml(from_callback(None)[0]).replace("recipe: {}\n", ""))
    assert configuration(Path("a")) == Path("a/config.resolved.yaml") and configuration(here / "a") == path
    path.write_text("base: cifar10\n")
    assert configuration(Path("a")) is not None


def test_a_scripts_cannot_nor_one_whose_recipe_is_gone(here: Path) -> None:
    path = here / "a" / "config.resolved.yaml"
    path.write_text(to_yaml(from_callback("safe")[0]))
    assert configuration(Path("a")) is None
    path.write_text("base: ../gone/net.yaml\n")
    assert configuration(Path("a")) is None


def test_what_is_a_run(here: Path) -> None:
    assert is_run("a") and is_run("a/") and is_run(str(here / "a"))
    assert not is_run("b") and not is_run(str(NET)) and not is_run("a/measurement.json") and not is_run("x" * 300)
    (here / "b").mkdir()
    assert not is_run("b"), "a directory without a run"
    (here / "a").rename(here / "gpt2")
    assert not is_run("gpt2") and is_run("./gpt2"), "a recipe's name means the recipe"
