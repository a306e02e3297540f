"""The outcome of one training in its own process, and the answer it gives besides its measurement. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from fastloop.records.measurement import Measurement
from fastloop.records.run_files import PlanFile
from fastloop.records.store import SCHEMA

Variation = Literal["as_it_is", "replayed", "resident", "no_exchange", "flops", "rates", "gradients", "loader", "plan"]
"""What a trial changes: see `bridge.trials.ceilings`; from ``flops`` on it returns an answer of another type."""


@dataclass(frozen=True, kw_only=True)
class FlopCounts:
    """The work of one sample, counted eager, as in ``Measurement.flops``."""

    per_sample: float | None = None
    matmul: float | None = None
    convolution: float | None = None
    attention: float | None = None
    recomputed: float | None = None
    at_least: bool | None = None
    uncounted: tuple[str, ...] = ()
    source: str | None = None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Measured rates of a GPU; None: could not be measured."""

    gemm_tflop_per_s: float | None = None
    """bf16 product of two square matrices, counted as 2 n^3 operations."""
    copy_tb_per_s: float | None = None
    """Copy from device memory to device memory: bytes read plus bytes written."""
    gemm_size: int | None = None
    """n; below 8192 if memory was short, and then the rate may be lower than the device's best."""


@dataclass(frozen=True, kw_only=True)
class TensorDeviation:
    """One tensor of a gradient compared with the base's."""

    name: str
    deviation: float | None = None
    """Relative to its own norm."""
    share: float | None = None
    """Relative to the whole gradient's norm."""


@dataclass(frozen=True, kw_only=True)
class GradientDistance:
    """How far an arm's gradient is from the base's."""

    deviation: float | None = None
    """Norm of the difference over the norm of the base's gradient."""
    kept: float | None = None
    """How much of the base's gradient it contains."""
    worst: tuple[TensorDeviation, ...] = ()
    lost: tuple[str, ...] = ()
    """Tensors that have a gradient in the base but not here."""
    astray: tuple[str, ...] = ()
    """Tensors that keep less than half of their gradient, or more than twice as much."""
    finite: bool = True


@dataclass(frozen=True, kw_only=True)
class GradientAnswer(GradientDistance):
    """The gradient of one step and, for an arm, its distance from the base's; see `bridge/trials/gradient_probe.py`."""

    why: str | None = None
    """Why there is no gradient."""
    precision: str | None = None
    """The coarsest arithmetic in use: a key of ``judge.parity.TAU``."""
    clips: str | None = None
    """How gradients are clipped; None: not clipped."""
    self_deviation: float | None = None
    """Deviation between repetitions with the same random numbers; None: computed only once."""
    random_deviation: float | None = None
    """Deviation with other random numbers."""
    rounding: Mapping[str, float | None] = field(default_factory=dict)
    """Deviation that rounding to a precision causes."""
    steady_rounding: Mapping[str, float | None] = field(default_factory=dict)
    """The same at other weights, where rounding matters less; empty if not needed."""
    steady: GradientDistance | None = None
    """An arm's distance at those weights."""


@dataclass(frozen=True, kw_only=True)
class LoaderCount:
    """The loader measured alone, with one number of worker processes."""

    count: int
    ms_per_step: float | None = None
    queue_drained: bool = False
    """Whether batches that were already queued were counted and left out."""


@dataclass(frozen=True, kw_only=True)
class LoaderAnswer:
    """The result of a trial of the loader alone."""

    ms_per_step: float | None = None
    workers: int | None = None
    queue_drained: bool = False
    inactive: Mapping[str, str] = field(default_factory=dict)
    """Rungs that had no effect on it, and why."""
    counts: tuple[LoaderCount, ...] = ()
    """Set if several numbers of worker processes were measured."""

    @property
    def loaders_ms(self) -> dict[int, float]:
        """Milliseconds per step by number of worker processes."""
        return {each.count: each.ms_per_step for each in self.counts if each.ms_per_step}

    @property
    def fill_read(self) -> bool:
        """Whether batches that were already queued are left out of all figures."""
        return all(each.queue_drained for each in self.counts) if self.counts else self.queue_drained


TrialAnswer = FlopCounts | DeviceRates | GradientAnswer | LoaderAnswer | PlanFile
ANSWERS: Mapping[Variation, type[TrialAnswer]] = {
    "flops": FlopCounts,
    "rates": DeviceRates,
    "gradients": GradientAnswer,
    "loader": LoaderAnswer,
    "plan": PlanFile,
}


