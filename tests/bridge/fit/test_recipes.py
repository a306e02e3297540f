"""Recipes: a Python file beside its YAML, shipped or one's own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from fastloop.bridge.fit import recipe_modules, recipes
from fastloop.config.loading import Config, load
from fastloop.config.shipped import find_shipped
from fastloop.errors import ConfigError
from tests.commands.command_line import ROOT
from tests.trainings import NET

RECIPE = """
import lightning as L
from dataclasses import dataclass
from .beside import NUMBER

@dataclass(frozen=True, kw_only=True)
class Settings:
    size: str = "default"
    rate: float = 0.1

class Sample:
    pass

def build(settings):
    return (settings, NUMBER), L.LightningDataModule()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(recipe_modules.FOLDER, "")
    return tmp_path


def written(folder: Path, name: str = "mine", code: str = RECIPE, number: int = 1) -> Config:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    (folder / "beside.py").write_text(f"NUMBER = {number}\n")
    (folder / f"{name}.yaml").write_text("recipe: {size: tiny}\n")
    return load(str(folder / f"{name}.yaml"))


def test_settings_and_neighbors(here: Path) -> None:
    (settings, number), _ = recipes.build_recipe(written(here / "a", number=7))
    assert (settings.size, settings.rate, number) == ("tiny", 0.1, 7)


def test_two_folders_with_the_same_names(here: Path) -> None:
    first, second = written(here / "a", number=1), written(here / "b", number=2)
    assert [recipes.build_recipe(config)[0][1] for config in (first, second, first)] == [1, 2, 1]


@pytest.mark.parametrize("name", sorted(find_shipped("recipes")))
@pytest.mark.short
def test_shipped_ones_load_by_name(name: str) -> None:
    module = recipes.load(load(name))
    assert module.__name__ == f"fastloop.bridge.fit.recipe_modules.{name}" and callable(module.build)
    assert recipe_modules.FOLDER not in os.environ, "only a recipe of one's own needs to be told to the workers"


@pytest.mark.parametrize(
    ("code", "got", "why"),
    [
        (RECIPE.replace("build(", "bild("), "{path}", "a recipe needs build, but this file has none"),
        (RECIPE.replace("Settings:", "Setting:"), "{path}", "a recipe needs Settings"),
        (
            RECIPE.replace("(settings, NUMBER), L.LightningDataModule()", "None"),
            "the result of build() in {path}",
            "it is of type NoneType",
        ),
        (
            RECIPE.replace("(settings, NUMBER), L.LightningDataModule()", "1, 2"),
            "the result of build() in {path}",
            "it is a tuple of int, int",
        ),
    ],
    ids=["no build", "no Settings", "nothing", "no datamodule"],
)
def test_a_recipe_that_lacks_something(code: str, got: str, why: str, here: Path) -> None:
    config = written(here / "a", code=code)
    with pytest.raises(ConfigError, match=why) as caught:
        recipes.build_recipe(config)
    assert caught.value.got == got.format(path=here / "a" / "mine.py")


def test_settings_it_does_not_have(here: Path) -> None:
    config = written(here / "a")
    (here / "a" / "mine.yaml").write_text("recipe: {siz: tiny}\n")
    with pytest.raises(ConfigError, match=r"recipe\.siz \(a/mine\.yaml:1\)") as caught:
        recipes.build_recipe(load("a/mine.yaml"))
    assert caught.value.do == "write size" and config.recipe == {"size": "tiny"}


def test_a_name_that_python_cannot_import(here: Path) -> None:
    with pytest.raises(ConfigError, match="Python cannot import a file with a dot") as caught:
        recipes.load(written(here / "a", name="net-1.2"))
    assert caught.value.do == "rename it, and its YAML with it"
    assert recipes.load(written(here / "a", name="net-1")).NUMBER == 1, "a dash is no obstacle"


def test_no_recipe() -> None:
    with pytest.raises(ConfigError, match="there is nothing to train") as caught:
        recipes.build_recipe(load("safe"))
    assert caught.value.got == "safe" and "cifar10, gpt2, resnet50" in caught.value.do


@pytest.mark.parametrize(("file", "do"), [("config.resolved.yaml", "fastloop exec --config"), ("my.yaml", "base:")])
def test_what_a_script_was_trained_with_trains_one_again(file: str, do: str, here: Path) -> None:
    """Its run directory has a configuration to run again, which then named nothing to train."""
    (here / file).write_text("rungs: {host: {enabled: true}}\n")
    with pytest.raises(ConfigError, match="there is nothing to train") as caught:
        recipes.build_recipe(load(file))
    assert do in caught.value.do


@pytest.mark.parametrize("own", [True, False], ids=["own", "shipped"])
def test_another_process_can_unpickle_what_it_defines(own: bool, here: Path, quick_starts: None) -> None:
    """As a loader's worker has to that starts by spawn."""
    module = recipes.load(written(here / "a") if own else load("gpt2"))
    (here / "x.pickle").write_bytes(pickle.dumps(module.Sample if own else module.Settings(size="tiny")))
    program = "import pickle; print(pickle.load(open('x.pickle', 'rb')))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert ("mine.Sample" if own else "Settings(size='tiny'") in done.stdout


def test_the_recipe_of_these_tests_is_one() -> None:
    module, data = recipes.build_recipe(load(str(NET), overrides=["recipe.batch=2"]))
    assert data.train_dataloader().batch_size == 2 and module.settings.samples == 64
