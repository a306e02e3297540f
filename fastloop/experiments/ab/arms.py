"""The arms of an experiment: trainings that run several times, each with a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fastloop.config.loading import Config
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import Job, Task, run_trial
from fastloop.records.trial import Trial

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Ask(Task):
    """How to run one training of an arm."""

    seed: int = 0
    """Added to the arm's own ``run.seed``."""
    steps: int | None = None
    """Optimizer steps; None for the arm's own number."""
    warmup: int | None = None
    """How many of these steps come before the window; None for the arm's own number."""


class Arm(Protocol):
    """One side of an experiment."""

    @property
    def name(self) -> str: ...

    @property
    def plans_alone(self) -> bool:
        """Whether the arm can be planned without training it."""

    def change(self, name: str, *overrides: str, more: Sequence[str] = ()) -> Arm:
        """Return the same training under another name, with further patches and ``key=value`` overrides."""

    def config(self) -> Config:
        """Return its checked configuration; for a script, that of the injected callback. Raises ConfigError."""

    def run(
        self, label: str, folder: Path, ask: Ask, *, limits: Limits | None = None, progress: Progress | None = None
    ) -> Trial:
        """Train in a fresh process, to its end or to a limit."""


def label_of(arm: str, folder: Path) -> str:
    """Name a training of an arm, for progress, errors and reports, after its directory: ``amp, run-0``."""
    return f"{arm}, {folder.name}"


@dataclass(frozen=True, kw_only=True)
class ConfigArm:
    """An arm that is a configuration: a recipe with patches."""

    name: str
    job: Job

    @property
    def plans_alone(self) -> bool:
        return True

    def change(self, name: str, *overrides: str, more: Sequence[str] = ()) -> ConfigArm:
        """Return the same arm with further patches and ``key=value`` overrides."""
        job = dataclasses.replace(self.job, more=(*self.job.more, *more))
        return ConfigArm(name=name, job=job.override(*overrides))

    def config(self) -> Config:
        return self.job.config()

    def run(
        self, label: str, folder: Path, ask: Ask, *, limits: Limits | None = None, progress: Progress | None = None
    ) -> Trial:
        """Train in a fresh process, to its end or to a limit."""
        overrides = [f"run.seed={self.config().run.seed + ask.seed}"]
        if ask.steps is not None:
            overrides.append(f"run.max_steps={ask.steps}")
        if ask.warmup is not None:
            overrides.append(f"watch.warmup_steps={ask.warmup}")
        task = {each.name: getattr(ask, each.name) for each in dataclasses.fields(Task)}
        job = dataclasses.replace(self.job.override(*overrides), **task)
        return run_trial(label, job, folder, limits=limits, progress=progress)
