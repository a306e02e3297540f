"""The sides of an A/B: each arm with its differences from the base."""

from __future__ import annotations

from collections.abc import Sequence

from fastloop.config.loading import Config, diff
from fastloop.errors import ConfigError
from fastloop.experiments.ab.arms import Arm
from fastloop.experiments.ab.experiment import Side
from fastloop.experiments.ab.manifest import BASE, name_folder

SHARED = {
    "run.seed": "run i of every arm trains with run.seed + i; set it for all arms as KEY=VALUE",
    "run.max_steps": "all arms see the same number of samples; write --steps",
    "run.resume": "all arms start alike; set it for all arms as KEY=VALUE",
}
"""Keys that a single arm cannot change, with the reason."""


def list_sides(arms: Sequence[Arm], *, aa: bool) -> list[Side]:
    """Return the arms with what each changes; their folders are still relative.

    Raises:
        ConfigError: an arm cannot be read, changes nothing, or changes a key that all arms share.
    """
    base = arms[0].config()
    sides = [Side(arm=arms[0], folder=name_folder(0, BASE))]
    for number, arm in enumerate(arms[1:], start=1):
        keys = changes(base, arm.config())
        if (shared := next((key for key in keys if key in SHARED), None)) is not None:
            raise ConfigError(
                got=f"--vs {arm.name}",
                why=f"{shared} is the same for all arms: {SHARED[shared]}",
                do="leave it out of --vs",
                key=shared,
            )
        if not keys and not aa:
            raise ConfigError(
                got=f"--vs {arm.name}",
                why="it changes nothing, so both arms are the same training",
                do="change something, such as --vs amp; or use --aa for an A/A test",
            )
        twin = next((other.name for other in arms[1:number] if not changes(other.config(), arm.config())), None)
        if twin is not None and not aa:
            raise ConfigError(
                got=f"--vs {arm.name}",
                why=f"it is the same training as --vs {twin}",
                do="leave one of them out; or use --aa for an A/A test",
            )
        rungs = tuple(dict.fromkeys(key.split(".")[1] for key in keys if key.startswith("rungs.")))
        others = tuple(key for key in keys if not key.startswith("rungs."))
        sides.append(Side(arm=arm, folder=name_folder(number, arm.name), changed_rungs=rungs, changed_keys=others))
    return sides


def changes(a: Config, b: Config) -> list[str]:
    """List keys that make two trainings differ, except how they are watched and settings of rungs that are off."""
    off = [{name for name, rung in config.ladder.rungs() if not rung.enabled} for config in (a, b)]
    idle = off[0] & off[1]
    return [
        key
        for key, _, _ in diff(a, b)
        if key.split(".")[0] not in ("watch", "strict") and not (key.startswith("rungs.") and key.split(".")[1] in idle)
    ]
