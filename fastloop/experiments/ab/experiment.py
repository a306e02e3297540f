"""Runs an A/B: trains the arms in alternation and compares them.

All decisions follow from the files of finished runs, so an experiment that was stopped continues where it was and
repeats no finished run.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from fastloop.experiments.ab import parity_gates
from fastloop.experiments.ab.arms import Arm, Ask, Progress, label_of
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import read_finished
from fastloop.judge import statistics
from fastloop.judge.verdict import compare, explain_hopeless, is_final
from fastloop.records import readings
from fastloop.records.experiment import Comparison, Gate, Outcome, Sample
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Parity, say_duration
from fastloop.records.run_files import PlanFile
from fastloop.records.trial import Trial

WINDOW_S, FEWEST_STEPS, PILOT_STEPS = 10.0, 50, 30
"""For ``steps: auto``: the shortest window in seconds and in optimizer steps, and the steps of the pilot run."""
PARITY = "parity"
"""The folder of the base's gradient, inside the experiment's."""
SOURCE = "source"
"""One of the changed keys: the arm's code differs."""
QUEUES = 10
"""How many times the window must drain the queued batches, see `Measurement.window_too_short`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an experiment."""

    runs: statistics.Runs = 5
    """Runs of each arm; ``auto`` = as many as needed, with interim looks after 3, 5, 7 and 10 runs."""
    steps: int | None = None
    """Optimizer steps of each run; None for as many as the window needs."""
    first_steps: int | None = None
    """Optimizer steps of the base's first run, which is not counted; None for as many as in the others."""
    is_warm: bool = False
    """Whether earlier trainings have left the data in the page cache: then there is no such run."""
    base_gradient: Path | None = None
    """The folder of the base's gradient if earlier comparisons use it too; None for one inside the experiment's."""
    warmup: int = 20
    band_pct: float = 3.0
    """Differences within plus or minus this count as "no difference"."""
    seed: int = 0
    """Random seed of the order of runs."""
    limits: Limits = field(default_factory=Limits)


@dataclass(kw_only=True)
class Side:
    """One arm, with its results so far."""

    arm: Arm
    folder: Path
    changed_rungs: tuple[str, ...] = ()
    changed_keys: tuple[str, ...] = ()
    """Configuration keys that differ from the base, other than rungs."""
    promise: Parity | None = None
    """The parity class if the arm changes more than rungs; None if the plan of its rungs decides it."""
    steps: int = 0
    runs: dict[int, Trial] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    planned: Parity | None = None
    """The parity class of a plan made without training, used until the arm has run; None if there is no such plan."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The rungs that the arm changes, with the reasons, if its plan leaves out all of them; then it does not run."""
    failed: Trial | None = None
    gradient: Gate | None = None

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def out(self) -> bool:
        return self.failed is not None

    def trials(self) -> list[Trial]:
        return [trial for _, trial in sorted(self.runs.items())]

    def sample(self) -> Sample:
        """Return the finished runs that have a throughput."""
        kept = {number: trial for number, trial in sorted(self.runs.items()) if trial.samples_per_s is not None}
        active, inactive = parity_gates.split_by_effect([*kept.values()])
        return Sample(
            name=self.name,
            samples_per_s=tuple(trial.samples_per_s or 0 for trial in kept.values()),
            places=tuple(self.places[number] for number in kept),
            active_rungs=active,
            inactive_rungs=inactive or self.refused,
            changed_rungs=self.changed_rungs,
            changes_more=bool(self.changed_keys),
            refused=bool(self.refused),
            queue_error_pct=max(map(_read_queue_error_pct, kept.values()), default=0.0),
            timed_steps=min((trial.measurement.steps for trial in kept.values() if trial.measurement), default=None),
        )


