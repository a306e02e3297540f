"""What the runs in a directory are runs of: written before the first of them, so that no other experiment's are taken
for them. Another patch, script, recipe or number of runs is another experiment, whatever the command line says.

Of a script the files that the command names are known, not the modules that they import.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastloop.commands.experiment import PARITY, Side
from fastloop.commands.readback import read
from fastloop.commands.trial import TRIAL, forget
from fastloop.config import Config
from fastloop.errors import ConfigError
from fastloop.report import files
from fastloop.shipped import is_file, safe_name

NAME = "experiment.json"
BASE = "base"
RESULTS = ("comparison.json", "report.md", "report.html")
_READ = (".py", ".sh", ".yaml", ".yml", ".toml")
"""Ends of what a script's command line may name and a training may follow from; other files may be its output."""


def folder_of(number: int, name: str) -> Path:
    """Where the runs of an arm go, by its place among the arms."""
    return Path(f"{number}-{safe_name(name)[:60]}" if number else BASE)


def fingerprint(config: Config) -> str:
    """Of everything that is configured, secrets included, none of which can be read from it."""
    return _sha256(json.dumps(config.values, sort_keys=True, default=str).encode())


def recipe_fingerprint(config: Config) -> str | None:
    """Of the recipe's Python file, without the modules that it imports; None where there is none."""
    path = config.recipe_file
    return _sha256(path.read_bytes()) if path is not None and is_file(path) else None


def content(sides: Sequence[Side], command: Sequence[str], options: Iterable[Any],
            shown: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    """What an experiment is.

    Args:
        command: of a script; empty where the arms are configurations.
        options: of the command line, that may hold secrets.
        shown: those that hold none, by name.
    """
    configs = [side.arm.config() for side in sides]
    recipes = {each.recipe_file.name: each.recipe_file for each in configs if each.recipe_file is not None}
    named = {each: Path(each) for word in command for each in (word, word.partition("=")[2]) if each.endswith(_READ)}
    return {
        "schema": files.SCHEMA, **shown, "arms": [side.name for side in sides],
        "options": _sha256(repr(list(options)).encode()),
        "configs": {side.name: fingerprint(config) for side, config in zip(sides, configs, strict=True)},
        "sources": {name: _sha256(path.read_bytes()) for name, path in {**recipes, **named}.items() if is_file(path)},
    }  # fmt: skip


def refuse_another(where: Path, now: Mapping[str, Any]) -> None:
    """The experiment in a directory has to be this one.

    Raises:
        ConfigError: it is another; what differs is named.
    """
    before = read(where / NAME) or {}
    for key, value in now.items():
        if before.get(key) != value:
            raise ConfigError(got=f"--resume {where}", why=_why(key, before.get(key), value),
                              do="repeat the command as it was, or start another experiment")  # fmt: skip


def _why(key: str, before: Any, now: Any) -> str:
    if key == "options":
        return "its --vs, --config, --args or key=value were others"
    if key in ("configs", "sources"):
        old = before if isinstance(before, dict) else {}
        changed = ", ".join(name for name in {**old, **now} if old.get(name) != now.get(name))
        return f"since it began the configuration of {changed} was changed" if key == "configs" else \
               f"since it began {changed} was changed"  # fmt: skip
    if key == "runs":
        return (f"its --runs was {before} and now is {now}: runs that are added once the result is seen find"
                " differences where there are none; --runs auto looks several times, and pays for it")  # fmt: skip
    if key == "band_pct":
        return f"its --band was {before} and now is {now}: it cannot be chosen once the result is seen"
    return f"its {key} was {before!r} and now is {now!r}"


def sweep(where: Path, folders: Iterable[Path] = ()) -> None:
    """Take away the experiment that is in a directory, if there is one, and nothing that is not its own.

    Args:
        folders: of arms besides, in which only trials are taken away.
    """
    before = read(where / NAME) or {}
    arms = [folder_of(number, str(name)) for number, name in enumerate(before.get("arms") or ())]
    for folder in {*(where / each for each in arms), *folders}:
        for trial in folder.iterdir() if folder.is_dir() else ():
            _forget(trial)
        with contextlib.suppress(OSError):  # something else is in it, or it is not there
            folder.rmdir()
    _forget(where / PARITY)
    for name in (*RESULTS, NAME) if before else ():
        (where / name).unlink(missing_ok=True)


def _forget(trial: Path) -> None:
    if (trial / TRIAL).is_file():
        forget(trial)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
