"""fastloop ab: is this change faster, and is it still the same training?

Every run is a fresh, supervised process. Arms alternate in a seeded order, run i of every arm has the same seed, and
one run that does not count comes first, so that all arms find the same caches.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.commands.config import check_without_torch
from fastloop.commands.console import WATCHED, Answer, Request, attach
from fastloop.config.layers import classify_patch
from fastloop.config.shipped import KINDS, find_shipped
from fastloop.errors import ConfigError
from fastloop.experiments.ab import manifest, parity_gates, results
from fastloop.experiments.ab.arms import Arm, ConfigArm, Progress
from fastloop.experiments.ab.commit import Versus, compare_with
from fastloop.experiments.ab.experiment import FEWEST_STEPS, Experiment, Settings, Unplanned
from fastloop.experiments.ab.manifest import BASE, refuse_others
from fastloop.experiments.ab.script_arms import ScriptArm, make_command, runs_under_this_python
from fastloop.experiments.ab.sides import list_sides
from fastloop.experiments.trials.failures import make_failure, writing
from fastloop.experiments.trials.run_directories import claim_or_resume, describe_partial, refuse_alone
from fastloop.experiments.trials.script_injection import name_of
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import Job, allow_quick_starts, forget, refuse
from fastloop.judge import statistics
from fastloop.judge.verdict import LEAST_RUNS, LEAST_STEPS
from fastloop.records import store
from fastloop.records.experiment import Manifest
from fastloop.records.secrets import Scrubber, mask_secrets
from fastloop.report.experiments import ab_report


@dataclass(frozen=True, kw_only=True)
class AbRequest(Request):
    """The comparison that the command line requests."""

    base: str | None
    """A configuration; None with a script."""
    vs: tuple[str, ...] = ()
    script: str | None = None
    args: str = ""
    vs_commit: str | None = None
    """A commit to compare the script's working tree with."""
    runs: statistics.Runs = 5
    steps: int | None = None
    aa: bool = False
    band_pct: float = 3.0
    resume: str | None = None


def request(*, base: str | None, overrides: tuple[str, ...], runs: str, steps: str, **others: Any) -> AbRequest:
    """Parse the command line.

    Raises:
        ConfigError: ``--runs`` or ``--steps`` is not a number, or too small.
    """
    if base is not None and others.get("script") is not None and "=" in base:  # with --script, no base is named
        overrides = (base, *overrides)
        base = None
    return AbRequest(
        base=base,
        overrides=overrides,
        runs=_parse_number("--runs", runs, LEAST_RUNS) or "auto",
        steps=_parse_number("--steps", steps, 1),
        **others,
    )


def _parse_number(option: str, text: str, least: int) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < least:
        few = option == "--runs" and text.removeprefix("-").isdecimal()
        why = f"a verdict needs at least {least} runs of each arm" if few else "it is neither auto nor a valid number"
        raise ConfigError(got=f"{option} {text}", why=why, do=f"write auto, or {least} or more")
    return int(text)


def ab(asked: AbRequest, progress: Progress) -> Answer:
    """Compare one or several arms with a base.

    Raises:
        ConfigError: nothing was trained: an arm cannot be planned, changes nothing, or the directory is in use.
        Failed: the base failed.
        KeyboardInterrupt, SystemExit: stopped; the results so far are in the directory, flagged as partial.
    """
    if asked.resume is not None and not (asked.vs or asked.aa or asked.vs_commit):
        refuse_alone("ab", asked.resume)
    refuse(os.environ, script=asked.script is not None)
    if asked.vs_commit is not None:
        if asked.script is None:
            raise ConfigError(
                got=f"--vs-commit {asked.vs_commit} without --script",
                why="it compares a script in the working tree with the same script in that commit",
                do="add --script train.py",
            )
        if asked.base is not None or asked.vs:
            raise ConfigError(
                got=f"--vs-commit {asked.vs_commit} with another base or --vs",
                why="--vs-commit already says what to compare with",
                do="leave those out; key=value and --config apply to both sides",
            )
        both = _make_base(asked)
        assert isinstance(both, ScriptArm)
        with compare_with(asked.vs_commit, both, aa=asked.aa, say=progress) as versus:
            return _claim_and_compare(asked, versus, progress)
    arms = _mask_names(list_arms(asked))
    if asked.script is None:
        for arm in arms:
            check_without_torch(arm.config())
    versus = Versus(sides=list_sides(arms, aa=asked.aa), sources={})
    return _claim_and_compare(asked, versus, progress)


