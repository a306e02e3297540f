"""Identifies the experiment that a directory belongs to, and the machine and versions of its runs, so that ``--resume``
never mixes two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fastloop.config.loading import Config
from fastloop.errors import ConfigError
from fastloop.evidence import machine
from fastloop.experiments.ab.experiment import PARITY, Side
from fastloop.experiments.trials.trial import TRIAL, forget, read_finished
from fastloop.records.experiment import Manifest
from fastloop.records.run_files import Environment, Machine, load_environment
from fastloop.records.store import decode, is_file, load, make_safe_name

# -- machine and versions: rates of two cannot be compared -------------------------------------------------------------

# An unknown value (``None``, such as the driver on a machine without a GPU) never counts as different.


def list_versions(environment: Environment) -> dict[str, str | None]:
    """Return the versions in an ``env.json`` that can change measurements."""
    known = environment.versions or {}
    return {
        "torch": known.get("torch"),
        "lightning": known.get("lightning"),
        "fastloop": known.get(machine.DISTRIBUTION),
        "driver": environment.driver,
    }


def refuse_others(place: Path, folders: Iterable[Path]) -> None:
    """Check that the finished runs come from this machine and the installed versions.

    Args:
        folders: the arms' folders, each with a folder for each run.

    Raises:
        ConfigError: they do not.
    """
    now = decode(machine.read_environment((), {}), Environment) or Environment()
    for folder in folders:
        for path in sorted(folder.glob(f"*/{TRIAL}")):
            trial = read_finished(path.parent)
            if trial is None or trial.measurement is None:
                continue
            before = load_environment(path.parent)
            if found := _list_differences(before, now, on_gpu=trial.measurement.device == "cuda"):
                raise ConfigError(
                    got=f"--resume {place}",
                    why=f"its runs are from {'; '.join(found)}",
                    do="continue on the machine where they ran, or start a new experiment here",
                )


def _list_differences(before: Environment, now: Environment, *, on_gpu: bool) -> list[str]:
    devices = (
        (_name_gpus(before), _name_gpus(now) or "a machine without a GPU")
        if on_gpu
        else (_name_cpu(before), _name_cpu(now))
    )
    then, versions = list_versions(before), list_versions(now)
    pairs = [("", *devices), *((f"{name} ", then[name], versions[name]) for name in then)]
    return [
        f"{label}{old}, this is {new}"
        for label, old, new in pairs
        if old is not None and new is not None and old != new
    ]


def _name_gpus(environment: Environment) -> str | None:
    """Return the kinds of GPU; how many the machine has of each does not matter."""
    known = environment.hardware or Machine()
    return ", ".join(sorted({str(gpu.name) for gpu in known.gpus})) or None


def _name_cpu(environment: Environment) -> str | None:
    return (environment.hardware or Machine()).cpu_model


# -- the experiment ----------------------------------------------------------------------------------------------------

# Its description is written before its first run, so that runs of another experiment are never mistaken for its own.
# Another patch, script, recipe or number of runs makes another experiment, no matter what the command line says.
#
# For a script, only the files that the command names are checked, not the modules that they import.

NAME = "experiment.json"
BASE = "base"
RESULTS = ("comparison.json", "report.md", "report.html")
READ = (".py", ".sh", ".yaml", ".yml", ".toml")
"""Suffixes of files on a script's command line that count as its sources; other files may be its output."""


def name_folder(number: int, name: str) -> Path:
    """Return the folder for an arm's runs, from the arm's position."""
    return Path(f"{number}-{make_safe_name(name)[:60]}" if number else BASE)


def fingerprint(config: Config) -> str:
    """Hash the whole configuration, including secrets, which cannot be read from the hash."""
    return _hash_bytes(json.dumps(config.values, sort_keys=True, default=str).encode())


def fingerprint_source(config: Config, command: Sequence[str]) -> str | None:
    """Hash the recipe's Python file, without its imports, or the files that a script's command line names."""
    if not command:
        path = config.recipe_file
        return _hash_bytes(path.read_bytes()) if path is not None and is_file(path) else None
    return _hash_bytes(repr([(name, _hash_bytes(path.read_bytes())) for name, path in _list_named(command)]).encode())


def _list_named(command: Sequence[str]) -> list[tuple[str, Path]]:
    named = {each: Path(each) for word in command for each in (word, word.partition("=")[2]) if each.endswith(READ)}
    return [(name, path) for name, path in named.items() if is_file(path)]


def describe(
    sides: Sequence[Side], command: Sequence[str], options: Iterable[str | Sequence[str]], shown: Manifest
) -> Manifest:
    """Return the manifest that identifies an experiment.

    Args:
        command: the script's; empty if the arms are configurations.
        options: command-line options that may contain secrets.
        shown: options that contain none.
    """
    configs = [side.arm.config() for side in sides]
    recipes = {each.recipe_file.name: each.recipe_file for each in configs if each.recipe_file is not None}
    return dataclasses.replace(
        shown,
        arms=tuple(side.name for side in sides),
        options=_hash_bytes(repr(list(options)).encode()),
        configs={side.name: fingerprint(config) for side, config in zip(sides, configs, strict=True)},
        sources={
            name: _hash_bytes(path.read_bytes())
            for name, path in (*recipes.items(), *_list_named(command))
            if is_file(path)
        },
    )


def refuse_another(where: Path, now: Manifest) -> None:
    """Check that a directory holds this experiment.

    Raises:
        ConfigError: it is another; the message names the difference.
    """
    before = load(where / NAME, Manifest) or Manifest()
    for key, value in vars(now).items():
        if vars(before)[key] != value:
            raise ConfigError(
                got=f"--resume {where}",
                why=_explain(key, before, now),
                do="repeat the original command, or start a new experiment",
            )


def _explain(key: str, before: Manifest, now: Manifest) -> str:
    if key == "options":
        return "its --vs, --config, --args or key=value differ"
    if key == "configs":
        return f"the configuration of {_list_changed(before.configs, now.configs)} has changed since it began"
    if key == "sources":
        return f"{_list_changed(before.sources, now.sources)} changed since it began"
    if key == "runs":
        return (
            f"its --runs was {before.runs} and is now {now.runs}: adding runs after seeing the result finds"
            " differences that do not exist; --runs auto looks several times and corrects for it"
        )
    if key == "band_pct":
        return (
            f"its --band was {before.band_pct} and is now {now.band_pct}: it must not change after results have been"
            " seen"
        )
    then, since = (
        ", ".join(each) if isinstance(each, tuple) else repr(each) for each in (vars(before)[key], vars(now)[key])
    )
    was, is_now = ("were", "are") if key.endswith("s") else ("was", "is")
    return f"its {key} {was} {then} and {is_now} now {since}"


def _list_changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    return ", ".join(name for name in {**before, **now} if before.get(name) != now.get(name))


def sweep(where: Path, folders: Iterable[Path] = ()) -> None:
    """Delete the experiment in a directory, if there is one, and no other files.

    Args:
        folders: further arms' folders, in which only trials are deleted.
    """
    before = load(where / NAME, Manifest)
    arms = [name_folder(number, name) for number, name in enumerate(before.arms if before else ())]
    for folder in {*(where / each for each in arms), *folders}:
        for trial in folder.iterdir() if folder.is_dir() else ():
            _forget(trial)
        with contextlib.suppress(OSError):  # it is missing or holds other files
            folder.rmdir()
    _forget(where / PARITY)
    for name in (*RESULTS, NAME) if before else ():
        (where / name).unlink(missing_ok=True)


def _forget(trial: Path) -> None:
    if (trial / TRIAL).is_file():
        forget(trial)


def _hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
