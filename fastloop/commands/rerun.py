"""How to repeat an earlier run: with its configuration, or if that has no recipe, with its script."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from fastloop.config.loading import load
from fastloop.config.shipped import OF_RUN, find_shipped
from fastloop.errors import ConfigError
from fastloop.records.card import Patch
from fastloop.records.run_files import load_environment
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
    """Say how to repeat a script's run, with a trace of this many steps if one is wanted."""
    none = f"{OF_RUN} has no recipe that fastloop could train"
    if trace is None:
        return f"run your script again with the FastLoop(...) that you want, or under fastloop exec; {none}"
    return (
        f'run your script again with FastLoop({{"watch": {{"trace_steps": {trace}}}}}), or by fastloop exec with'
        f" watch.trace_steps: {trace} in its --config; {none}"
    )


def to_prove(where: Path, patch: Patch) -> str:
    """Return the command that tests whether a patch makes this run faster, with the script's name if known."""
    rungs = patch.get("rungs") or {}
    named = [rung for rung, settings in rungs.items() if settings == {"enabled": True}]
    keys = [
        f"rungs.{rung}.{key}={json.dumps(value)}"
        for rung, settings in rungs.items()
        if rung not in named
        for key, value in settings.items()
    ]
    conf = find_configuration(where)
    base = _name_script(where) if conf is None else shlex.quote(str(conf))
    return f"fastloop ab {base} --vs {','.join([*named, *keys])}"


def _name_script(where: Path) -> str:
    argv = load_environment(where).argv
    script, *given = argv if argv and argv[0].endswith(".py") else ("train.py",)
    return f"--script {shlex.quote(script)}" + (f" --args {shlex.quote(shlex.join(given))}" if given else "")
