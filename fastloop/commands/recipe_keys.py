"""Keys of a recipe that it does not have, found without importing it: that would import torch, which takes seconds."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastloop.config import Config
from fastloop.schema import check_keys, first_origin


def check_recipe_keys(config: Config) -> None:
    """Refuse a key that the recipe's ``Settings`` has no field for; types and values are the recipe's own to check.

    Raises:
        ConfigError: as the training itself would, with file, line, full key and the nearest key there is.
    """
    names = None if config.recipe_file is None else fields(config.recipe_file)
    if names is None:
        return
    record = dataclasses.make_dataclass("Settings", [(name, Any) for name in names])
    unknown = {key: value for key, value in config.recipe.items() if key not in names}
    check_keys({"recipe": unknown}, {"recipe": record}, lambda path: first_origin(".".join(path), config.origins))


def fields(recipe: Path) -> list[str] | None:
    """The fields of a recipe's ``Settings`` as they stand in its file; None where they cannot be told from that."""
    try:
        tree = ast.parse(recipe.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    found = [node for node in ast.walk(tree) if getattr(node, "name", None) == "Settings"]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node in found]
    if len(found) != 1 or not classes or classes[0].bases or classes[0].keywords or not _is_dataclass(classes[0]):
        return None
    return list(_names(classes[0]))


def _is_dataclass(node: ast.ClassDef) -> bool:
    """With no other decorator, which might add fields."""
    made = [ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list]
    return made in (["dataclass"], ["dataclasses.dataclass"])


def _names(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if (isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                and "ClassVar" not in ast.unparse(each.annotation)):  # fmt: skip
            yield each.target.id