@dataclass(frozen=True, kw_only=True)
class ScriptOrders:
    """Instructions for the callback in a script's Trainers, see `bridge/trials/script_callback.py`."""

    out: str = ""
    """The run directory."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """As accepted by `from_callback`."""
    name: str | None = None
    """The script's name, for the reports."""
    by_ladder: tuple[str, ...] = ()
    """Rungs in the configuration that a shipped ladder enabled."""
    max_steps: int | None = None
    """Limit per fit; None: no limit."""
    ledger: bool = False
    variation: Variation = "as_it_is"
    reference: str | None = None
    """For ``gradients``: the directory of the trial to compare with; None: this trial is the reference."""
    beat: str | None = None
    """The file to which the current step is written."""
    seed_offset: int = 0
    """Added to the seeds that the script has chosen when it begins to train, so that run-1 differs from run-0."""
    stacks: bool = False
    """SIGUSR2 writes the stack of each thread."""
    disposable: bool = False
    """This is not the user's real run, so checkpoint files are left alone."""
    not_from: str | None = None
    """A folder that no module should be imported from: files of modules imported from it are reported."""


FAST_DEV_RUN = "fast_dev_run"
"""Why a fit is not measured: Lightning's own word for a few steps that only try the code."""


@dataclass(frozen=True, kw_only=True)
class ScriptEvent:
    """An event reported by that callback, or by the entry point before it."""

    event: str
    why: str | None = None
    step: int | None = None
    rank: int | None = None
    measured: bool = False
    """The event belongs to the fit that is measured."""
    only_rungs: bool = False
    """The fit was given the rungs, and is not measured."""
    files: tuple[str, ...] = ()
    """Files imported from the folder in ``ScriptOrders.not_from``."""


class LedgerStep(NamedTuple):
    """One optimizer step of a ledger."""

    digest: str | None
    """Digest of its samples, in order."""
    samples: int | None
    backwards: int | None
    rates: tuple[float | None, ...]


class LedgerEpoch(NamedTuple):
    """One epoch of a ledger."""

    end: int
    """Its last optimizer step, from 1."""
    samples: int | None
    complete: bool
    digest: str | None
    """Digest of its samples, independent of order."""
    again: int | None
    """Samples that had already been drawn in it."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The samples that one rank trained on: ``ledger.json``, see `bridge/trials/sample_ledger.py`."""

    rank: int | None = None
    ids: str | None = None
    """How samples are identified: by the ``sampler``'s numbers or by their ``content``; None: not at all."""
    why: str | None = None
    """Why they are not identified."""
    steps: tuple[LedgerStep, ...] = ()
    planned: tuple[int | None, ...] = ()
    """Backwards of each step according to the plan."""
    epochs: tuple[LedgerEpoch, ...] = ()
    dataset: int | None = None
    """Number of samples in the dataset."""
    own_order: bool | None = None
    """Whether the sample order is independent of other random draws, such as augmentations."""
    optimizer_steps: int | None = None
    partial: bool = False
    """Whether the fit of this rank ended early."""
    ended_by: str | None = None
    """The class of the exception that ended it."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How one training went: ``trial.json``, with the measurement and the answer stored next to it."""

    schema: ClassVar[int] = SCHEMA
    computed: ClassVar[tuple[str, ...]] = ("samples_per_s", "window_too_short")

    name: str
    ok: bool
    cause: str | None = None
    """Why it is not ok, in one line."""
    seconds: float
    run_dir: Path
    code: int
    """Exit code; if a signal ended it, the negative signal number."""
    last_step: int | None = None
    started: str | None = None
    """Whether it was forked from a process that had imported torch, or why it needed a new interpreter; None: a plain
    new process."""
    tail: str = ""
    """The last lines of its stderr; empty if it is ok."""
    began: int | None = None
    """The step at which a script's fit began."""
    after_fit: str = ""
    """How a script failed after its fit, which was measured; empty if it did not."""
    unsaved: bool = False
    """Whether checkpoint files were left untouched, see `bridge/trials/no_checkpoints.py`."""
    measurement: Measurement | None = field(default=None, metadata={"json": None})
    """Partial if the trial is not ok."""
    answer: TrialAnswer | None = field(default=None, metadata={"json": None})
    """Of the type in ``ANSWERS``, if the variation has one."""

    @property
    def samples_per_s(self) -> float | None:
        """Only for a complete run."""
        rate = None if self.measurement is None else self.measurement.samples_per_s
        return rate if self.ok and rate else None

    @property
    def lacked_checkpoint(self) -> bool:
        """Whether the script's code after its fit seems to have failed because trials write no checkpoints."""
        return "checkpoint" in self.after_fit.lower()

    @property
    def window_too_short(self) -> bool | None:
        """Whether its window was too short; None without a measurement."""
        return None if self.measurement is None else self.measurement.window_too_short
