"""fastloop ab: is this change faster, and is it still the same training?

Every run is a fresh, supervised process. Arms take turns in a seeded order, runs of one number share their seed, and
one run that does not count goes first, so that all arms find the same caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop import stats
from fastloop.commands import gates, manifest, verdict
from fastloop.commands.answer import Answer, Failed, leave
from fastloop.commands.arms import Arm, ConfigArm
from fastloop.commands.carry import name_of
from fastloop.commands.disk import writing
from fastloop.commands.experiment import Experiment, Settings, Side, Unplanned
from fastloop.commands.headspace import failed
from fastloop.commands.manifest import BASE, folder_of
from fastloop.commands.outdir import Place, claim_or_resume, hold, stands
from fastloop.commands.recipe_keys import check_recipe_keys
from fastloop.commands.script import ScriptArm, command_of, under_this_python
from fastloop.commands.supervise import Limits
from fastloop.commands.surroundings import refuse_others
from fastloop.commands.trial import Job, forget
from fastloop.compare import LEAST_RUNS
from fastloop.config import Config, diff
from fastloop.errors import ConfigError
from fastloop.layers import as_patch
from fastloop.report import files
from fastloop.secrets import Scrubber, mask

SHARED = {"run.seed": "run i of every arm trains with run.seed + i; write it for all: as KEY=VALUE",
          "run.max_steps": "all arms see the same number of samples; write --steps",
          "run.resume": "all arms start alike; write it for all: as KEY=VALUE"}  # fmt: skip
"""Keys that an arm cannot have for itself."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be compared, as the command line says it."""

    base: str | None
    """A configuration; None with a script."""
    vs: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    script: str | None = None
    args: str = ""
    runs: stats.Runs = 5
    steps: int | None = None
    aa: bool = False
    band_pct: float = 3.0
    limit_s: float = 3600.0


def request(*, base: str | None, overrides: Sequence[str], vs: Sequence[str], more: Sequence[str], runs: str,
            steps: str, **others: Any) -> Request:  # fmt: skip
    """What the command line says.

    Raises:
        ConfigError: ``--runs`` or ``--steps`` is no number, or too small a one.
    """
    if base is not None and others.get("script") is not None and "=" in base:  # with a script the base has no name
        overrides = (base, *overrides)
        base = None
    return Request(base=base, overrides=tuple(overrides), vs=tuple(vs), more=tuple(more),
                   runs=_number("--runs", runs, LEAST_RUNS) or "auto", steps=_number("--steps", steps, 1),
                   **others)  # fmt: skip


def _number(option: str, text: str, least: int) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < least:
        few = option == "--runs" and text.isdecimal() and int(text) > 0
        why = f"no verdict can come of fewer than {least} runs of each arm" if few else \
            "it is neither auto nor a number of them"  # fmt: skip
        raise ConfigError(got=f"{option} {text}", why=why, do=f"write auto, or {least} or more")
    return int(text)


def ab(asked: Request, *, out: str | None, force: bool, resume: str | None, progress: Progress) -> Answer:
    """Compare one or several arms with a base.

    Raises:
        ConfigError: nothing was trained: an arm cannot be planned, changes nothing, or the directory is in use.
        Failed: the base failed.
        KeyboardInterrupt, SystemExit: stopped; what there is stands in the directory, flagged as partial.
    """
    arms = [_without_secrets(arm) for arm in arms_of(asked)]
    if asked.script is None:
        check_recipe_keys(arms[0].config())
    sides = sides_of(arms, aa=asked.aa)
    name = arms[0].config().name if asked.script is None else name_of(command_of(asked.script, asked.args))
    place = claim_or_resume(f"ab-{name}", out, force=force, resume=resume, holds=manifest.NAME)
    try:
        return _compared(asked, sides, place, name, new=resume is None, progress=progress)
    except Unplanned as error:
        forget(error.trial.run_dir)
        if resume is None:  # nothing was trained
            manifest.sweep(place.path)
        raise failed(error.trial) from None
    finally:
        place.give_back()