def _claim_and_compare(asked: AbRequest, versus: Versus, progress: Progress) -> Answer:
    base = versus.sides[0].arm.config()
    warmup = base.watch.warmup_steps
    if asked.steps is not None and asked.steps <= warmup + LEAST_STEPS:
        raise ConfigError(
            key="watch.warmup_steps",
            got=f"--steps {asked.steps}",
            why=f"the first {warmup + 1} steps of a run are not timed (watch.warmup_steps: {warmup}),"
            f" and a verdict needs {LEAST_STEPS} that are",
            do=f"write --steps {warmup + FEWEST_STEPS} or more, or auto, or a smaller watch.warmup_steps",
        )
    name = base.name if asked.script is None else name_of(make_command(asked.script, asked.args))
    resume = asked.resume
    with claim_or_resume(f"ab-{name}", asked.out, force=asked.force, resume=resume, holds=manifest.NAME) as path:
        try:
            return _compare(asked, versus, path, name, progress)
        except Unplanned as error:
            forget(error.trial.run_dir)
            if resume is None:  # nothing was trained
                manifest.sweep(path)
            raise make_failure(error.trial) from None


def _compare(asked: AbRequest, versus: Versus, path: Path, name: str, progress: Progress) -> Answer:
    sides = versus.sides
    base = sides[0].arm.config()
    command = () if asked.script is None else make_command(asked.script, asked.args)
    with writing(path, manifest.NAME):
        for side in sides:
            side.folder = path / side.folder
        folders, content = [side.folder for side in sides], _describe(asked, versus, command)
        if asked.resume is None:
            manifest.sweep(path, folders)
            store.save(path, {manifest.NAME: content})
        else:
            manifest.refuse_another(path, content)
            if not command or runs_under_this_python(command):
                refuse_others(path, folders)
        settings = Settings(
            runs=asked.runs,
            steps=asked.steps,
            warmup=base.watch.warmup_steps,
            band_pct=asked.band_pct,
            seed=base.run.seed,
            limits=Limits(total_s=asked.limit_s),
        )
        script = None if asked.vs_commit else asked.script
        with allow_quick_starts(scripts=bool(command), script=script):
            return carry_out(Experiment(sides, path, settings, progress), name)


def _describe(asked: AbRequest, versus: Versus, command: Sequence[str]) -> Manifest:
    shown = Manifest(
        base=asked.base,
        script=asked.script,
        vs_commit=asked.vs_commit,
        runs=asked.runs,
        steps=asked.steps,
        aa=asked.aa,
        band_pct=asked.band_pct,
    )
    options = (asked.vs, asked.more, asked.overrides, asked.args)
    content = manifest.describe(versus.sides, command, options, shown)
    return dataclasses.replace(content, sources={**content.sources, **versus.sources})


def carry_out(experiment: Experiment, name: str) -> Answer:
    """Run the experiment until it ends or a signal stops it, and write the results either way."""
    try:
        experiment.run()
    except (KeyboardInterrupt, SystemExit) as stop:
        attach(stop, results.write(experiment, name, partial=True))
        experiment.say(describe_partial(experiment.place))
        raise
    result = results.write(experiment, name, partial=False)
    parity_gates.sweep(experiment.place)
    if experiment.base.failed is not None and not experiment.base.runs:
        trial = experiment.base.failed
        failure = make_failure(trial, what=f"the base failed, so there is nothing to compare: {trial.name}")
        attach(failure, result)
        raise failure
    return Answer(
        text="\n".join(ab_report.write_lines(result)),
        json=store.to_json(result),
        exit_code=results.exit_code(experiment),
    )