class Unplanned(Exception):
    """An arm cannot be planned; the failed trial has the cause."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial.cause)
        self.trial = trial


class Experiment:
    """Trains the arms in alternation until each has a verdict, or until more runs cannot give one.

    Args:
        sides: the base first.
        say: receives progress lines.
    """

    def __init__(self, sides: Sequence[Side], place: Path, settings: Settings, say: Progress) -> None:
        self.sides, self.place, self.settings, self.say = list(sides), place, settings, say
        self.base = self.sides[0]
        self.pilots: dict[str, Trial] = {}
        self.order: list[tuple[str, int]] = []
        """Arm and number of each run, in the order in which they ran."""
        self.alpha = statistics.compute_error_rate(settings.runs, len(sides) - 1)
        self._first: Trial | None = None
        """The first trial that reports the step at which it began."""
        self._begun, self._pilot_steps = time.monotonic(), settings.steps
        self._is_warm = settings.is_warm
        """Whether a training has read the data in this process, so that it is in the page cache."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the whole experiment.

        Raises:
            Unplanned: an arm cannot be planned; nothing has been trained.
            KeyboardInterrupt, SystemExit: a signal stopped it.
        """
        self._plan()
        if all(side.refused for side in self.sides[1:]):
            return
        self._prepare()
        if self.base.out:
            return
        most = statistics.count_most_rounds(self.settings.runs)
        rounds = statistics.order(len(self.sides), most, self.settings.seed)
        for number, turn in enumerate(rounds):
            for position, index in enumerate(turn):
                side = self.sides[index]
                if not side.out and not self._is_hopeless(side):
                    self._run_one(side, number, number * len(turn) + position, most)
                if self.base.out:
                    return
            for side in self.sides[1:]:
                self._compare_gradients(side)
            if all(side.out or self._is_hopeless(side) for side in self.sides[1:]):
                return
            if statistics.is_due(number + 1, self.settings.runs) and number + 1 < most:
                stuck = [side.name for side in self.sides[1:] if side.out or self._is_hopeless(side)]
                if is_final(self.comparisons(), stuck):
                    return

    def _plan(self) -> None:
        """Plan the arms first: one that cannot be planned ends the experiment before any training. So does a plan that
        leaves out all that its arm changes, if those of the other arms do, too."""
        on_already = {*self.base.arm.config().ladder.enabled()}
        for side in self.sides[1:]:
            if not (side.changed_rungs or side.changed_keys) or not side.arm.plans_alone:
                continue
            trial = self._run_trial(side, side.folder / "plan", Ask(variation="plan"))
            if not trial.ok:
                raise Unplanned(trial)
            if isinstance(plan := trial.answer, PlanFile):
                skipped = {row.rung: row.reason or "" for row in plan.rungs if row.status == "skipped"}
                side.planned = plan.parity_class
                if {*side.changed_rungs} <= skipped.keys() - on_already and not side.changed_keys:
                    side.refused = {rung: skipped[rung] for rung in side.changed_rungs}

    def _prepare(self) -> None:
        """Run the base once without counting it: this fills the page cache for all arms and shows how long a run must
        be. For arms that change the batch, such a run shows how many of their steps see the same number of samples."""
        steps, warmup = self.settings.steps, self.settings.warmup
        self._pilot_steps = warmup + PILOT_STEPS if steps is None else self.settings.first_steps or steps
        needs_base = not self._is_warm or any(side.changed_keys for side in self.sides)
        for side in self.sides:
            if side.refused:
                continue
            if steps is None or side.changed_keys or (side is self.base and needs_base):
                trial = self._run_trial(side, side.folder / "warm-up", Ask(steps=self._pilot_steps, warmup=warmup))
                self.pilots[side.name] = trial
                side.failed = None if trial.ok else trial
            if self.base.out:
                return
        if steps is None:
            steps = warmup + max(count_enough_steps(trial) for trial in self.pilots.values() if trial.ok)
        base_batch = _read_global_batch(self.pilots.get(self.base.name))
        for side in self.sides:
            own = _read_global_batch(self.pilots.get(side.name))
            same = base_batch is None or own is None
            side.steps = steps if same else max(1, round(steps * (base_batch or 1) / (own or 1)))
            if side.changed_keys:
                side.promise = classify_promise(side.changed_keys, same_batch=same or own == base_batch)

    def _warm_up_again(self) -> None:
        """Run the base once more without counting it: since the experiment was interrupted, its files may have left the
        page cache, and the arm that reads them first would look slower."""
        folder = self.base.folder / "warm-up-again"
        shutil.rmtree(folder, ignore_errors=True)
        self._run_trial(self.base, folder, Ask(steps=self._pilot_steps, warmup=self.settings.warmup))

    def _run_one(self, side: Side, number: int, place: int, most: int) -> None:
        folder = side.folder / f"run-{number}"
        if not self._is_warm and read_finished(folder) is None:
            self._warm_up_again()
        count = f" ({number + 1} of {'up to ' if self.settings.runs == 'auto' else ''}{most})"
        trial = self._run_trial(
            side,
            folder,
            Ask(seed=number, steps=side.steps, warmup=self.settings.warmup, ledger=True),
            note=count + self._describe_left(most),
        )
        self.order.append((side.name, number))
        if trial.ok:
            side.runs[number], side.places[number] = trial, place
        else:
            side.failed = trial
            self.say(f"{label_of(side.name, trial.run_dir)} failed: {trial.cause}")

    def _describe_left(self, most: int) -> str:
        """Say how long the runs take that are left; an arm that has not run yet as long as the others on average."""
        took_s = dict[str, float]()
        for side in self.sides:
            known = side.trials() or [self.pilots[name] for name in (side.name,) if name in self.pilots]
            took_s |= {side.name: fmean(trial.seconds for trial in known)} if known else {}
        if not took_s:
            return ""
        usual_s = fmean(took_s.values())
        left = ((most - len(side.runs)) * took_s.get(side.name, usual_s) for side in self.sides if not side.out)
        return f", about {say_duration(sum(left))} left"

    def _run_trial(self, side: Side, folder: Path, ask: Ask, *, note: str = "") -> Trial:
        """Run a training, or load it if already finished. It fails if it began at a different step from the others."""
        trial = read_finished(folder, ask.variation)
        if trial is None:
            label = label_of(side.name, folder)
            self.say(f"{label}{note}")
            self._is_warm = self._is_warm or ask.variation == "as_it_is"
            trial = side.arm.run(label, folder, ask, limits=self.settings.limits, progress=self.say)
        if not trial.ok or trial.began is None:
            return trial
        self._first = self._first or trial
        if trial.began == self._first.began:
            return trial
        why = (
            f"it began at step {trial.began}, and {self._first.name} at step {self._first.began}: the script resumes"
            " from a checkpoint that keeps changing; use --args to point it elsewhere"
        )
        return dataclasses.replace(trial, ok=False, cause=why)

    # -- judging ------------------------------------------------------------------------------------------------------

    def parity_class(self, side: Side) -> Parity:
        """Return the parity class that the arm promises; with different rungs, the base's plan counts too."""
        if side.promise is not None:
            return side.promise
        if not side.changed_rungs:
            return "exact"
        if side.planned is not None and not side.runs:
            return side.planned
        return parity_gates.find_class([*side.trials(), *self.base.trials()])

    def _compare_gradients(self, side: Side) -> None:
        """Check the gradient once the arm has run, so that its plan is known; skip arms that claim no parity."""
        if (
            side.gradient is not None
            or side.out
            or not side.runs
            or self.parity_class(side) == "changes-training"
            or self.outcome(side).passed is False
        ):
            return
        if read_finished(side.folder / "gradients") is None:
            self.say(label_of(side.name, side.folder / "gradients"))
        side.gradient = parity_gates.judge_gradients(
            self.base.arm,
            side.arm,
            self.settings.base_gradient or self.place / PARITY,
            side.folder / "gradients",
            self.parity_class(side),
            limits=self.settings.limits,
            progress=self.say,
        )

    def outcome(self, side: Side) -> Outcome:
        """Judge whether this arm is the same training as the base, from the runs so far."""
        base = self.base.runs
        pairs = [(base[number], trial) for number, trial in sorted(side.runs.items()) if number in base]
        return parity_gates.judge_parity(pairs, side.gradient, self.parity_class(side))

    def _is_hopeless(self, side: Side) -> bool:
        """Whether more runs of an arm are useless: parity has failed, none of its changes took effect, or its
        windows are too short."""
        if side is self.base or not (side.runs or side.refused):
            return False
        return self.outcome(side).passed is False or bool(explain_hopeless(self.base.sample(), side.sample()))

    def comparisons(self) -> list[Comparison]:
        """Compare each arm with the base, from the runs so far."""
        base = self.base.sample()
        return [
            compare(base, side.sample(), self.outcome(side), band_pct=self.settings.band_pct, alpha=self.alpha)
            for side in self.sides[1:]
        ]


