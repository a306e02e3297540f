"""One number of one rung, found by training with each of a few values, every training in a fresh process.

A search is no proof: one training tells each value, and the best of several looks better than it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastloop import facts as machine
from fastloop.commands.arms import Ask, ConfigArm, Progress
from fastloop.commands.choosing import AMPLE, FEW, KEYS, TOLERANCE, Point, choose, grid, hopeless, next_value, reason
from fastloop.commands.readback import read
from fastloop.commands.supervise import Limits
from fastloop.commands.trial import Trial, Variation, finished
from fastloop.config import Config

FIRST = "as-it-is"
"""The training without the rung, which every search begins with."""
LEAST_STEPS = 30
"""Of a window; more where its queues ask for more (`bridge/measuring.py`: ten times what they hold)."""
_MEMORY = re.compile(r"out of memory|can't allocate memory|\bMemoryError\b|ALLOC_FAILED", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What is known of the training without the rung, which is then not trained again."""

    ms: Mapping[int, float]
    """Of a step, by value, the training without the rung included: 0, or for a micro-batch that of the loader."""
    micro: int = 1
    """Samples of a loader batch."""
    window: int = 1
    """Loader batches of an optimizer step on one rank."""
    queued: int = 0
    """Batches that the loader keeps ready."""
    beside: bool = False
    """Workers load beside, as they do in what is given; else what a micro-batch gains is tried on replayed batches."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a search found."""

    key: str
    """``rungs.workers.count``"""
    points: tuple[Point, ...] = ()
    """By value; the one `as_it_is` is the training without the rung."""
    best: int | None = None
    """None: no value beats the training without the rung by more than the tolerance."""
    patch: Mapping[str, Any] | None = None
    why: str = ""
    as_it_is: int = 0
    """0, or for a micro-batch that of the loader."""
    yours: int | None = None
    """What the user wrote for this number, where it is not the default."""
    loader_ms: Mapping[int, float] = field(default_factory=dict)
    """What the loader alone takes for a step, by value, where it was asked: more was not trained than needed."""
    rest_ms: float | None = None
    """What the step takes without its loader, where that was asked."""
    failed: Trial | None = None
    """A training that failed, where no value could be measured."""


def search(arm: ConfigArm, what: str, place: Path, *, steps: int | None = None, warmup: int | None = None,
           limits: Limits | None = None, progress: Progress | None = None, resume: bool = False,
           given: Given | None = None, begins: Callable[[str], None] = lambda _: None,
           stopped: Callable[[Tuned, BaseException], None] = lambda *_: None) -> Tuned:  # fmt: skip
    """Find the best value of the one number of a rung.

    Args:
        arm: the training; the rung need not be switched on in it.
        what: one of `KEYS`.
        place: gets one directory for each training.
        steps: optimizer steps of each; None: as many as its window takes, at most ``run.max_steps``.
        warmup: of them, before the window; None: as the arm has it.
        resume: take trainings that ended in `place` on an earlier day as they are; they must be of the same search.
        given: what need not be trained; None: nothing is known.
        begins: called with the name of each training before it begins; what it raises ends the search.
        stopped: called with what was found until then and with what is raised before the end.

    Raises:
        ConfigError: the arm's configuration cannot be used.
    """
    ask = Ask(steps=steps, warmup=warmup)
    bench = _Bench(arm, what, place, ask, limits=limits, progress=progress, resume=resume, begins=begins)
    try:
        return bench.search(given)
    except BaseException as error:
        stopped(bench.tuned(), error)
        raise


