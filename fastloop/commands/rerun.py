"""How to repeat an earlier run: with its configuration, or if that has no recipe, with its script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from fastloop.config.loading import load
from fastloop.config.shipped import OF_RUN, find_shipped
from fastloop.errors import ConfigError
from fastloop.experiments.ab.script_arms import runs_under_this_python
from fastloop.experiments.climb.candidates import list_overrides
from fastloop.records.card import Patch
from fastloop.records.plan import Finding
from fastloop.records.run_files import load_environment
from fastloop.records.secrets import mask_secrets
from fastloop.records.store import is_file


def is_run(target: str) -> bool:
    """Whether a command's argument is a run directory, and not the name of a shipped recipe."""
    return ("/" in target or target not in find_shipped("recipes")) and is_file(Path(target) / "measurement.json")


def find_configuration(where: Path) -> Path | None:
    """Return the configuration that repeats a run; None if it has no recipe, or if the recipe no longer exists."""
    path = where / OF_RUN
    try:
        return path if load(f"{path.parent}/{path.name}").recipe_file is not None else None
    except ConfigError:
        return None


def explain_rerun(trace: int | None) -> str:
    """Say how to repeat a script's run, with a trace of `trace` steps if given."""
    none = f"{OF_RUN} has no recipe that fastloop could train"
    if trace is None:
        return f"run your script again with the FastLoop(...) that you want, or under fastloop exec; {none}"
    return (
        f'run your script again with FastLoop({{"watch": {{"trace_steps": {trace}}}}}), or by fastloop exec with'
        f" watch.trace_steps: {trace} in its --config; {none}"
    )


def to_prove(found: Sequence[Finding], base: str) -> str | None:
    """Return the command that tests whether the first patch makes a run faster; None without a patch.

    Args:
        base: the command line's words for the run.
    """
    patch: Patch | None = next((finding.patch for finding in found if finding.patch), None)
    if patch is None:
        return None
    rungs = patch.get("rungs") or {}
    named = [rung for rung, settings in rungs.items() if settings == {"enabled": True}]
    keys = list_overrides({rung: settings for rung, settings in rungs.items() if rung not in named})
    return f"fastloop ab {base} --vs {','.join([*named, *keys])}"


def name_base(where: Path) -> str:
    """Return the command line's words for an earlier run: its configuration, or its script, ``train.py`` if unknown."""
    if (conf := find_configuration(where)) is not None:
        return shlex.quote(str(conf))
    argv = load_environment(where).argv
    return _name_script(*argv) if argv and argv[0].endswith(".py") else _name_script("train.py")


def name_arguments(conf: str, more: Sequence[str], overrides: Sequence[str]) -> str:
    """Return the command line's words for a configuration and what changes it."""
    return shlex.join([conf, *overrides, *(word for each in more for word in ("--config", each))])


def name_command(command: Sequence[str], config: str | None = None) -> str:
    """Return the command line's words for a script's command and the ladder that it ran with."""
    plain = len(command) > 1 and command[1].endswith(".py") and runs_under_this_python(command)
    command = mask_secrets(command)
    base = _name_script(*command[1:]) if plain else _name_script(shlex.join(command))
    return base if config is None else f"{base} --config {shlex.quote(config)}"


def _name_script(script: str, *given: str) -> str:
    return f"--script {shlex.quote(script)}" + (f" --args {shlex.quote(shlex.join(given))}" if given else "")