def _compared(asked: Request, sides: list[Side], place: Place, name: str, *, new: bool,
              progress: Progress) -> Answer:  # fmt: skip
    base = sides[0].arm.config()
    command = () if asked.script is None else command_of(asked.script, asked.args)
    with hold(place.path), writing(place.path, manifest.NAME):
        for side in sides:
            side.folder = place.path / side.folder
        folders, told = [side.folder for side in sides], _told(asked, sides, command)
        if new:
            manifest.sweep(place.path, folders)
            files.write(place.path, {manifest.NAME: files.dump(told)})
        else:
            manifest.refuse_another(place.path, told)
            if not command or under_this_python(command):
                refuse_others(place.path, folders)
        settings = Settings(runs=asked.runs, steps=asked.steps, warmup=base.watch.warmup_steps,
                            band_pct=asked.band_pct, seed=base.run.seed,
                            limits=Limits(total_s=asked.limit_s))  # fmt: skip
        return carried_out(Experiment(sides, place.path, settings, progress), name)


def _told(asked: Request, sides: Sequence[Side], command: Sequence[str]) -> dict[str, Any]:
    shown = {name: getattr(asked, name) for name in ("base", "script", "runs", "steps", "aa", "band_pct")}
    return manifest.content(sides, command, (asked.vs, asked.more, asked.overrides, asked.args), shown)


def carried_out(experiment: Experiment, name: str) -> Answer:
    """Run it to its end, or to a signal; either way what came of it is written."""
    try:
        experiment.run()
    except (KeyboardInterrupt, SystemExit) as stop:
        leave(stop, verdict.write(experiment, name, partial=True))
        experiment.say(stands(experiment.place))
        raise
    content = verdict.write(experiment, name, partial=False)
    gates.sweep(experiment.place)
    if experiment.base.failed is not None and not experiment.base.runs:
        trial = experiment.base.failed
        text = trial.tail if trial.code == 2 and trial.tail else \
            f"{trial.tail}\nfastloop: the base failed, so there is nothing to compare with: {trial.cause}"  # fmt: skip
        failure = Failed(text.lstrip("\n"), exit_code=2 if trial.code == 2 else 1)
        leave(failure, content)
        raise failure
    return Answer(text="\n".join(verdict.lines(content)), json=content, exit_code=verdict.exit_code(experiment))


def arms_of(asked: Request) -> list[Arm]:
    """The base and one arm for each ``--vs``; names say what is changed."""
    vs = [*asked.vs, *([] if asked.vs or not asked.aa else [""])]
    if not vs:
        do = "write --vs amp, --vs patch.yaml or --vs key=value; or --aa to test the judge"
        raise ConfigError(got="fastloop ab without --vs", why="there is nothing to compare the base with", do=do)
    names = _names([text or "again" for text in vs])
    if asked.script is not None:
        return _script_arms(asked, vs, names)
    if asked.base is None:
        raise ConfigError(got="fastloop ab", why="there is no base", do="write a configuration, or --script train.py")
    if asked.base.endswith(".py"):
        again = " ".join(f"--vs {text}" for text in mask(vs))
        raise ConfigError(got=f"fastloop ab {asked.base}", why="it is a script, and the base is a configuration",
                          do=f"write fastloop ab --script {asked.base} {again}")  # fmt: skip
    watched = ("watch.enabled=true", "watch.trace_steps=0")
    job = Job(conf=asked.base, more=asked.more, overrides=(*asked.overrides, *watched))
    made: list[Arm] = [ConfigArm(name=BASE, job=job)]
    for name, text in zip(names, vs, strict=True):
        more, overrides = _patch(text)
        made.append(ConfigArm(name=name, job=Job(conf=job.conf, more=(*job.more, *more),
                                                 overrides=(*job.overrides, *overrides))))  # fmt: skip
    return made


