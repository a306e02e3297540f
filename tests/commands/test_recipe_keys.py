"""Keys that a recipe has not, found from its file alone."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from fastloop.bridge.fit import recipes
from fastloop.bridge.fit.recipe_modules import FOLDER
from fastloop.commands.config import check_without_torch, read_fields
from fastloop.config.loading import load
from fastloop.config.shipped import find_shipped
from fastloop.errors import ConfigError
from tests.trainings import NET

PLAIN = """
from dataclasses import dataclass
import no_such_module

@dataclass(frozen=True, kw_only=True)
class Settings:
    \"\"\"Its settings.\"\"\"
    size: str = "default"
    kinds: ClassVar[int] = 3
    data: str | None = None

    def __post_init__(self) -> None:
        here: int = 1
"""


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What loading a recipe sets is gone afterwards."""
    monkeypatch.setenv(FOLDER, "")


def own(folder: Path, text: str) -> Path:
    (folder / "net.py").write_text(text)
    (folder / "net.yaml").write_text("recipe: {size: tiny}\n")
    return folder / "net.py"


@pytest.mark.parametrize("name", find_shipped("recipes"))
def test_the_fields_of_shipped_recipes_are_those_of_their_records(name: str) -> None:
    record = recipes.load(load(name)).Settings
    assert read_fields(find_shipped("recipes")[name].with_suffix(".py")) == [
        field.name for field in dataclasses.fields(record)
    ]


def test_fields_are_read_and_nothing_is_imported(tmp_path: Path) -> None:
    assert read_fields(own(tmp_path, PLAIN)) == ["size", "data"]


@pytest.mark.parametrize(
    "change",
    [
        ("class Settings:", "class Settings(Others):"),
        ("class Settings:", "class Settings(metaclass=Kind):"),
        ("@dataclass", "@more\n@dataclass"),
        ("@dataclass(frozen=True, kw_only=True)\n", ""),
        ("class Settings:", "class Options:"),
        ("import no_such_module", "import ("),
    ],
    ids=["inherits", "metaclass", "decorated", "no_dataclass", "renamed", "broken"],
)
def test_what_cannot_be_told_is_left_to_the_recipe(change: tuple[str, str], tmp_path: Path) -> None:
    path, changed = own(tmp_path, PLAIN), PLAIN.replace(*change)
    assert changed != PLAIN and read_fields(path) is not None
    path.write_text(changed)
    assert read_fields(path) is None
    check_without_torch(load(f"{tmp_path}/net.yaml", overrides=["recipe.size=1"]))


def test_it_says_what_the_training_would_say(tmp_path: Path) -> None:
    config = load(str(NET), overrides=["recipe.wokers=2"])
    with pytest.raises(ConfigError) as early:
        check_without_torch(config)
    with pytest.raises(ConfigError) as late:
        recipes.build_recipe(config)
    assert str(early.value) == str(late.value) and early.value.key == "recipe.wokers"
    check_without_torch(load(str(NET), overrides=["recipe.workers=2"]))


def test_a_section_in_place_of_a_value_is_the_recipes_to_refuse(tmp_path: Path) -> None:
    own(tmp_path, PLAIN)
    check_without_torch(load(f"{tmp_path}/net.yaml", overrides=["recipe.data.deep=1"]))
    with pytest.raises(ConfigError, match=r"recipe has no key dota"):
        check_without_torch(load(f"{tmp_path}/net.yaml", overrides=["recipe.dota.deep=1"]))


def test_torch_is_not_imported_for_it() -> None:
    code = (
        "import sys\nfrom fastloop.commands.config import check_without_torch\n"
        "from fastloop.config.loading import load\ncheck_without_torch(load('gpt2', overrides=['recipe.size=tiny']))\n"
        "assert 'fastloop.config.loading' in sys.modules and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("conf", "override", "got", "do"),
    [
        (str(NET), "run.resume=no.ckpt", "run.resume: 'no.ckpt' (command line)", "write the path of a checkpoint"),
        ("safe", "run.seed=1", "safe", "with --config safe"),
    ],
)
def test_a_training_that_cannot_begin_is_refused_before_torch_is_there(
    conf: str, override: str, got: str, do: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_without_torch(load(conf, overrides=[override]))
    assert caught.value.got == got and do in caught.value.do
    (tmp_path / "no.ckpt").touch()
    check_without_torch(load(str(NET), overrides=["run.resume=no.ckpt"]))
