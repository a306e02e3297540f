"""An arm that is the user's Lightning script, unmodified, with a FastLoop injected into each run.

The script runs as it would in a shell, with its own data and schedules. It receives a run's seed in ``PL_GLOBAL_SEED``,
which ``seed_everything()`` without a number reads, and which also seeds a script that seeds nothing. A seed written in
the script applies until it trains; then the run's number is added, because otherwise all runs would be identical.
Lightning writes no checkpoints, see `bridge/trials/no_checkpoints.py`, and Lightning's default logger writes into the
run's folder; everything else that the script writes, it writes in each run, as it would in a shell.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastloop.config.loading import DEFAULT, NOT_FOR_CALLBACKS, Config, load
from fastloop.config.schema import make_fault
from fastloop.errors import ConfigError
from fastloop.experiments.ab.arms import Ask, Progress
from fastloop.experiments.trials import supervise
from fastloop.experiments.trials.script_injection import (
    carried,
    check,
    explain_unmeasured,
    find_first_step,
    list_notes,
    make_folder_error,
    make_orders,
    name_file,
    name_of,
    read_events,
    step_of,
)
from fastloop.experiments.trials.supervise import Ended, Limits
from fastloop.experiments.trials.trial import (
    TRIAL,
    clear,
    describe_dead_rank,
    load_results,
    make_environment,
    quote_error,
    refuse,
)
from fastloop.records import store
from fastloop.records.measurement import Measurement
from fastloop.records.secrets import Scrubber
from fastloop.records.store import is_file
from fastloop.records.trial import ScriptEvent, ScriptOrders, Trial

VARIATIONS = ("as_it_is", "replayed", "resident", "no_exchange", "gradients")
"""The trial variations that a script supports: those that its own Trainer can show."""
_OURS = ("PYTHONPATH", "PYTHONSAFEPATH")
_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def make_command(script: str, args: str = "") -> tuple[str, ...]:
    """Return the command for ``--script`` and ``--args``: this Python runs a Python file, all else is as in a shell.

    Raises:
        ConfigError: there is no such script or command, or it is a directory.
    """
    try:
        whole = is_file(Path(script)) or os.path.isdir(script)  # noqa: PTH112 (Path's raises)
        given = [script] if whole else shlex.split(script)  # a path may hold spaces
        more = shlex.split(args)
    except ValueError as error:
        raise ConfigError(
            got=f"--script {script} --args {args}", why=f"it cannot be parsed: {error}", do="close the quotes"
        ) from None
    if len(given) == 1 and os.path.isdir(given[0]):  # noqa: PTH112
        raise make_folder_error(f"--script {given[0]}", Path(given[0]))
    if len(given) == 1 and given[0].endswith(".py"):
        if not is_file(Path(given[0])):
            raise ConfigError(
                got=f"--script {given[0]}", why="there is no such file", do=f"check the path; it starts at {Path.cwd()}"
            )
        given = [sys.executable, *given]
    elif given and given[0].endswith(".py") and is_file(Path(given[0])) and shutil.which(given[0]) is None:
        do = f"write --script {shlex.quote(given[0])} --args {shlex.quote(shlex.join([*given[1:], *more]))}"
        raise ConfigError(got=f"--script {script}", why="a script's arguments belong in --args", do=do)
    check([*given, *more])
    return (*given, *more)


def runs_under_this_python(command: Sequence[str]) -> bool:
    """Whether a command certainly runs with this Python's packages on this machine; srun, uv or bash may not."""
    found = Path(shutil.which(command[0]) or "")
    return found.name.startswith(("python", "torchrun")) and found.parent == Path(sys.executable).parent


@dataclass(frozen=True, kw_only=True)
class ArmPlace:
    """Where a script runs if not as in the user's shell, and how to check that it ran correctly there."""

    cwd: Path | None = None
    search_path: str | None = None
    """Replaces the user's PYTHONPATH."""
    not_from: Path | None = None
    """Report imports from this folder."""
    find_fault: Callable[[Sequence[str]], str | None] = lambda _: None
    """Receives the files imported from that folder; returns why the run does not count, or None."""