def _script_arms(asked: Request, vs: Sequence[str], names: Sequence[str]) -> list[Arm]:
    if asked.base is not None:
        do = "write the script's arguments as --args \"…\", and a configuration without --script"
        raise ConfigError(got=f"fastloop ab {asked.base} --script {asked.script}", why="there are two bases", do=do)
    assert asked.script is not None
    command = command_of(asked.script, asked.args)
    made: list[Arm] = [ScriptArm(name=BASE, command=command, more=asked.more, overrides=asked.overrides)]
    for name, text in zip(names, vs, strict=True):
        more, overrides = _patch(text)
        made.append(ScriptArm(name=name, command=command, more=(*asked.more, *more),
                              overrides=(*asked.overrides, *overrides)))  # fmt: skip
    return made


def _patch(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files, rungs and ladders at the front of a ``--vs``, and the key=value after them."""
    files_: list[str] = []
    rest = text
    while rest:
        first, _, after = (part.strip() for part in rest.partition(","))
        kind, patch = as_patch(rest if "=" in first else first)
        if kind == "override":
            return tuple(files_), (patch,)
        files_.append(patch)
        rest = after
    return tuple(files_), ()


def _without_secrets(arm: Any) -> Arm:
    """Names are shown, and may repeat what stands on the command line."""
    named: Arm = dataclasses.replace(arm, name=Scrubber(arm.config().values).text(arm.name))
    return named


def _names(vs: Sequence[str]) -> list[str]:
    """A name for each arm, told apart where two are alike."""
    names: list[str] = []
    for text in vs:
        name = Path(text).stem if text.endswith((".yaml", ".yml")) else text
        name = name.removeprefix("rungs.")
        count = sum(other == name or other.startswith(f"{name} (") for other in (BASE, *names))
        names.append(f"{name} ({count + 1})" if count else name)
    return names


def sides_of(arms: Sequence[Arm], *, aa: bool) -> list[Side]:
    """The arms with what each changes; their folders are relative yet.

    Raises:
        ConfigError: an arm that cannot be read, that changes nothing, or what all arms share.
    """
    base = arms[0].config()
    sides = [Side(arm=arms[0], folder=folder_of(0, BASE))]
    for number, arm in enumerate(arms[1:], start=1):
        keys = changes(base, arm.config())
        if (shared := next((key for key in keys if key in SHARED), None)) is not None:
            raise ConfigError(got=f"--vs {arm.name}", why=f"{shared} is the same for all arms: {SHARED[shared]}",
                              do="leave it out of --vs", key=shared)  # fmt: skip
        if not keys and not aa:
            raise ConfigError(got=f"--vs {arm.name}", why="it changes nothing, so both arms are the same training",
                              do="switch something, such as --vs amp; or write --aa to test the judge")  # fmt: skip
        twin = next((other.name for other in arms[1:number] if not changes(other.config(), arm.config())), None)
        if twin is not None and not aa:
            raise ConfigError(got=f"--vs {arm.name}", why=f"it is the same training as --vs {twin}",
                              do="leave one of them out; or write --aa to test the judge")  # fmt: skip
        rungs = tuple(dict.fromkeys(key.split(".")[1] for key in keys if key.startswith("rungs.")))
        others = tuple(key for key in keys if not key.startswith("rungs."))
        sides.append(Side(arm=arm, folder=folder_of(number, arm.name), changed_rungs=rungs, changed_keys=others))
    return sides


def changes(a: Config, b: Config) -> list[str]:
    """Keys that make two trainings differ: not those of how it is watched, nor the settings of a rung that is off."""
    off = [{name for name, rung in config.ladder.rungs() if not rung.enabled} for config in (a, b)]
    idle = off[0] & off[1]
    return [key for key, _, _ in diff(a, b) if key.split(".")[0] not in ("watch", "strict")
            and not (key.startswith("rungs.") and key.split(".")[1] in idle)]
