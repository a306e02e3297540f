"""Loads a recipe: a Python file next to its YAML, with ``Settings`` and ``build(settings) -> (module, datamodule)``."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fastloop.bridge.fit import recipe_modules
from fastloop.config.loading import Config, require_recipe
from fastloop.config.schema import read_settings
from fastloop.config.shipped import find_root
from fastloop.errors import ConfigError


def build_recipe(config: Config) -> tuple[Any, Any]:
    """Build the module and the datamodule of a configuration's recipe.

    Raises:
        ConfigError: there is no recipe, its settings are wrong, or it cannot find its data.
    """
    module = load(config)
    settings = read_settings(module.Settings, config.recipe, "recipe", config.origins)
    try:
        made = module.build(settings)
    except ConfigError as error:
        if error.key is None or error.key not in config.origins:
            raise
        got = f"{error.got} ({config.origins[error.key]})"
        raise ConfigError(got=got, why=error.why, do=error.do, key=error.key) from None
    if not isinstance(made, tuple) or len(made) != 2 or not hasattr(made[1], "train_dataloader"):
        raise ConfigError(
            got=f"the result of build() in {config.recipe_file}",
            why=f"it is {_describe(made)}",
            do="return a LightningModule and a LightningDataModule",
        )
    return made[0], made[1]


def _describe(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(each).__name__ for each in made) or 'nothing'}"
    return f"of type {type(made).__name__}"


def load(config: Config) -> ModuleType:
    """Import the recipe's Python module; raises ConfigError if it cannot be a recipe."""
    path = require_recipe(config)
    if "." in path.stem:
        raise ConfigError(
            got=str(path),
            why="Python cannot import a file with a dot in its name",
            do="rename it, and its YAML with it",
        )
    _look_in(path.parent)
    module = importlib.import_module(f"{recipe_modules.__name__}.{path.stem}")
    for name in ("Settings", "build"):
        if not hasattr(module, name):
            raise ConfigError(
                got=f"{path}",
                why=f"a recipe needs {name}, but this file has none",
                do="see any file in recipes/ for an example",
            )
    return module


def _look_in(folder: Path) -> None:
    """Point the recipes' package to this folder, in this process and in those it starts."""
    if folder == find_root() / "recipes":
        os.environ.pop(recipe_modules.FOLDER, None)
    else:
        os.environ[recipe_modules.FOLDER] = str(folder)
    if recipe_modules.__path__ != [str(folder)]:
        recipe_modules.__path__[:] = [str(folder)]
        for name in [name for name in sys.modules if name.startswith(f"{recipe_modules.__name__}.")]:
            del sys.modules[name]
