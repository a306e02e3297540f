"""Finds one number of one rung by training with a few values, each in a fresh process.

A search is not a proof: each value is trained once, and the best of several looks better than it is.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastloop.config.loading import Config
from fastloop.evidence import machine
from fastloop.experiments.ab.arms import Arm, Ask, Progress
from fastloop.experiments.ab.results import read_hardware
from fastloop.experiments.trials.failures import ran_out_of_memory
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import read_finished
from fastloop.experiments.tune.choice import (
    AMPLE,
    FEW,
    OUT_OF_MEMORY,
    are_last_two_slower,
    choose,
    choose_next_value,
    explain,
    list_tunables,
    list_values,
    name_tuned_key,
)
from fastloop.ladder import collect_cards, regroups
from fastloop.records.card import SearchSpace
from fastloop.records.measurement import Measurement
from fastloop.records.run_files import load_plan, load_verdicts
from fastloop.records.store import decode
from fastloop.records.trial import LoaderAnswer, Trial, Variation
from fastloop.records.tuning import LoaderTime, Point, TuningFile

FIRST = "as-it-is"
"""The training without the rung, with which every search begins."""
FIRST_OF_ALL = "first your own setting, without the rung; then candidates"
LEAST_STEPS = 30
"""Fewest steps of a window; its queues may need more (`bridge/watch/measurement.py`: ten times what they hold)."""


@dataclass(frozen=True, kw_only=True)
class KnownTimes:
    """Known times of the training without the rung, which is then not trained again."""

    ms: Mapping[int, float]
    """Step time by value, including the training without the rung: value 0, or the loader's micro-batch size."""
    micro: int = 1
    """Samples of a loader batch."""
    window: int = 1
    """Loader batches of an optimizer step on one rank."""
    queued: int = 0
    """Batches that the loader keeps ready."""
    beside: bool = False
    """Whether workers load at the same time, as in the given times; if not, micro-batches train on replayed batches."""


@dataclass(frozen=True, kw_only=True)
class Tuned(TuningFile):
    """The result of a search."""

    key: str = ""
    as_it_is: int = 0
    best: int | None = None
    failed: Trial | None = field(default=None, metadata={"json": None})
    """A failed training, if no value could be measured."""


