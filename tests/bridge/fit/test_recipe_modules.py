"""The package of recipes finds its folder by itself, in any process. What lives in it is in test_recipe.py."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from fastloop.bridge.fit import recipe_modules
from fastloop.config.shipped import find_root


@pytest.mark.parametrize("own", [True, False])
def test_it_is_where_the_variable_says_else_what_is_shipped(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(recipe_modules.__path__)
    try:
        monkeypatch.setenv(recipe_modules.FOLDER, str(tmp_path) if own else "")
        found = list(importlib.reload(recipe_modules).__path__)
    finally:
        recipe_modules.__path__[:] = before
    assert found == [str(tmp_path if own else find_root() / "recipes")]
