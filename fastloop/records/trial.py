"""How one training in a process of its own went, and what it answers besides its measurement. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from fastloop.records.measurement import Measurement
from fastloop.records.run_files import PlanFile
from fastloop.records.store import SCHEMA

Variation = Literal["as_it_is", "replayed", "resident", "no_exchange", "flops", "rates", "gradients", "loader", "plan"]
"""What a trial changes: see `bridge.trials.ceilings`; from ``flops`` on they answer with something else than a run."""


@dataclass(frozen=True, kw_only=True)
class FlopCounts:
    """The work of one sample, counted eager, as ``Measurement.flops`` has it."""

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
    """What a GPU does, measured; None: could not be."""

    gemm_tflop_per_s: float | None = None
    """bf16 product of two square matrices, 2 n^3 operations."""
    copy_tb_per_s: float | None = None
    """Copy from device memory to device memory: bytes read plus bytes written."""
    gemm_size: int | None = None
    """n; under 8192 where memory was short, and then perhaps less than the device can do."""


@dataclass(frozen=True, kw_only=True)
class TensorDeviation:
    """One tensor of a gradient against the base's."""

    name: str
    deviation: float | None = None
    """Of its own norm."""
    share: float | None = None
    """Of the whole gradient's norm."""


@dataclass(frozen=True, kw_only=True)
class GradientDistance:
    """How far an arm's gradient is from the base's."""

    deviation: float | None = None
    """From the base's, over the norm of the base's."""
    kept: float | None = None
    """How much of the base's gradient is in it."""
    worst: tuple[TensorDeviation, ...] = ()
    lost: tuple[str, ...] = ()
    """Tensors that have no gradient, which the base has."""
    astray: tuple[str, ...] = ()
    """Tensors of which less than half is kept, or twice as much."""
    finite: bool = True


@dataclass(frozen=True, kw_only=True)
class GradientAnswer(GradientDistance):
    """The gradient of one step, and of an arm how far it is from the base's; see `bridge/trials/gradient_probe.py`."""

    why: str | None = None
    """Why there is none."""
    precision: str | None = None
    """The coarsest arithmetic in use: a key of ``judge.parity.TAU``."""
    clips: str | None = None
    """How gradients are clipped; None: not at all."""
    self_deviation: float | None = None
    """From one time to the next, with the same random numbers; None: it was taken once."""
    random_deviation: float | None = None
    """With other random numbers."""
    rounding: Mapping[str, float | None] = field(default_factory=dict)
    """What rounding to a precision does to it."""
    steady_rounding: Mapping[str, float | None] = field(default_factory=dict)
    """The same at other weights, where it does less; empty where that was not needed."""
    steady: GradientDistance | None = None
    """Of an arm, at those weights."""


@dataclass(frozen=True, kw_only=True)
class LoaderCount:
    """A loader that was measured alone, with one number of processes."""

    count: int
    ms_per_step: float | None = None
    queue_drained: bool = False
    """What lay ready in its queues was read, and is left out."""


@dataclass(frozen=True, kw_only=True)
class LoaderAnswer:
    """What a trial of the loader alone found out."""

    ms_per_step: float | None = None
    workers: int | None = None
    queue_drained: bool = False
    inactive: Mapping[str, str] = field(default_factory=dict)
    """Rungs that had no effect on it, and why."""
    counts: tuple[LoaderCount, ...] = ()
    """Where several numbers of processes were measured."""

    @property
    def loaders_ms(self) -> dict[int, float]:
        """Milliseconds of a step by number of processes."""
        return {each.count: each.ms_per_step for each in self.counts if each.ms_per_step}

    @property
    def fill_read(self) -> bool:
        """Whether what lay ready in the queues is left out of all figures."""
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
    """What the callback in a script's Trainers is to do, see `bridge/trials/script_callback.py`."""

    out: str = ""
    """The run directory."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """As `from_callback` takes it."""
    by_ladder: tuple[str, ...] = ()
    """Rungs in it that a shipped ladder switched on."""
    max_steps: int | None = None
    """Of each fit; None: no limit."""
    ledger: bool = False
    variation: Variation = "as_it_is"
    reference: str | None = None
    """Of ``gradients``: the directory of the trial to compare with; None: be that trial."""
    beat: str | None = None
    """The file that gets the step."""
    seed_offset: int = 0
    """Added to the seeds that the script has chosen, once it begins to train: run-1 is to be another run than run-0."""
    stacks: bool = False
    """SIGUSR2 writes where each thread stands."""
    disposable: bool = False
    """This is not the user's real run, so checkpoint files are left alone."""
    not_from: str | None = None
    """A folder that no module should come from: the files of those that do are reported."""


@dataclass(frozen=True, kw_only=True)
class ScriptEvent:
    """What that callback, or the entry point before it, has noticed."""

    event: str
    why: str | None = None
    step: int | None = None
    rank: int | None = None
    began: bool | None = None
    """A step had been trained."""
    measured: bool = False
    """In the fit that is measured."""
    files: tuple[str, ...] = ()
    """That were imported from the folder of ``ScriptOrders.not_from``."""


class LedgerStep(NamedTuple):
    """One optimizer step of a ledger."""

    digest: str | None
    """Of its samples, in their order."""
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
    """Of its samples, in whatever order."""
    again: int | None
    """Samples that had been drawn in it before."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What one rank trained on: ``ledger.json``, see `bridge/trials/sample_ledger.py`."""

    rank: int | None = None
    ids: str | None = None
    """How samples are known: by the ``sampler``'s numbers or by their ``content``; None: they are not."""
    why: str | None = None
    """Why they are not."""
    steps: tuple[LedgerStep, ...] = ()
    planned: tuple[int | None, ...] = ()
    """Backwards of each step by the plan."""
    epochs: tuple[LedgerEpoch, ...] = ()
    dataset: int | None = None
    """Samples that it has."""
    own_order: bool | None = None
    """The order of the loader has random numbers of its own."""
    optimizer_steps: int | None = None
    partial: bool = False
    """The fit of this rank did not come to its end."""
    ended_by: str | None = None
    """The class of the exception that ended it."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How one training went: ``trial.json``, with the measurement and the answer that lie beside it."""

    schema: ClassVar[int] = SCHEMA
    computed: ClassVar[tuple[str, ...]] = ("samples_per_s", "window_too_short")

    name: str
    ok: bool
    cause: str | None = None
    """Why it is not ok, in one line."""
    seconds: float
    run_dir: Path
    code: int
    """Exit code; the negative number of the signal that ended it."""
    last_step: int | None = None
    started: str | None = None
    """Forked from a process that had imported torch, or why it was a new interpreter; None: as new as any program."""
    tail: str = ""
    """The last lines of its stderr; empty where it is ok."""
    began: int | None = None
    """The step that a script's fit began at."""
    unsaved: bool = False
    """Whether checkpoint files were left alone, see `bridge/trials/no_checkpoints.py`."""
    measurement: Measurement | None = field(default=None, metadata={"json": None})
    """Of a trial that is not ok, a part."""
    answer: TrialAnswer | None = field(default=None, metadata={"json": None})
    """Of the kind in ``ANSWERS``, where the variation has one."""

    @property
    def samples_per_s(self) -> float | None:
        """Only of a whole run."""
        rate = None if self.measurement is None else self.measurement.samples_per_s
        return rate if self.ok and rate else None

    @property
    def window_too_short(self) -> bool | None:
        """Whether its window was; None without a measurement."""
        return None if self.measurement is None else self.measurement.window_too_short