@dataclass(kw_only=True)
class Search:
    """One search for the best value of the one number of a rung: its trainings, and their results.

    Raises:
        ConfigError: the arm's configuration cannot be used.
    """

    arm: Arm
    """The training; the rung need not be enabled in it."""
    what: str
    """A rung with a tunable number, one of `list_tunables`."""
    place: Path
    """Receives one directory for each training."""
    steps: int | None = None
    """Optimizer steps of each training; None for as many as its window needs, at most ``run.max_steps``."""
    warmup: int | None = None
    """How many of them come before the window; None for the arm's own number."""
    limits: Limits | None = None
    progress: Progress | None = None
    resume: bool = False
    """Reuse the finished trainings in `place`, which must belong to the same search."""
    given: KnownTimes | None = None
    """Known times that need not be trained; None if nothing is known."""
    begins: Callable[[str], None] = lambda _: None
    """Called with the name of each training before it begins; an exception ends the search."""
    stopped: Callable[[Tuned, BaseException], None] = lambda *_: None
    """Called if the search is interrupted, with its results so far (nothing chosen) and the exception."""

    def __post_init__(self) -> None:
        self.config, self._number = self.arm.config(), list_tunables()[self.what]
        self._yours = read_own_value(self.config, self.what)
        self._begun, self._base, self._queued = time.monotonic(), 0, 0
        self.points: dict[int, Point] = {}
        """In the order in which they were tried."""
        self.loader_ms: dict[int, float] = {}
        self.rest_ms: float | None = None
        self.failed: Trial | None = None

    def run(self) -> Tuned:
        """Find the best value."""
        try:
            self._train_all()
            return self.summarize()
        except BaseException as error:
            self.stopped(replace(self.summarize(), best=None, patch=None, why="it was stopped", partial=True), error)
            raise

    def _train_all(self) -> None:
        """Train without the rung, unless its time is known, and with the promising values."""
        replays = self._number.trained == "replayed" and not (self.given is not None and self.given.beside)
        variation: Variation = "replayed" if replays else "as_it_is"
        given = self.given or self._train_first(variation)
        if given is None:
            return
        self._base, self._queued = self._number.without(SearchSpace(micro_batch=given.micro)), given.queued
        self.points.update(
            (value, Point(value=value, step_ms=ms)) for value, ms in given.ms.items() if value not in self.points
        )
        cpus = max(1, machine.count_usable_cpus() // self.config.run.devices)
        tried = list_values(self.what, cpus=cpus, micro=given.micro, window=given.window, yours=self._yours)
        values = [value for value in tried if value not in self.points]
        if self._number.trained != "loader" or len(values) <= FEW or not self._try_loader_first(values):
            self._train_each(values, variation)

    def _train_first(self, variation: Variation) -> KnownTimes | None:
        """Train without the rung; returns None if this gave no step time."""
        first = self._train(FIRST, "enabled=false", variation=variation, left=FIRST_OF_ALL)
        found = first.measurement or Measurement()
        micro = found.micro_batch or 1
        self._base = self._number.without(SearchSpace(micro_batch=micro))
        self.points[self._base] = make_point(self._base, first, None)
        if not self.points[self._base].ok:
            self.failed = first
            return None
        return KnownTimes(
            ms={},
            micro=micro,
            window=round((found.global_batch or micro) / found.world_size / micro),
            queued=int((found.evidence.get("loader") or {}).get("queued_batches") or 0),
        )

    def _train_each(self, values: Sequence[int], variation: Variation) -> None:
        """Train with each value in sequence, until they only get worse or the rung has no effect."""
        for number, value in enumerate(values):
            after = len(values) - number - 1
            trial = self._measure(value, f"at most {after} more after it" if after else "the last", variation)
            one_for_all = self._number.trained != "replayed"  # a micro-batch may be refused for its size
            does_nothing = trial.ok and not self.points[value].ok and one_for_all
            if does_nothing or are_last_two_slower([each.step_ms for each in self.points.values()]):
                return

    def _try_loader_first(self, values: Sequence[int]) -> bool:
        """Time the loader alone, then train with the counts that may be best; returns False if it cannot be timed."""
        rest = self._train("replayed", "enabled=false", variation="replayed", left="at most 5 more after it")
        self.rest_ms = rest_ms = make_point(0, rest, None).step_ms
        if rest_ms is None or not self._measure_loaders(values, rest_ms):
            return False
        bounds = {value: max(rest_ms, ms) for value, ms in self.loader_ms.items()}
        while True:
            tried = {value: each.step_ms for value, each in self.points.items() if value}
            value = choose_next_value(tried, bounds, rest_ms, values, self._number.tolerance)
            if value is None:
                return True
            self._measure(value, "one or two more may follow", "as_it_is")

    def _measure_loaders(self, values: Sequence[int], rest_ms: float) -> bool:
        """Time the loader alone until it is fast enough or gets no better; returns False if it cannot be timed."""
        trial = self._train(
            "loaders",
            "enabled=true",
            variation="loader",
            left="at most 4 more after it",
            counts=tuple(values),
            enough_ms=AMPLE * rest_ms,
        )
        answer = decode(trial.answer, LoaderAnswer) or LoaderAnswer()
        if trial.ok and self.what not in answer.inactive:
            self.loader_ms = answer.loaders_ms
        return bool(self.loader_ms)

    def _measure(self, value: int, left: str, variation: Variation) -> Trial:
        settings = {**dataclasses.asdict(getattr(self.config.ladder, self.what)), self._number.field: value}
        ready = collect_cards()[self.what].batches_ready(settings, value if self._number.trained == "loader" else 0)
        trial = self._train(
            f"{self.what}-{value}",
            "enabled=true",
            f"{self._number.field}={value}",
            variation=variation,
            queued=self._queued + ready,
            left=left,
        )
        self.points[value] = make_point(value, trial, self.what)
        self.failed = self.failed or (None if trial.ok else trial)
        return trial

    def _train(
        self, label: str, *settings: str, variation: Variation, left: str, queued: int = 0, **loader: Any
    ) -> Trial:
        folder = self.place / label
        if self.resume and (known := read_finished(folder, variation)) is not None:
            return known
        self.begins(label)
        if self.progress is not None:
            self.progress(left if label == FIRST else f"{label}; {left}")
        arm = self.arm.change(self.arm.name, *(f"rungs.{self.what}.{setting}" for setting in settings))
        steps = self.steps or choose_steps(self.config, queued)
        ask = Ask(steps=steps, warmup=self.warmup, variation=variation, **loader)
        return arm.run(label, folder, ask, limits=self.limits, progress=self.progress)

    def summarize(self) -> Tuned:
        """Return the result of the trainings so far."""
        ms = {value: each.step_ms for value, each in self.points.items() if each.step_ms is not None}
        chosen, measured = choose(ms, self._number.tolerance), [value for value in ms if value != self._base]
        best = None if chosen == self._base else chosen
        patch = None if best is None else {"rungs": {self.what: {"enabled": True, self._number.field: best}}}
        points = tuple(self.points[value] for value in sorted(self.points))
        first = read_finished(self.place / FIRST)
        return Tuned(
            run_dir=str(self.place),
            name=self.config.name,
            what=self.what,
            key=name_tuned_key(self.what),
            hardware=read_hardware([] if first is None else [first]),
            points=points,
            as_it_is=self._base,
            loaders=tuple(LoaderTime(value=value, loader_ms=ms) for value, ms in self.loader_ms.items()),
            rest_ms=self.rest_ms,
            tolerance_pct=100 * self._number.tolerance,
            yours=self._yours,
            best=best,
            patch=patch,
            why=explain(self.what, points, self._base, best, self._yours, self.loader_ms, self.rest_ms),
            seconds=time.monotonic() - self._begun,
            failed=None if measured else self.failed,
        )


def choose_steps(config: Config, queued: int) -> int:
    """Return optimizer steps whose window is long enough for the queues, at most the configured number."""
    accumulate = config.trainer.get("accumulate_grad_batches")
    regrouped = regroups(config.ladder.enabled())
    each = accumulate if isinstance(accumulate, int) and accumulate > 0 and not regrouped else 1
    window = max(LEAST_STEPS, math.ceil(10 * queued / each))
    return min(config.run.max_steps, max(config.watch.warmup_steps, math.ceil(queued / each)) + window + 2)


def read_own_value(config: Config, what: str) -> int | None:
    """Return the number that the user wrote; None if it is the default or left to fastloop."""
    rung, key = getattr(config.ladder, what), list_tunables()[what].field
    value = getattr(rung, key)
    return value if isinstance(value, int) and value != getattr(type(rung)(), key) else None


def make_point(value: int, trial: Trial, rung: str | None) -> Point:
    """Return the result of training with a value.

    Args:
        rung: the rung that must have been active.
    """
    if not trial.ok:
        return Point(value=value, ok=False, why=OUT_OF_MEMORY if ran_out_of_memory(trial) else trial.cause)
    if rung is not None and (idle := explain_inactive(trial.run_dir, rung)) is not None:
        return Point(value=value, ok=False, why=f"{rung} is inactive: {idle}")
    found = trial.measurement or Measurement()
    if not found.samples_per_s:
        return Point(value=value, ok=False, why="the run was too short to measure a rate")
    doubts = [*found.state, *(["window too short"] if found.window_too_short else [])]
    why = "; ".join(doubts) or None
    return Point(value=value, step_ms=compute_step_ms(found), samples_per_s=found.samples_per_s, why=why)


def compute_step_ms(found: Measurement) -> float | None:
    """Return the time of an optimizer step, from the rate if known, since that leaves out batches that queues held
    before."""
    if found.samples_per_s and found.global_batch:
        return 1e3 * found.global_batch / found.samples_per_s
    return found.step_ms.get("mean") or None


def explain_inactive(run_dir: Path, rung: str) -> str | None:
    """Return why a rung had no effect in a run, from its files; None if it took effect or if this is unknown."""
    idle = [(step.rung, step.reason) for step in load_plan(run_dir).steps if step.status == "skipped"]
    idle += [(verdict.rung, verdict.why) for verdict in load_verdicts(run_dir) if verdict.took is False]
    return next((str(why) for name, why in idle if name == rung), None)
