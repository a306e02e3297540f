"""fastloop config show and fastloop config diff."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastloop.bridge.fit.trainer_arguments import check_trainer_arguments
from fastloop.commands.console import Answer, answer_without_run
from fastloop.config.loading import Config, diff, load, require_checkpoint, require_recipe, show
from fastloop.config.schema import check_keys, find_origin, spell
from fastloop.config.shipped import KINDS


def show_config(conf: str, *, more: Sequence[str], overrides: Sequence[str]) -> Answer:
    """Show every value and where it was set; secrets are masked."""
    config = load(conf, more=more, overrides=overrides, suggested=KINDS)
    _check_free_keys(config)
    rows = show(config)
    width = min(44, max(len(f"{key}: {spell(value)}") for key, value, _ in rows))
    text = "\n".join(f"{f'{key}: {spell(value)}':<{width}}  # {origin}" for key, value, origin in rows)
    values = [{"key": key, "value": value, "origin": str(origin)} for key, value, origin in rows]
    return answer_without_run(text, values=values)


def diff_configs(a: str, b: str) -> Answer:
    """Show the keys whose values differ. Lists are compared whole, because merging replaces them whole."""
    rows = diff(load(a, suggested=KINDS), load(b, suggested=KINDS))
    text = "\n".join(f"{key}: {spell(left)} -> {spell(right)}" for key, left, right in rows) or "no difference"
    content = [{"key": key, "a": left, "b": right} for key, left, right in rows]
    return answer_without_run(text, differences=content)


# -- errors are found without importing the recipe or Lightning, since importing torch takes seconds -------------------


def check_without_torch(config: Config) -> None:
    """Refuse what training would refuse: no recipe, a missing checkpoint, arguments that ``trainer`` does not take.

    Raises:
        ConfigError: with file, line, full key and the nearest known key, as in training.
    """
    require_recipe(config)
    require_checkpoint(config)
    _check_free_keys(config)


def _check_free_keys(config: Config) -> None:
    """Check that ``trainer`` has only Lightning's arguments, and ``recipe`` only fields of its ``Settings``."""
    check_trainer_arguments(config)
    names = None if config.recipe_file is None else read_fields(config.recipe_file)
    if names is None:
        return
    record = dataclasses.make_dataclass("Settings", [(name, Any) for name in names])
    unknown = {key: value for key, value in config.recipe.items() if key not in names}
    check_keys({"recipe": unknown}, {"recipe": record}, lambda path: find_origin(".".join(path), config.origins))


def read_fields(recipe: Path) -> list[str] | None:
    """Read the fields of a recipe's ``Settings`` from its source; None if the source does not show them all."""
    try:
        tree = ast.parse(recipe.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    found = [node for node in ast.walk(tree) if getattr(node, "name", None) == "Settings"]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node in found]
    if len(found) != 1 or not classes or classes[0].bases or classes[0].keywords or not _is_dataclass(classes[0]):
        return None
    return list(_list_annotated_names(classes[0]))


def _is_dataclass(node: ast.ClassDef) -> bool:
    """Whether it is a dataclass without other decorators, which might add fields."""
    made = [ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list]
    return made in (["dataclass"], ["dataclasses.dataclass"])


def _list_annotated_names(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if (
            isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            and "ClassVar" not in ast.unparse(each.annotation)
        ):
            yield each.target.id
