"""Names of the shipped recipes, ladders, climbs and rungs, and their files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from fastloop.config.suggestions import find_nearest
from fastloop.errors import ConfigError
from fastloop.records.store import is_file

Kind = Literal["recipes", "ladders", "climbs", "rungs"]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""The order in which a name is looked up."""


def find_root() -> Path:
    """Return the folder with ``recipes/`` and ``configs/``: the package in a wheel, the repository in a clone."""
    package = Path(__file__).parents[1]
    packed = package / "_shipped"
    return packed if packed.is_dir() else package.parent


def find_shipped(kind: Kind) -> dict[str, Path]:
    """Return the shipped YAML files of one kind by name, sorted."""
    folder = find_root() / ("recipes" if kind == "recipes" else f"configs/{kind}")
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


OF_RUN = "config.resolved.yaml"
"""The configuration in the directory of a run."""


def is_path(text: str) -> bool:
    """Whether the text means a file (``./x``, ``a/b``, ``x.yaml``) and not a shipped name."""
    return "/" in text or os.sep in text or text.endswith((".yaml", ".yml"))


def locate(text: str, folder: Path, *, got: str, chain: str = "", suggested: Sequence[Kind] = KINDS) -> Path:
    """Return the file for a path or a shipped name.

    Args:
        text: the path or name as written.
        folder: where relative paths start: the folder of the file that contains the path, or the working directory.
        got: the first part of the error message, with file and line.
        chain: the chain of bases, for the error message.
        suggested: the kinds whose names may be suggested.

    Raises:
        ConfigError: no such file, or no such name; with the nearest one, or else all known names.
    """
    if not text.strip():
        raise ConfigError(got=got, why=f"it is empty{chain}", do="write a shipped name, or a path that ends in .yaml")
    if text.endswith(".py"):
        script = shlex.quote(text)
        do = f"write fastloop exec -- python {script} to see why it is slow, or fastloop climb --script {script}"
        raise ConfigError(got=got, why=f"it is a script, not a configuration{chain}", do=do)
    path = Path(os.path.abspath(folder / os.path.expanduser(text)))  # noqa: PTH100, PTH111 (no links followed, no errors)
    names = {kind: find_shipped(kind) for kind in KINDS}
    if is_path(text):
        if is_file(path):
            return path
    else:
        for kind in KINDS:
            if text in names[kind]:
                return names[kind][text]
    if is_file(path / OF_RUN):
        do = f"write {os.path.join(text, OF_RUN)} to train it again"  # noqa: PTH118 (as it was written)
        raise ConfigError(got=got, why=f"it is the directory of a run{chain}", do=do)
    if os.path.isdir(path):  # noqa: PTH112 (Path's raises)
        raise ConfigError(got=got, why=f"{text} is a directory{chain}", do=_suggest_inside(text, path))
    if is_path(text):
        raise ConfigError(got=got, why=f"there is no such file{chain}", do=f"check the path; it starts at {folder}")
    why = f"{_explain_missing(text)}{chain}"
    if (near := _suggest_instead(text, folder, [name for kind in suggested for name in names[kind]])) is not None:
        raise ConfigError(got=got, why=why, do=near)
    known = "; ".join(f"{kind}: {', '.join(names[kind])}" for kind in KINDS if names[kind])
    do = "write one of these names, or a path that ends in .yaml"
    raise ConfigError(got=got, why=f"{why}; there are {known}", do=do)


def _explain_missing(text: str) -> str:
    from fastloop.ladder import Ladder  # here: only this message needs the rungs

    later = f"this version has no rung {text} yet"
    return later if text in Ladder.coming else "no recipe, ladder, climb or rung has this name"


def _suggest_inside(text: str, path: Path) -> str:
    inside = next((each.name for each in sorted(path.glob("*.yaml")) if is_file(each)), None)
    if inside is None:
        return "write a path that ends in .yaml, or a name that `fastloop recipes` or `fastloop rungs` lists"
    return f"write a file in it: {os.path.join(text, inside)}"  # noqa: PTH118 (as it was written)


def _suggest_instead(text: str, folder: Path, names: list[str]) -> str | None:
    if is_file(folder / f"{text}.yaml"):
        return f"write {text}.yaml; a file needs its extension"
    if "=" in text:
        return "write a name or a file first, key=value after it"
    if "," in text and set(parts := [part.strip() for part in text.split(",")]) <= set(names):
        return f"put base: [{', '.join(parts)}] into a YAML file, and pass that file"
    near = find_nearest(text, names)
    return f"write {near}" if near else None
