"""What a climb asks of the world: trainings, searches, gates, and what it sees of them. A climb knows nothing else, so
all of its decisions can be tested on a machine that is made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastloop.commands.arms import Ask
from fastloop.commands.lengths import Length
from fastloop.commands.readback import read
from fastloop.commands.refusals import refusals
from fastloop.commands.search import Given
from fastloop.commands.stack import Stack
from fastloop.commands.trial import Trial
from fastloop.comparison import Outcome
from fastloop.records import PARITY_ORDER, Parity

OUTSIDE = ("validation", "checkpoint", "epoch_gap")
"""Parts of the step that neither loading nor computing explains."""
LAUNCH_BOUND = 0.1
"""Of a step: where the device is done so soon after the host has issued a step, launches are the limit."""


@dataclass(frozen=True, kw_only=True)
class Seen:
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
    """The same by number of workers, where several were asked for."""
    fill_read: bool = False
    """Of a ``loader`` trial: what lies ready in its queues could be read."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Rungs that the plan leaves out, and why."""
    inactive: Mapping[str, str] = field(default_factory=dict)
    """Rungs that had no effect, those included."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Rungs that the plan would leave out, as far as this training shows, and why."""
    classes: Mapping[str, Parity] = field(default_factory=dict)
    """Parity class by rung."""
    trial: Trial | None = None

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


class Tuned(Protocol):
    """What a search found, see `commands/tune.py`."""

    @property
    def key(self) -> str: ...

    @property
    def best(self) -> int | None: ...

    @property
    def patch(self) -> Mapping[str, Any] | None: ...

    @property
    def why(self) -> str: ...


class Lab(Protocol):
    """Does what is asked in a folder of the climb's, or finds it done on an earlier day.

    Everything raises Spent where the budget does not hold it.
    """

    def run(self, at: str, stack: Stack, ask: Ask, *, what: str, need_s: float) -> Seen:
        """One training of a stack.

        Args:
            at: folder below that of the climb.
            what: for the line of progress.
            need_s: what it is expected to take.
        """

    def ledger(self, base: Stack, arm: Stack, pairs: Sequence[tuple[Seen, Seen]]) -> Outcome:
        """Whether a stack sees the same samples as the one it was put on, as their runs have written down."""

    def gates(self, at: str, base: Stack, arm: Stack, pairs: Sequence[tuple[Seen, Seen]], *, what: str,
              need_s: float) -> Outcome:  # fmt: skip
        """Whether a stack is the same training as the one it was put on: ledger and gradient."""

    def tune(self, at: str, stack: Stack, key: str, length: Length, given: Given, *, what: str,
             need_s: float) -> Tuned:  # fmt: skip
        """The fastest number of a rung, by measured step time; `need_s` is for each training."""

    def confirm(self, at: str, stack: Stack, length: Length, *, need_s: float) -> Mapping[str, Any]:
        """A fresh A/B of the start against a stack: the content of its ``comparison.json``."""

    def left_to_confirm(self, at: str, needs: Needs) -> float:
        """Seconds that this confirmation still takes: what has finished of it is found again."""

    def reserve(self, seconds: float) -> None:
        """Keep so much of the budget for the end."""


def seen(trial: Trial) -> Seen:
    """What the files of a trial say."""
    found, answer = trial.measurement or {}, trial.answer or {}
    known: dict[str, Any] = {"ok": trial.ok, "cause": trial.cause, "seconds": trial.seconds, "trial": trial}
    if not trial.ok:
        return Seen(**known)
    planned = {str(row.get("rung")): row for row in (read(trial.run_dir / "plan.json") or {}).get("rungs") or []}
    skipped = {rung: row.get("reason") or "not planned" for rung, row in planned.items() if row["status"] == "skipped"}
    verdicts = (read(trial.run_dir / "verdicts.json") or {}).get("verdicts") or []
    classes = {rung: row["parity_class"] for rung, row in planned.items() if row.get("parity_class") in PARITY_ORDER}
    loader = (found.get("evidence") or {}).get("loader") or {}
    parts, loaders = found.get("parts_ms") or {}, answer.get("counts") or [answer]
    outside_ms, mean = sum(parts.get(part) or 0.0 for part in OUTSIDE), (found.get("step_ms") or {}).get("mean")
    return Seen(
        **known, samples_per_s=found.get("samples_per_s"), step_ms=step_ms(found),
        outside_ms=outside_ms, gap_ms=parts.get("epoch_gap") or 0.0,
        rest_ms=None if not mean else max(0.0, mean - outside_ms - (parts.get("data_wait") or 0.0)),
        global_batch=found.get("global_batch"), micro_batch=found.get("micro_batch"),
        world_size=found.get("world_size") or 1, device=found.get("device") or "cpu",
        device_name=found.get("device_name"), workers=answer.get("workers") or loader.get("num_workers") or 0,
        queued=loader.get("queued_batches") or 0, mfu=(found.get("mfu") or {}).get("datasheet"),
        launch_bound=_launch_bound(found), waits_ms=(found.get("host_ms") or {}).get("data_wait"),
        copies_ms=parts.get("h2d"), loader_ms=answer.get("ms_per_step"),
        loaders_ms={each["count"]: each["ms_per_step"] for each in answer.get("counts") or () if each["ms_per_step"]},
        fill_read=all(bool(each.get("queue_drained")) for each in loaders), classes=classes,
        refused=refusals(found),
        skipped={**skipped, **(answer.get("inactive") or {})},
        inactive={row["rung"]: row["why"] for row in verdicts if row.get("took") is False},
    )  # fmt: skip


def step_ms(measurement: Mapping[str, Any]) -> float | None:
    """Of an optimizer step, from the rate where there is one: it is corrected for queues that were drained."""
    rate, size = measurement.get("samples_per_s"), measurement.get("global_batch")
    if rate and size:
        return 1e3 * float(size) / float(rate)
    mean = (measurement.get("step_ms") or {}).get("mean")
    return float(mean) if mean else None


def _launch_bound(found: Mapping[str, Any]) -> bool | None:
    trail, mean = found.get("trail_ms"), (found.get("step_ms") or {}).get("mean")
    return None if trail is None or not mean else trail < LAUNCH_BOUND * mean