class _Bench:
    """The trainings of one search, and what they gave."""

    def __init__(self, arm: ConfigArm, what: str, place: Path, ask: Ask, *, limits: Limits | None,
                 progress: Progress | None, resume: bool, begins: Callable[[str], None]) -> None:  # fmt: skip
        self.arm, self.what, self.place, self.config = arm, what, place, arm.config()
        self._ask, self._limits, self._resume, self._begins = ask, limits, resume, begins
        self._progress: Progress = progress or (lambda _: None)
        self._yours = own_value(self.config, what)
        self._base = self._queued = 0
        self.points: dict[int, Point] = {}
        """In the order in which they were tried."""
        self.loader_ms: dict[int, float] = {}
        self.rest_ms: float | None = None
        self.failed: Trial | None = None

    def search(self, given: Given | None) -> Tuned:
        """Train without the rung, unless that is known, and with the values that it is worth to try."""
        replays = self.what == "batch" and not (given is not None and given.beside)
        variation: Variation = "replayed" if replays else "as_it_is"
        given = given or self._first(variation)
        if given is None:
            return self.tuned()
        self._base, self._queued = given.micro if self.what == "batch" else 0, given.queued
        self.points.update((value, Point(value=value, step_ms=ms)) for value, ms in given.ms.items()
                           if value not in self.points)  # fmt: skip
        cpus = max(1, machine.usable_cpus() // self.config.run.devices)
        tried = grid(self.what, cpus=cpus, micro=given.micro, window=given.window, yours=self._yours)
        values = [value for value in tried if value not in self.points]
        if self.what != "workers" or len(values) <= FEW or not self._workers(values):
            self._each(values, variation)
        return self.tuned()

    def _first(self, variation: Variation) -> Given | None:
        """The training without the rung; None where it gave no step time."""
        first = self._train(FIRST, "enabled=false", variation=variation, left="the number of others is not known")
        seen = first.measurement or {}
        micro = int(seen.get("micro_batch") or 1)
        self._base = micro if self.what == "batch" else 0
        self.points[self._base] = point(self._base, first, None)
        if not self.points[self._base].ok:
            self.failed = first
            return None
        return Given(ms={}, micro=micro,
                     window=round((seen.get("global_batch") or micro) / (seen.get("world_size") or 1) / micro),
                     queued=int(((seen.get("evidence") or {}).get("loader") or {}).get("queued_batches") or 0))

    def _each(self, values: Sequence[int], variation: Variation) -> None:
        """Train with one value after the other, until they only get worse or it is seen that the rung does nothing."""
        for number, value in enumerate(values):
            trial = self._measure(value, f"at most {len(values) - number - 1} left after it", variation)
            does_nothing = trial.ok and not self.points[value].ok and self.what != "batch"
            if does_nothing or hopeless([each.step_ms for each in self.points.values()]):
                return

    def _workers(self, values: Sequence[int]) -> bool:
        """Ask the loader alone first, and train with the counts that can be the best; False: it cannot be asked."""
        rest = self._train("replayed", "enabled=false", variation="replayed", left="at most 5 left after it")
        self.rest_ms = rest_ms = point(0, rest, None).step_ms
        if rest_ms is None or not self._ask_loaders(values, rest_ms):
            return False
        bounds = {value: max(rest_ms, ms) for value, ms in self.loader_ms.items()}
        while True:
            tried = {value: each.step_ms for value, each in self.points.items() if value}
            value = next_value(tried, bounds, rest_ms, values, TOLERANCE["workers"])
            if value is None:
                return True
            self._measure(value, "one or two may follow", "as_it_is")

    def _ask_loaders(self, values: Sequence[int], rest_ms: float) -> bool:
        """What the loader alone takes, until that is ample or gets no better; False: it does not tell."""
        trial = self._train("loaders", "enabled=true", variation="loader", left="at most 4 left after it",
                            counts=tuple(values), enough_ms=AMPLE * rest_ms)  # fmt: skip
        answer = trial.answer or {}
        if trial.ok and self.what not in (answer.get("inactive") or {}):
            self.loader_ms = {each["count"]: float(each["ms_per_step"]) for each in answer.get("counts") or []
                              if each.get("ms_per_step")}  # fmt: skip
        return bool(self.loader_ms)

    def _measure(self, value: int, left: str, variation: Variation) -> Trial:
        rungs, queued = self.config.ladder, self._queued
        if self.what == "workers":
            queued = value * rungs.workers.prefetch_factor + (rungs.prefetch.depth if rungs.prefetch.enabled else 0)
        elif self.what == "prefetch":
            queued += value
        trial = self._train(f"{self.what}-{value}", "enabled=true", f"{KEYS[self.what]}={value}", variation=variation,
                            queued=queued, left=left)  # fmt: skip
        self.points[value] = point(value, trial, self.what)
        self.failed = self.failed or (None if trial.ok else trial)
        return trial

    def _train(self, label: str, *settings: str, variation: Variation, left: str, queued: int = 0,
               **asked: Any) -> Trial:  # fmt: skip
        folder = self.place / label
        if self._resume and (known := finished(folder)) is not None:
            return known
        self._begins(label)
        self._progress(f"{label}: begins; {left}")
        arm = replace(self.arm, job=self.arm.job.but(*(f"rungs.{self.what}.{setting}" for setting in settings)))
        ask = replace(self._ask, steps=self._ask.steps or steps_for(self.config, queued), variation=variation,
                      **asked)  # fmt: skip
        return arm.run(label, folder, ask, limits=self._limits, progress=self._progress)

    def tuned(self) -> Tuned:
        """From the trainings there are."""
        ms = {value: each.step_ms for value, each in self.points.items() if each.step_ms is not None}
        chosen, measured = choose(ms, TOLERANCE[self.what]), [value for value in ms if value != self._base]
        best = None if chosen == self._base else chosen
        patch = None if best is None else {"rungs": {self.what: {"enabled": True, KEYS[self.what]: best}}}
        points = tuple(sorted(self.points.values(), key=lambda each: each.value))
        why = reason(self.what, points, self._base, best, self._yours, self.loader_ms, self.rest_ms)
        return Tuned(key=f"rungs.{self.what}.{KEYS[self.what]}", points=points, best=best, patch=patch, why=why,
                     as_it_is=self._base, yours=self._yours, loader_ms=self.loader_ms, rest_ms=self.rest_ms,
                     failed=None if measured else self.failed)  # fmt: skip


def steps_for(config: Config, queued: int) -> int:
    """Optimizer steps of a training whose window is long enough for its queues, and no more than it has."""
    accumulate = config.trainer.get("accumulate_grad_batches")
    each = accumulate if isinstance(accumulate, int) and accumulate > 0 and not config.ladder.batch.enabled else 1
    window = max(LEAST_STEPS, math.ceil(10 * queued / each))
    return min(config.run.max_steps, max(config.watch.warmup_steps, math.ceil(queued / each)) + window + 2)


def own_value(config: Config, what: str) -> int | None:
    """The number as the user wrote it; None where it is the default or left to us."""
    rung, key = getattr(config.ladder, what), KEYS[what]
    value = getattr(rung, key)
    return value if isinstance(value, int) and value != getattr(type(rung)(), key) else None


def point(value: int, trial: Trial, rung: str | None) -> Point:
    """What one training says of a value.

    Args:
        rung: what has to have been active in it.
    """
    if not trial.ok:
        memory = _MEMORY.search(f"{trial.cause}\n{trial.tail}") and "SIGKILL" not in str(trial.cause)
        return Point(value=value, ok=False, why="out of memory" if memory else trial.cause)
    if rung is not None and (idle := inactive(trial.run_dir, rung)) is not None:
        return Point(value=value, ok=False, why=f"{rung} is inactive: {idle}")
    rate, seen = trial.samples_per_s, trial.measurement or {}
    if rate is None:
        return Point(value=value, ok=False, why="the run was too short to measure a rate")
    batch = seen.get("global_batch")
    # Not the step time as such: the rate leaves out the batches that a queue held before.
    ms = 1e3 * batch / rate if batch else (seen.get("step_ms") or {}).get("mean")
    return Point(value=value, step_ms=ms, samples_per_s=rate,
                 why="window too short" if seen.get("window_too_short") else None)  # fmt: skip


def inactive(run_dir: Path, rung: str) -> str | None:
    """Why a rung did nothing in a run, as its files say; None where it took, or nothing was said."""
    plan, judged = read(run_dir / "plan.json") or {}, read(run_dir / "verdicts.json") or {}
    said = [(row.get("rung"), row.get("reason")) for row in plan.get("rungs") or [] if row.get("status") == "skipped"]
    said += [(row.get("rung"), row.get("why")) for row in judged.get("verdicts") or [] if row.get("took") is False]
    return next((str(why) for name, why in said if name == rung), None)
