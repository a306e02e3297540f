"""fastloop climb: tries rungs by itself, keeps those that pay, and compares the result with the start.

Each measurement on the way is only a screen, and winners of screens look better than they are. The headline is a fresh
A/B of the start against the top, with all gates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import shlex
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from fastloop.commands.config import check_without_torch
from fastloop.commands.console import WATCHED, Answer, Request, attach
from fastloop.config.layers import read_patch_layer
from fastloop.config.shipped import find_shipped
from fastloop.errors import ConfigError
from fastloop.evidence import machine
from fastloop.experiments.ab import parity_gates
from fastloop.experiments.ab.arms import ConfigArm, Progress
from fastloop.experiments.ab.manifest import fingerprint, fingerprint_source, refuse_others
from fastloop.experiments.ab.results import read_hardware
from fastloop.experiments.ab.script_arms import ScriptArm, make_command, runs_under_this_python
from fastloop.experiments.climb.attempt import BaseFailed
from fastloop.experiments.climb.budget import ClimbBudget, Spent, describe_time
from fastloop.experiments.climb.candidates import LADDER as AS_LADDER
from fastloop.experiments.climb.candidates import Start, choose_ladder
from fastloop.experiments.climb.interface import Runner
from fastloop.experiments.climb.loop import Climb
from fastloop.experiments.climb.runner import ProcessRunner
from fastloop.experiments.trials.failures import Failed, make_failure, writing
from fastloop.experiments.trials.run_directories import claim_or_resume, describe_partial, refuse_alone
from fastloop.experiments.trials.script_injection import name_of
from fastloop.experiments.trials.trial import TRIAL, Job, allow_quick_starts, forget, refuse
from fastloop.judge.verdict import exit_code
from fastloop.records import store
from fastloop.records.card import Stack
from fastloop.records.climb import ClimbFile, Confirmation, Speed
from fastloop.report.drawing.html import draw_reports
from fastloop.report.experiments import climb_report

NAME, LADDER = "climb.json", "ladder.yaml"
WRITTEN = (NAME, LADDER, "report.md", "report.html")
ALLOW = ("changes-training",)
LEAST_S = 30.0
"""The shortest budget: the first training alone may take that long to start, import and end."""


@dataclass(frozen=True, kw_only=True)
class ClimbRequest(Request):
    """The climb that the command line requests."""

    conf: str | None
    """A configuration; None with a script."""
    script: str | None = None
    """A Lightning script, or a command."""
    args: str = ""
    budget_s: float
    """The budget of this call; if it is too short, continue the climb with `resume`."""
    allow: tuple[str, ...] = ()
    """Parity classes from `ALLOW` that may be tried in addition to rungs that keep the training the same."""
    resume: str | None = None


def climb(asked: ClimbRequest, progress: Progress) -> Answer:
    """Find the fastest stack of rungs, and compare it with the start.

    Raises:
        ConfigError: nothing was trained, because of the configuration or the command line.
        Failed: the unchanged training failed.
        KeyboardInterrupt, SystemExit: stopped; the results so far are in the directory, flagged as partial.
    """
    script, resume = asked.script, asked.resume
    if asked.conf is None and script is None and resume is not None:
        refuse_alone("climb", resume)
    refuse(os.environ, script=script is not None)
    start = _make_start(asked)
    config = start.config()
    _check(asked)
    if script is None:
        check_without_torch(config)
    place = claim_or_resume(f"climb-{start.name}", asked.out, force=asked.force, resume=resume, holds=NAME)
    with place as path, writing(path, NAME):
        recorder = Recorder(path, start, asked, _load_earlier(path, start, resume))
        limit_s, ladders = asked.limit_s, list_shipped()
        runner = ProcessRunner(start, path, recorder.budget, limit_s=limit_s, progress=progress, ladders=ladders)
        with allow_quick_starts(scripts=script is not None, script=script):
            answer = _run(recorder, recorder.begin(runner), progress)
    text = f"{answer.text}{_describe_use(path, asked)}{_describe_proof(recorder.content(), asked)}"
    return dataclasses.replace(answer, text=text)


def _make_start(asked: ClimbRequest) -> ConfigArm | ScriptArm:
    """Return the training that the climb begins with."""
    conf, script, overrides = asked.conf, asked.script, (*asked.overrides, *WATCHED)
    if script is None:
        if conf is None:
            do = "write a configuration, or --script train.py"
            raise ConfigError(got="fastloop climb", why="it names no configuration or script", do=do)
        if conf.endswith(".py"):
            do = f"write fastloop climb --script {shlex.quote(conf)}"
            raise ConfigError(got=f"fastloop climb {conf}", why="it is a script, not a configuration", do=do)
        job = Job(conf=conf, more=asked.more, overrides=overrides)
        return ConfigArm(name=job.config().name, job=job)
    if conf is not None and "=" in conf:  # with a script, the first key=value is parsed as conf
        overrides, conf = (conf, *overrides), None
    if conf is not None:
        do = 'write the script\'s arguments as --args "…", and a configuration without --script'
        raise ConfigError(got=f"fastloop climb {conf} --script {script}", why="it names two starting points", do=do)
    command = make_command(script, asked.args)
    return ScriptArm(name=name_of(command), command=command, more=asked.more, overrides=overrides)


def _describe_use(place: Path, asked: ClimbRequest) -> str:
    """Describe the ladder and the line that uses it; empty if no rung was kept."""
    text = "".join(line for line in (place / LADDER).read_text().splitlines(True) if not line.lstrip().startswith("#"))
    if text.strip() == "rungs: {}":
        return ""
    use = f"callbacks=[fastloop.FastLoop({str((place / LADDER).absolute())!r})]"  # a script may change its directory
    if asked.conf is not None and "=" not in asked.conf:
        configs = [part for config in (*asked.more, str(place / LADDER)) for part in ("--config", config)]
        use = shlex.join(["fastloop", "run", asked.conf, *configs, *asked.overrides])
    return f"\n{text.rstrip()}\nUSE      {use}"


def _name_base(asked: ClimbRequest) -> list[str]:
    """Return the command line's words for the training that the climb began with."""
    own = [] if asked.script is None else ["--script", asked.script, *(["--args", asked.args] if asked.args else [])]
    return [*own, *([] if asked.conf is None else [asked.conf]), *asked.overrides]