def count_enough_steps(trial: Trial) -> int:
    """Return the optimizer steps of a window that is long enough in seconds, in steps and for this arm's queues."""
    seen = trial.measurement or Measurement()
    step_ms = seen.step_ms.get("median") or 1e3 * WINDOW_S / FEWEST_STEPS
    queued = readings.read_loader(seen).get("queued_batches") or 0
    by_queue = math.ceil(QUEUES * queued / readings.count_micro_batches(seen)) + 1
    return max(FEWEST_STEPS, math.ceil(1e3 * WINDOW_S / step_ms), by_queue)


def _read_queue_error_pct(trial: Trial) -> float:
    """Return by how many percent a run's rate may be too high; 0 if its window is long enough for its queues."""
    seen = trial.measurement or Measurement(window_too_short=False)
    return seen.queue_error_pct or 0.0 if seen.window_too_short else 0.0


def _read_global_batch(trial: Trial | None) -> int | None:
    return trial.measurement.global_batch if trial is not None and trial.ok and trial.measurement else None


def classify_promise(keys: Sequence[str], *, same_batch: bool) -> Parity:
    """Return the parity class of an arm that changes more than rungs: different Trainer settings or code count as the
    same training if the gates confirm it; a different recipe or global batch is another training."""
    same = same_batch and all(key == SOURCE or key.startswith("trainer.") for key in keys)
    return "approximate" if same else "changes-training"
