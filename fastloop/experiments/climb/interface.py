"""All that a climb needs from outside: trainings, searches, gates, and their results. Its decisions depend on nothing
else, so they can be tested on a simulated machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb.budget import Length
from fastloop.experiments.climb.candidates import find_refusals
from fastloop.experiments.trials.trial import Trial
from fastloop.experiments.tune.search import KnownTimes, Tuned, compute_step_ms
from fastloop.records.card import Stack
from fastloop.records.climb import Confirmation
from fastloop.records.experiment import Outcome
from fastloop.records.measurement import GAPS, Measurement
from fastloop.records.plan import Parity
from fastloop.records.run_files import load_plan, load_verdicts
from fastloop.records.store import decode
from fastloop.records.trial import LoaderAnswer

LAUNCH_BOUND = 0.1
"""Of a step: where the device is done so soon after the host has issued a step, launches are the limit."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What matters of one training. None = not measured."""

    ok: bool = True
    cause: str | None = None
    seconds: float = 0.0
    samples_per_s: float | None = None
    step_ms: float | None = None
    """Of one optimizer step, in the long run: what queues had ready before is taken out."""
    outside_ms: float = 0.0
    gap_ms: float = 0.0
    rest_ms: float | None = None
    """Of a step, what is neither outside nor a wait for data: computing, beside the workers where there are any."""
    steps: int | None = None
    """Optimizer steps it trained, warm-up included."""
    ended_at: int | None = None
    """Where its fit came to its end: its steps as the Trainer counts them, one for each of several optimizers."""
    global_batch: int | None = None
    micro_batch: int | None = None
    world_size: int = 1
    device: str = "cpu"
    device_name: str | None = None
    workers: int = 0
    queued: int = 0
    """Batches that workers and device feeds hold ready."""
    mfu: float | None = None
    launch_bound: bool | None = None
    waits_ms: float | None = None
    """The training thread's, for data: without workers it is the loading, hidden behind the device or not."""
    copies_ms: float | None = None
    """Copies to the device, as the parts of the step show them."""
    loader_ms: float | None = None
    """Of a ``loader`` trial: to load all batches of an optimizer step."""
    loaders_ms: Mapping[int, float] = field(default_factory=dict)
    """The same by number of workers, where several were measured."""
    fill_read: bool = False
    """Of a ``loader`` trial: what lies ready in its queues could be read."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Rungs that the plan leaves out, and why."""
    inactive: Mapping[str, str] = field(default_factory=dict)
    """Rungs that had no effect, those included."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Rungs that the plan would leave out, as far as this training shows, and why."""
    image_files: bool = False
    """The samples are made of image files."""
    classes: Mapping[str, Parity] = field(default_factory=dict)
    """Parity class by rung."""
    trial: Trial | None = None

    @property
    def start_s(self) -> float:
        """What it took besides its steps."""
        return max(1.0, self.seconds - (self.steps or 0) * (self.step_ms or 0.0) / 1e3)

    @property
    def core_ms(self) -> float | None:
        return None if self.step_ms is None else max(0.0, self.step_ms - self.outside_ms)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Seconds that the trainings of a confirmation take."""

    start_s: float
    base_s: float
    arm_s: float
    gradients_s: float
    """Of each of the two."""


class Runner(Protocol):
    """Runs trainings in a folder of the climb, or finds those that an earlier call finished.

    Everything raises Spent where the budget does not hold it.
    """

    def run(self, at: str, stack: Stack, ask: Ask, *, what: str, need_s: float) -> Result:
        """One training of a stack.

        Args:
            at: folder below that of the climb.
            what: for the line of progress.
            need_s: what it is expected to take.
        """

    def compare_ledgers(self, base: Stack, arm: Stack, pairs: Sequence[tuple[Result, Result]]) -> Outcome:
        """Whether a stack sees the same samples as the one it was put on, as their runs have written down."""

    def check_parity(
        self, at: str, base: Stack, arm: Stack, pairs: Sequence[tuple[Result, Result]], *, what: str, need_s: float
    ) -> Outcome:
        """Whether a stack is the same training as the one it was put on: ledger and gradient."""

    def tune(
        self, at: str, stack: Stack, key: str, length: Length, given: KnownTimes, *, what: str, need_s: float
    ) -> Tuned:
        """The fastest number of a rung, by measured step time; `need_s` is for each training."""

    def confirm(self, at: str, stack: Stack, length: Length, *, need_s: float) -> Confirmation:
        """A fresh A/B of the start against a stack."""

    def estimate_confirmation_s(self, at: str, needs: Needs) -> float:
        """Seconds that this confirmation still takes: what has finished of it is found again."""

    def reserve(self, seconds: float) -> None:
        """Keep so much of the budget for the end."""


def read_result(trial: Trial) -> Result:
    """The result in the files of a trial."""
    if not trial.ok:
        steps = None if trial.measurement is None else trial.measurement.total_steps
        return Result(
            ok=False, cause=trial.cause, seconds=trial.seconds, trial=trial, steps=steps, ended_at=_read_end(trial)
        )
    found = trial.measurement or Measurement()
    answer = decode(trial.answer, LoaderAnswer) or LoaderAnswer()
    plan, verdicts = load_plan(trial.run_dir), load_verdicts(trial.run_dir)
    skipped = {step.rung: step.reason or "not planned" for step in plan.steps if step.status == "skipped"}
    loader, mean = found.evidence.get("loader") or {}, found.step_ms.get("mean")
    outside_ms = sum(found.parts_ms.get(part) or 0.0 for part in GAPS)
    return Result(
        seconds=trial.seconds,
        trial=trial,
        samples_per_s=found.samples_per_s,
        step_ms=compute_step_ms(found),
        outside_ms=outside_ms,
        gap_ms=found.parts_ms.get("epoch_gap") or 0.0,
        rest_ms=None if not mean else max(0.0, mean - outside_ms - (found.parts_ms.get("data_wait") or 0.0)),
        steps=found.total_steps,
        ended_at=_read_end(trial),
        global_batch=found.global_batch,
        micro_batch=found.micro_batch,
        world_size=found.world_size,
        device=found.device,
        device_name=found.device_name,
        workers=answer.workers or loader.get("num_workers") or 0,
        queued=loader.get("queued_batches") or 0,
        mfu=found.mfu.get("datasheet"),
        launch_bound=None if found.trail_ms is None or not mean else found.trail_ms < LAUNCH_BOUND * mean,
        waits_ms=found.host_ms.get("data_wait"),
        copies_ms=found.parts_ms.get("h2d"),
        loader_ms=answer.ms_per_step,
        loaders_ms=answer.loaders_ms,
        fill_read=answer.fill_read,
        classes={step.rung: step.change.parity for step in plan.steps},
        refused=find_refusals(found),
        image_files=loader.get("decode_ms") is not None,
        skipped={**skipped, **answer.inactive},
        inactive={verdict.rung: verdict.why for verdict in verdicts if verdict.took is False},
    )


def _read_end(trial: Trial) -> int | None:
    """Steps of a fit that came to its end, as the Trainer counts them."""
    if trial.measurement is None or trial.measurement.partial or trial.last_step is None:
        return None
    return trial.last_step - (trial.began or 0)
