"""With what a run there was can be run again: its own configuration, or, where that has no recipe, its script."""

from __future__ import annotations

from pathlib import Path

from fastloop.config import load
from fastloop.errors import ConfigError
from fastloop.shipped import is_file, shipped

CONFIGURATION = "config.resolved.yaml"


def is_run(target: str) -> bool:
    """Whether a command's argument is a directory with a run in it, and no shipped recipe's name."""
    return ("/" in target or target not in shipped("recipes")) and is_file(Path(target) / "measurement.json")


def configuration(where: Path) -> Path | None:
    """What ``fastloop run`` takes to run it again; None where there is no recipe in it, or none that is still there."""
    path = where / CONFIGURATION
    try:
        return path if load(f"{path.parent}/{path.name}").recipe_file is not None else None
    except ConfigError:
        return None


def by_script(trace: int | None) -> str:
    """What to do with a run whose training was a script's own, for a trace of so many steps if one is wanted."""
    none = f"{CONFIGURATION} has no recipe that fastloop could train"
    if trace is None:
        return f"run your script again, with FastLoop(...) as you want it or by fastloop exec; {none}"
    return (f'run your script again with FastLoop({{"watch": {{"trace_steps": {trace}}}}}), or by fastloop exec with'
            f" watch.trace_steps: {trace} in its --config; {none}")  # fmt: skip