def list_arms(asked: AbRequest) -> list[Arm]:
    """Return the base and one arm for each ``--vs``, named after what it changes."""
    vs = [*asked.vs, *([] if asked.vs or not asked.aa else [""])]
    if not vs:
        do = "write --vs amp, --vs patch.yaml or --vs key=value; or --aa for an A/A test"
        raise ConfigError(got="fastloop ab without --vs", why="there is nothing to compare the base with", do=do)
    if any(not text.strip() for text in asked.vs):
        do = "write --vs amp, --vs patch.yaml or --vs key=value; or only --aa for an A/A test"
        raise ConfigError(got="--vs ''", why="it is empty, so there is nothing to compare", do=do)
    _refuse_apart(asked)
    names = _name_arms([text or "again" for text in vs])
    base = _make_base(asked)
    return [base, *(_change(base, name, text) for name, text in zip(names, vs, strict=True))]


def _refuse_apart(asked: AbRequest) -> None:
    """Refuse a rung, a ladder or a patch that follows a ``--vs`` after a space."""
    named = {name for kind in KINDS if kind != "recipes" for name in find_shipped(kind)}
    words = [*([asked.base] if asked.script is not None and asked.base else []), *asked.overrides]
    apart = [text for text in words if text in named or text.endswith((".yaml", ".yml"))]
    if asked.vs and apart and not asked.vs[-1].rstrip().endswith(","):  # that is said elsewhere
        last = mask_secrets(asked.vs)[-1]
        raise ConfigError(
            got=f"--vs {last} {apart[0]}",
            why="one --vs takes one word, with commas between its parts",
            do=f"write --vs {shlex.quote(','.join([last, *apart]))}, or another --vs for another arm",
        )


def _make_base(asked: AbRequest) -> Arm:
    if asked.script is not None:
        if asked.base is not None:
            do = 'write the script\'s arguments as --args "…", and a configuration without --script'
            raise ConfigError(got=f"fastloop ab {asked.base} --script {asked.script}", why="there are two bases", do=do)
        command = make_command(asked.script, asked.args)
        return ScriptArm(name=BASE, command=command, more=asked.more, overrides=asked.overrides)
    if asked.base is None:
        raise ConfigError(got="fastloop ab", why="there is no base", do="write a configuration, or --script train.py")
    if asked.base.endswith(".py"):
        again = " ".join(f"--vs {shlex.quote(text)}" for text in mask_secrets(asked.vs))
        raise ConfigError(
            got=f"fastloop ab {asked.base}",
            why="it is a script, but the base must be a configuration",
            do=f"write fastloop ab --script {shlex.quote(asked.base)} {again or '--aa'}",
        )
    return ConfigArm(name=BASE, job=Job(conf=asked.base, more=asked.more, overrides=(*asked.overrides, *WATCHED)))


def _change(base: Arm, name: str, text: str) -> Arm:
    """Apply the files, rungs and ladders at the front of a ``--vs``, and the key=value after them."""
    patches: list[str] = []
    rest = text
    if text.rstrip().endswith(","):
        do = "write --vs amp,compile, without a space"
        raise ConfigError(got=f"--vs {text!r}", why="nothing follows the last comma", do=do)
    while rest:
        first, _, after = (part.strip() for part in rest.partition(","))
        kind, patch = classify_patch(rest if "=" in first else first)
        if kind == "override":
            return base.change(name, patch, more=patches)
        patches.append(patch)
        rest = after
    return base.change(name, more=patches)


def _mask_names(arms: Sequence[Any]) -> list[Arm]:
    """Mask secrets in the arms' names, which repeat the command line; number names that then become equal."""
    names = _tell_apart([Scrubber(arm.config().values).text(arm.name) for arm in arms])
    return [dataclasses.replace(arm, name=name) for arm, name in zip(arms, names, strict=True)]


def _name_arms(vs: Sequence[str]) -> list[str]:
    """Name each arm: a file by its stem, keys as they are typed."""
    return _tell_apart([BASE, *(Path(text).stem if text.endswith((".yaml", ".yml")) else text for text in vs)])[1:]


def _tell_apart(names: Sequence[str]) -> list[str]:
    """Append a number to each name that already occurred."""
    taken: list[str] = []
    for name in names:
        numbered = (f"{name} ({number})" for number in range(2, len(names) + 2))
        taken.append(next(each for each in (name, *numbered) if each not in taken))
    return taken
