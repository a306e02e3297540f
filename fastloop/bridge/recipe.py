"""Load a recipe: a Python file beside its YAML, with ``Settings`` and ``build(settings) -> (module, datamodule)``."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

from fastloop.config import Config
from fastloop.errors import ConfigError
from fastloop.schema import settings
from fastloop.shipped import shipped

PACKAGE = "fastloop_recipes"
"""Recipes import each other relatively; this is the package they then find themselves in."""


def build_recipe(config: Config) -> tuple[Any, Any]:
    """The module and the datamodule a configuration's recipe makes.

    Raises:
        ConfigError: there is no recipe, its settings are wrong, or it cannot find its data.
    """
    module = load(config)
    model, data = module.build(settings(module.Settings, config.recipe, "recipe", config.origins))
    return model, data


def load(config: Config) -> ModuleType:
    """The recipe's Python module."""
    path = config.recipe_file
    if path is None:
        raise ConfigError(got=f"{config.name}", why="neither it nor one of its bases is a recipe, so there is nothing to train",
                          do=f"write base: with one of {', '.join(sorted(shipped('recipes')))}")  # fmt: skip
    if PACKAGE not in sys.modules or list(sys.modules[PACKAGE].__path__) != [str(path.parent)]:
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]
        spec = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
        spec.submodule_search_locations = [str(path.parent)]
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    module = importlib.import_module(f"{PACKAGE}.{path.stem}")
    for name in ("Settings", "build"):
        if not hasattr(module, name):
            raise ConfigError(got=f"{path}", why=f"a recipe needs {name}, and this file has none",
                              do="see any file below recipes/ for the shape")  # fmt: skip
    return module