def _describe_proof(content: ClimbFile, asked: ClimbRequest) -> str:
    """Describe how to prove the fastest ladder so far if the budget ended before that; empty if none was faster."""
    if content.confirmed is not None or not content.partial:
        return ""
    lost, naive = {each.name for each in content.rungs}, content.naive.samples_per_s or math.inf
    rates = {
        name: rate
        for name, rate in content.ladders_samples_per_s.items()
        if name in list_shipped() and f"{AS_LADDER}{name}" not in lost and (rate or 0.0) > naive
    }
    fastest = max(rates, key=lambda name: rates[name] or 0.0, default=None)
    vs = f"{content.run_dir}/{LADDER}" if content.stack.get("rungs") else fastest
    if vs is None:
        return ""
    words = [*_name_base(asked), *(part for config in asked.more for part in ("--config", config)), "--vs", vs]
    return f"\nNEXT     prove the fastest so far: {shlex.join(['fastloop', 'ab', *words])}"


def list_shipped() -> dict[str, Stack]:
    """Return the rungs of the shipped ladders by name."""
    return {name: read_patch_layer(name, Path()).marked.value["rungs"] for name in find_shipped("ladders")}


class Recorder:
    """Writes a climb's results into its directory.

    Args:
        before: the ``climb.json`` of an earlier call; None for a new climb.
    """

    def __init__(
        self, place: Path, start: ConfigArm | ScriptArm, asked: ClimbRequest, before: ClimbFile | None
    ) -> None:
        self.place, self.arm, self.config, self.new = place, start, start.config(), before is None
        self._configured, self._sources = _take_fingerprints(start)  # taken now: files may be edited later
        self._before = before or ClimbFile()
        self._before_s, self._budget_s = self._before.spent_s or 0.0, (self._before.budget_s or 0.0) + asked.budget_s
        self.allow = tuple(sorted({*asked.allow, *self._before.allow}))
        self.budget = ClimbBudget(asked.budget_s)
        self.climb: Climb | None = None
        self.stopped, self.partial = "", True
        self.confirmed: Confirmation | None = None

    def begin(self, runner: Runner) -> Climb:
        """Create the climb, which continues an earlier call if there was one and saves each decision."""
        start = Start(
            enabled=frozenset(self.config.ladder.enabled()),
            devices=self.config.run.devices,
            allow=frozenset(self.allow),
            cpus=max(1, machine.count_usable_cpus() // self.config.run.devices),
            ladders=list_shipped(),
            times_loader=self.arm.plans_alone,
        )
        self.climb = Climb(runner, start, warmup=self.config.watch.warmup_steps, before=self._before, save=self.save)
        return self.climb

    def content(self) -> ClimbFile:
        """Return the climb's results so far."""
        climb = self.climb
        assert climb is not None
        naive, rates = climb.naive, climb.compute_top_rates()
        start = Speed() if naive is None else Speed(samples_per_s=naive.samples_per_s, step_ms=naive.step_ms)
        rate = rates.pop("now", None)
        trials = [naive.trial] if naive is not None and naive.trial is not None else []
        return ClimbFile(
            run_dir=str(self.place),
            name=self.arm.name,
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            hardware=read_hardware(trials),
            naive=start,
            ceilings_samples_per_s=climb.ceilings,
            ceilings_top_samples_per_s=rates,
            ceilings_notes=climb.notes,
            ladders_samples_per_s=climb.ladders,
            start_s=climb.start_s or None,
            ends_at=climb.ends_at,
            rungs=tuple(climb.rows),
            stack={"rungs": climb.stack},
            top=start if climb.costs is None else Speed(samples_per_s=rate, step_ms=climb.costs.now_ms),
            stopped=self.stopped,
            confirmed=self.confirmed,
            allow=self.allow,
            config_sha256=self._configured,
            recipe_sha256=self._sources,
            budget_s=self._budget_s,
            spent_s=round(self._before_s + self.budget.spent_s(), 1),
            partial=self.partial,
        )

    def save(self) -> ClimbFile:
        """Save the results so far. Called after each decision, so that there is a ladder whatever ends the climb."""
        content = self.content()
        store.save(self.place, {NAME: content})
        store.write(self.place, {LADDER: climb_report.write_ladder_yaml(content)})
        return content

    def write(self) -> ClimbFile:
        """Write all results, the ladder and the reports, whose drawing takes seconds."""
        content = self.save()
        store.write(self.place, draw_reports(climb_report.make_document(content)))
        return content


def _run(recorder: Recorder, climb: Climb, say: Progress) -> Answer:
    recorder.save()
    try:
        try:
            recorder.stopped = climb.climb()
            complete = True
        except Spent as spent:
            recorder.stopped, complete = f"not enough budget left for {spent.what}", False
        try:
            recorder.confirmed = climb.confirm() if climb.costs is not None else None
            recorder.partial = not complete and recorder.confirmed is None
        except Spent as spent:
            recorder.stopped += f"; still to do: {spent.what}"
    except BaseFailed as base:
        raise _end_without_base(recorder, climb, base) from None
    except BaseException as error:
        with contextlib.suppress(Exception):  # an error here must not hide the first one
            recorder.stopped = recorder.stopped or "it was stopped"
            attach(error, recorder.write())
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            say(describe_partial(recorder.place))
        raise
    if recorder.partial or not complete:
        if left := [name for name in climb.put_off if name not in climb.ladders]:
            recorder.stopped += f"; no time was left to run and prove {', '.join(left)}"
        recorder.stopped += describe_unproven(climb)
        recorder.stopped += f"; continue with --resume {recorder.place}"
    else:
        parity_gates.sweep(recorder.place)
    content = recorder.write()
    text = "\n".join(climb_report.write_lines(content))
    return Answer(text=text, json=store.to_json(content), exit_code=_choose_exit_code(content))


def describe_unproven(climb: Climb) -> str:
    """Describe the ladder whose first run was faster than what is kept, and that had no time for its proof."""
    fastest = choose_ladder(climb.known) if climb.costs is not None else None
    if fastest is None:
        return ""
    name, now, parts = fastest.key.removeprefix(AS_LADDER), climb.compute_top_rates().get("now"), list[str]()
    if climb.stack and now and (rate := climb.ladders[name]):
        parts.append(f"{name} was {rate / now:.1f} times as fast in one run")
    if proof_s := climb.proofs_s.get(name):
        parts.append(f"proving {name} takes {describe_time(proof_s)}")
    return "".join(f"; {part}" for part in parts)


def _end_without_base(recorder: Recorder, climb: Climb, base: BaseFailed) -> Failed:
    """Return the error to end with if the training fails, unchanged or with the stack reached so far."""
    trial, cause = base.result.trial, base.result.fault
    recorder.stopped = f"failed: {cause}"
    ended = (
        Failed(f"fastloop: {cause}")
        if trial is None
        else make_failure(dataclasses.replace(trial, cause=cause), recorder.place if climb.rows else None)
    )
    with contextlib.suppress(Exception):  # an error here must not hide the first one
        attach(ended, recorder.write())
    if trial is not None and trial.code == 2 and recorder.new and not climb.rows:
        forget(trial.run_dir)
        for name in WRITTEN:
            (recorder.place / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            trial.run_dir.parent.rmdir()
    return ended


def _choose_exit_code(content: ClimbFile) -> int:
    if (found := content.confirmed) is None:
        return 4 if content.partial else 0
    return exit_code([found], failed=bool(found.failures))


def _check(asked: ClimbRequest) -> None:
    if asked.budget_s < LEAST_S:
        raise ConfigError(
            got=f"--budget {asked.budget_s:g}s",
            why="not even the first training fits into that time",
            do=f"write {LEAST_S:g}s or more; most climbs need 5m to 20m",
        )
    if unknown := [each for each in asked.allow if each not in ALLOW]:
        raise ConfigError(got=f"--allow {unknown[0]}", why="unknown value", do=f"write {' or '.join(ALLOW)}")


def _take_fingerprints(start: ConfigArm | ScriptArm) -> tuple[str, str | None]:
    """Return fingerprints of the configuration, with a script's command, and of the training's source."""
    config, command = start.config(), start.command if isinstance(start, ScriptArm) else ()
    configured = fingerprint(config)
    if command:
        configured = hashlib.sha256(repr((configured, command)).encode()).hexdigest()
    return configured, fingerprint_source(config, command)


def _load_earlier(place: Path, start: ConfigArm | ScriptArm, resume: str | None) -> ClimbFile | None:
    """Load the ``climb.json`` to continue from. For a new climb, return None and delete old trials in its directory."""
    if resume is None:
        if (place / NAME).is_file():
            for trial in sorted(place.rglob(TRIAL)):
                forget(trial.parent)
        return None
    before = store.load(place / NAME, ClimbFile) or ClimbFile()
    configured, sources = _take_fingerprints(start)
    if before.config_sha256 != configured:
        raise ConfigError(
            got=f"--resume {place}",
            why="it was started with another configuration",
            do="repeat the original command, or start a new climb",
        )
    if before.recipe_sha256 not in (None, sources):  # an older climb did not record it
        raise ConfigError(
            got=f"--resume {place}",
            why=f"{start.config().recipe_file or start.name} changed since it began",
            do="undo the change, or start a new climb",
        )
    if isinstance(start, ConfigArm) or runs_under_this_python(start.command):
        refuse_others(place, {trial.parents[1] for trial in place.rglob(TRIAL)})
    return before