@dataclass(frozen=True, kw_only=True)
class ScriptArm:
    """A script with patches, which may set only ``rungs``, ``watch`` and ``strict``; the script sets the rest."""

    name: str
    command: tuple[str, ...]
    more: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    seed: int = 0
    """The seed of the first run."""
    place: ArmPlace = field(default_factory=ArmPlace)

    @property
    def plans_alone(self) -> bool:
        return False  # the script builds what is to be planned

    def change(self, name: str, *overrides: str, more: Sequence[str] = ()) -> ScriptArm:
        """Return the same arm with further patches and ``key=value`` overrides."""
        return dataclasses.replace(self, name=name, more=(*self.more, *more), overrides=(*self.overrides, *overrides))

    def config(self) -> Config:
        """Return the configuration of the injected callback.

        Raises:
            ConfigError: it cannot be used, or has a section that describes a run.
        """
        with tempfile.TemporaryDirectory() as folder:
            blank = Path(folder, "script.yaml")
            blank.touch()
            config = load(str(blank), more=self.more, overrides=self.overrides)
        for key, origin in config.origins.items():
            if (section := key.partition(".")[0]) in NOT_FOR_CALLBACKS and origin != DEFAULT:
                raise make_fault(
                    key,
                    origin,
                    f"{section} describes a run, but a script sets up its own",
                    "write only rungs, watch or strict; the script's own settings go into --args",
                )
        return config

    def run(
        self, label: str, folder: Path, ask: Ask, *, limits: Limits | None = None, progress: Progress | None = None
    ) -> Trial:
        """Run the script in a fresh process, to its end or to a limit.

        Only its first fit that trains is measured. With ``ask.steps``, each of its fits ends after that many steps, and
        schedules stay those of the whole training.

        Raises:
            ConfigError: nothing was started.
            KeyboardInterrupt, SystemExit: it was stopped; the script has then ended.
        """
        refuse(os.environ, script=True)
        if ask.variation not in VARIATIONS:
            raise ConfigError(
                got=f"{ask.variation} of a script",
                why="that is not visible from its Trainer",
                do=f"ask for one of {', '.join(VARIATIONS)}",
            )
        warm = () if ask.warmup is None else (f"watch.warmup_steps={ask.warmup}",)
        config = dataclasses.replace(self, overrides=(*self.overrides, *warm)).config()
        folder.mkdir(parents=True, exist_ok=True)
        clear(folder)
        say = None if progress is None else (lambda line: progress(f"{label}: {line}"))
        search_path = self.place.search_path
        environ = {**os.environ, **({} if search_path is None else {"PYTHONPATH": search_path})}
        with carried(self._orders(config, folder.absolute(), ask), environ) as (variables, private):
            variables["PL_GLOBAL_SEED"] = str(self.seed + ask.seed)
            ended = supervise.supervise(
                self._wrap_command(variables),
                folder,
                limits=limits,
                cwd=self.place.cwd,
                env=make_environment(os.environ),
                stacks=True,
                progress=say,
            )
            events = read_events(private)
        trial = self._make_trial(label, folder, ask, config, ended, events)
        store.save(folder, {TRIAL: trial})
        if say is not None:
            for note in [*_describe_end(trial), *list_notes(events)]:
                say(note)
        return trial

    def _orders(self, config: Config, folder: Path, ask: Ask) -> ScriptOrders:
        orders = dataclasses.replace(
            make_orders(config, folder, name_of(self.command)),
            max_steps=ask.steps,
            ledger=ask.ledger,
            variation=ask.variation,
            seed_offset=ask.seed,
            reference=None if ask.reference is None else str(ask.reference.absolute()),
            beat=str(folder / supervise.BEAT),
            stacks=True,
            disposable=True,
            not_from=None if self.place.not_from is None else str(self.place.not_from),
        )
        if ask.variation != "gradients":
            return orders
        silent = {**orders.config, "watch": {"enabled": False}}  # ends by itself and times nothing
        return dataclasses.replace(orders, config=silent, max_steps=None)

    def _wrap_command(self, variables: Mapping[str, str]) -> list[str]:
        """Return the command with the variables of the user's shell and ours, without those for its supervisor."""
        base = make_environment(os.environ)
        wanted = {
            name: value
            for name, value in os.environ.items()
            if name in base or name in _OURS or (name.startswith("PL_") and name not in _SEEDS)
        }
        wanted |= variables
        return [
            "env",
            *(part for name in base if name not in wanted for part in ("-u", name)),
            *(f"{name}={value}" for name, value in wanted.items() if base.get(name) != value),
            *self.command,
        ]

    def _make_trial(
        self, label: str, folder: Path, ask: Ask, config: Config, ended: Ended, events: Sequence[ScriptEvent]
    ) -> Trial:
        hide = Scrubber(list(self.command)).text
        measurement, answer = load_results(folder, ask.variation)
        name = name_file(self.command)
        if ask.variation == "gradients":
            cause = None if answer is not None else _explain_no_result(name, ended, events)
        else:
            cause = _find_cause(name, measurement, config.watch.warmup_steps, ended, events)
            cause = cause or describe_dead_rank(folder, measurement)
        cause = cause or self.place.find_fault([each for event in events for each in event.files])
        step = ended.last_step if ended.last_step is not None else step_of(events)
        return Trial(
            name=label,
            ok=cause is None,
            cause=cause and hide(cause),
            seconds=ended.seconds,
            run_dir=folder,
            code=ended.code,
            last_step=step,
            started=ended.started,
            tail=hide(ended.tail) if cause else "",
            measurement=measurement,
            answer=answer,
            began=find_first_step(events),
            after_fit=hide(ended.cause) if cause is None and ended.cause else "",
            unsaved=any(event.event == "unsaved" for event in events),
        )


def _describe_end(trial: Trial) -> list[str]:
    """Describe how a script failed after the measured fit."""
    if not trial.after_fit:
        return []
    if trial.lacked_checkpoint:
        return ["its fit was measured; the code after it needs a checkpoint, but these runs write none"]
    return [f"its fit was measured, then: {trial.after_fit}"]


def _explain_no_result(name: str, ended: Ended, events: Sequence[ScriptEvent]) -> str:
    return quote_error(ended.cause, ended.tail) if ended.cause else explain_unmeasured(name, events, ended.code)


def _find_cause(
    name: str, measurement: Measurement | None, warmup: int, ended: Ended, events: Sequence[ScriptEvent]
) -> str | None:
    """Return why there is no rate, in one line. A fit that finished on all ranks was measured, no matter what the
    script did afterwards."""
    if measurement is None:
        return _explain_no_result(name, ended, events)
    steps = measurement.total_steps
    if measurement.partial:
        why = next((f": {event.why}" for event in reversed(events) if event.event == "exception"), "")
        return ended.cause or f"{name} exited after {steps} steps, inside its fit{why}"
    if measurement.samples_per_s is None and steps is not None and steps <= warmup:
        return f"the fit of {name} ended after {steps} steps, before the window, which opens after {warmup}"
    dead = (event for event in events if event.event == "exception" and event.measured and event.rank)
    return next((f"rank {each.rank} died in its fit at step {each.step}: {each.why}" for each in dead), None)
