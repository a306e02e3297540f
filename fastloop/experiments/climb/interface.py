"""Everything that a climb needs from outside: trainings, searches, gates, and their results.

Its decisions depend on nothing else, so they can be tested on a simulated machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb.budget import Length
from fastloop.experiments.climb.refusals import find_refusals
from fastloop.experiments.trials.supervise import TOO_SLOW
from fastloop.experiments.tune.search import KnownTimes, Tuned, compute_step_ms
from fastloop.records.card import Stack
from fastloop.records.climb import Confirmation
from fastloop.records.experiment import Outcome
from fastloop.records.measurement import AUTOTUNE, COMPILE, GAPS, Measurement
from fastloop.records.plan import Parity
from fastloop.records.run_files import load_plan, load_verdicts
from fastloop.records.store import decode
from fastloop.records.trial import LoaderAnswer, Trial

HOPELESS = 3.0
"""A trial whose steps take this many times as long as without the rung is not run to its end."""
CACHED = 0.95
"""Share of its compile time that a later run of the same stack saves. In a climb of ResNet-50 on an H200, 80 s of
compiling made the first start 69 to 76 s longer than the next three."""
LAUNCH_BOUND = 0.1
"""Share of a step: if the device finishes a step this soon after the host has issued it, launches are the limit."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of one training that a climb uses. None = not measured."""

    ok: bool = True
    cause: str | None = None
    too_slow: bool = False
    """It was ended after a few steps, because they took longer than allowed."""
    seconds: float = 0.0
    samples_per_s: float | None = None
    step_ms: float | None = None
    """Long-run time of one optimizer step, corrected for batches that queues had ready beforehand."""
    outside_ms: float = 0.0
    gap_ms: float = 0.0
    rest_ms: float | None = None
    """The part of a step that is neither outside nor a wait for data: computing, while workers run if there are any."""
    steps: int | None = None
    """Optimizer steps trained, including warm-up."""
    ended_at: int | None = None
    """The steps when its fit ended, at its limit or by itself; None if it did not end well."""
    global_batch: int | None = None
    micro_batch: int | None = None
    world_size: int = 1
    device: str = "cpu"
    workers: int = 0
    queued: int = 0
    """Batches that workers and device feeds keep ready."""
    compile_s: float = 0.0
    """The part of its start that compiling and choosing kernels took."""
    mfu: float | None = None
    launch_bound: bool | None = None
    waits_ms: float | None = None
    """The training thread's wait for data: without workers, the time to load it, hidden behind the device or not."""
    copies_ms: float | None = None
    """Copies to the device, from the step's breakdown."""
    loader_ms: float | None = None
    """In a ``loader`` trial: the time to load all batches of an optimizer step."""
    loaders_ms: Mapping[int, float] = field(default_factory=dict)
    """The same by number of workers, if several were measured."""
    fill_read: bool = False
    """In a ``loader`` trial: whether the batches ready in its queues could be counted."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Rungs that the plan leaves out, and why."""
    inactive: Mapping[str, str] = field(default_factory=dict)
    """Rungs that had no effect, including the skipped ones."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Rungs that the plan would leave out, judging by this training, and why."""
    image_files: bool = False
    """The samples come from image files."""
    may_keep_workers: bool = False
    """The loader has workers of its own, which could stay between epochs."""
    may_have_more_workers: bool = False
    """The loader has workers of its own, which others could replace."""
    classes: Mapping[str, Parity] = field(default_factory=dict)
    """Parity class by rung."""
    trial: Trial | None = None

    @property
    def start_s(self) -> float:
        """Seconds that it took besides its steps."""
        return max(1.0, self.seconds - (self.steps or 0) * (self.step_ms or 0.0) / 1e3)

    @property
    def next_start_s(self) -> float:
        """The same for a further run of this stack: its compiled code is cached."""
        return max(1.0, self.start_s - CACHED * self.compile_s)

    @property
    def is_measured(self) -> bool:
        """Whether it ended well and shows a rate."""
        return bool(self.ok and self.samples_per_s and self.step_ms)

    @property
    def fault(self) -> str:
        """Why it shows no rate."""
        return self.cause or "the run was too short to measure a rate"

    @property
    def core_ms(self) -> float | None:
        return None if self.step_ms is None else max(0.0, self.step_ms - self.outside_ms)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Seconds that the trainings of a confirmation take."""

    start_s: float
    first_s: float
    """For the start's first run, which is shorter: the climb has filled the page cache already."""
    base_s: float
    arm_s: float
    gradients_s: float
    """For each of the two arms."""


class Runner(Protocol):
    """Runs trainings in a folder of the climb, or finds those that an earlier call finished.

    Every method raises Spent if its work does not fit into the budget.
    """

    def run(
        self,
        at: str,
        stack: Stack,
        ask: Ask,
        *,
        what: str,
        need_s: float,
        slowest_ms: float = math.inf,
        ladder: str | None = None,
    ) -> Result:
        """Run one training of a stack.

        Args:
            at: its folder, inside the climb's.
            what: the description for the progress line.
            need_s: the expected seconds.
            slowest_ms: a training whose steps all take longer is ended after a few, as failed.
            ladder: the shipped ladder that the stack's rungs come from, if they are to stay only where they pay.
        """

    def compare_ledgers(self, base: Stack, arm: Stack, pairs: Sequence[tuple[Result, Result]]) -> Outcome:
        """Check from the runs' ledgers whether a stack sees the same samples as the stack below it."""

    def check_parity(
        self, at: str, base: Stack, arm: Stack, pairs: Sequence[tuple[Result, Result]], *, what: str, need_s: float
    ) -> Outcome:
        """Check by ledger and gradient whether a stack is the same training as the stack below it."""

    def tune(
        self, at: str, stack: Stack, key: str, length: Length, given: KnownTimes, *, what: str, need_s: float
    ) -> Tuned:
        """Find the fastest number of a rung by measured step time; `need_s` is for each training."""

    def confirm(self, at: str, stack: Stack, length: Length, *, need_s: float) -> Confirmation:
        """Run a fresh A/B of the start against a stack."""

    def estimate_confirmation_s(self, at: str, needs: Needs) -> float:
        """Return the seconds that this confirmation still needs; its finished runs are found again."""

    def reserve(self, *seconds: float) -> None:
        """Keep time for the last step: the largest of these that still fits, or none."""

    def left_with_grace_s(self) -> float:
        """Return the seconds that the last step could take: those left, and the grace period."""


def read_result(trial: Trial) -> Result:
    """Read the result from the files of a trial."""
    if not trial.ok:
        steps = None if trial.measurement is None else trial.measurement.total_steps
        return Result(
            ok=False,
            cause=trial.cause,
            too_slow=(trial.cause or "").startswith(TOO_SLOW),
            seconds=trial.seconds,
            trial=trial,
            steps=steps,
            ended_at=_read_end(trial),
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
        workers=answer.workers or loader.get("num_workers") or 0,
        queued=loader.get("queued_batches") or 0,
        compile_s=sum(found.one_time_s.get(part) or 0.0 for part in (COMPILE, AUTOTUNE)),
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
        may_keep_workers=loader.get("can_keep_workers") is True,
        may_have_more_workers=loader.get("can_have_more") is True,
        skipped={**skipped, **answer.inactive},
        inactive={verdict.rung: verdict.why for verdict in verdicts if verdict.took is False},
    )


def _read_end(trial: Trial) -> int | None:
    """Return the steps of a fit that finished; None if it did not."""
    found = trial.measurement
    return None if found is None or found.partial else found.total_steps or None
