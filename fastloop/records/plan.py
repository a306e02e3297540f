"""The records that travel between the stages. Frozen, keyword-only, and free of torch and Lightning.

``Facts -> Change/Action -> Plan -> (run) -> Measurement -> Verdict, Finding``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fastloop.records.facts import Facts

Parity = Literal["exact", "approximate", "changes-training"]
"""exact: bit-identical; approximate: same mathematics, other rounding; changes-training: neither."""

PARITY_ORDER: tuple[Parity, ...] = ("exact", "approximate", "changes-training")

Moment = Literal["model", "before_wrap", "wrapped", "train_start"]
"""When an action runs: model = built and restored, not yet wrapped; before_wrap = DDP is about to wrap it, and its
settings can still be changed; wrapped = DDP has wrapped it; train_start = optimizers exist and hold their restored
state."""

PayBack = Literal["auto", "required", "ignore"]
"""auto: required where a shipped ladder switched the rung on, ignored where the user did."""

Undo = Callable[[], None]
"""Puts a change back; harmless when called twice."""


class Site(Protocol):
    """What an action finds when it runs: the live objects, and what of Lightning it may have changed."""

    @property
    def facts(self) -> Facts: ...

    @property
    def module(self) -> Any:
        """The LightningModule."""

    @property
    def wrapped(self) -> Any:
        """The model as the strategy wrapped it."""

    @property
    def optimizers(self) -> list[Any]: ...

    @property
    def device(self) -> Any:
        """Where this rank trains."""

    def set_precision(self, mode: str, *, cache_weights: bool = False) -> Undo:
        """Let Lightning's own plugin run the precision `mode`.

        Args:
            cache_weights: of mixed precision: round each weight once in a forward, and not at each use.
        """

    def scale_rates(self, factor: float) -> Undo:
        """Multiply all learning rates, and what schedulers compute them from; train_start only."""

    def set_ddp(self, settings: Mapping[str, Any]) -> Undo:
        """Let DistributedDataParallel be made with these keywords; before_wrap only."""

    def convert_inputs(self, convert: Callable[[Any], Any]) -> Undo:
        """Let `convert` change every batch that has come to the device, of training and evaluation."""

    @property
    def recorded(self) -> Mapping[str, Sequence[tuple[Sequence[Any], Mapping[str, Any]]]]:
        """Arguments, by module name, of calls in the first step; empty before it."""

    @property
    def changed_sizes(self) -> Sequence[Mapping[int, int]]:
        """For each batch since the first that is known: sizes of the first batch's dimensions, and what they became."""

    @property
    def graph_passes(self) -> list[Callable[[Any], Any]]:
        """What changes each captured graph before it is compiled, see ``feeds/compiled_calls.py``. A rung adds its own
        and takes it out in its undo; compiles that come later have them."""

    @property
    def groups(self) -> Any:
        """How many of the user's batches a call holds, see ``feeds/batch_norm/groups.py``."""

    def note_in_step(self, note: Callable[[], None]) -> None:
        """Call `note` once, from inside the first training_step of the user's module."""

    def note_each_batch(self, note: Callable[[], None]) -> Undo:
        """Call `note` before each training_step."""

    def thin_loop(self) -> Applied:
        """Leave out what the training loop does at every batch though nothing comes of it."""

    @property
    def graph_steps(self) -> Callable[[bool], Applied]:
        """Record a training step and replay it where that is safe; with False, also only where it is faster."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What running an action gives back."""

    undo: Undo
    probe: Callable[[], Mapping[str, Any]] = dict
    """Evidence from the running process; called after the first step and at the end."""
    clean: Callable[[dict[str, Any]], None] = lambda _checkpoint: None
    """Takes out of a checkpoint, in place, what a run without the rung would not have written."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """A want that has to be done to live objects. Run by ``bridge/apply/applier.py`` and nothing else."""

    keys: tuple[str, ...] = ()
    """Settings that it owns; none where it does what a want of its rung says."""
    when: Moment
    do: Callable[[Site], Applied]
    """May raise NotApplicable."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one rung wants."""

    wants: Mapping[str, Any] = field(default_factory=dict)
    """Settings by key (``loader.num_workers``), each with one owner."""
    actions: tuple[Action, ...] = ()
    parity: Parity = "exact"
    notes: tuple[str, ...] = ()
    """What the user should know before step 1."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts as they are for the rungs that come later."""
    evaluation: bool = False
    """Also applies in validate, test and predict, so that they compute what validation inside fit computed."""
    rehearse: Literal["modules", "optimizers"] | None = None
    """It changes the device's work: after the first step its actions are tried on these, and count if that ends well.
    Until then, and through the sanity validation, none of them has run."""
    pay_back: PayBack | None = None
    """Whether the rest of the run has to save the one-time cost of its first call; None: there is none."""
    first_call_of: tuple[str, ...] = ()
    """Names of the modules that its first call compiles; empty: all."""
    cheaper: Change | None = None
    """The same with a smaller one-time cost and less to gain; tried where this cannot pay back, or has failed."""
    waits_for: str | None = None
    """What must be known before this rung can be planned; the rest of the record then says what may come."""
    may_want: tuple[str, ...] = ()
    """Keys that it may want once that is known."""


Status = Literal["planned", "waiting", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What trying a rung on the calls of the first step showed: forward and backward, eager beside changed."""

    deviation: float | None = None
    """Of outputs and gradients, the larger of both, relative to their norm; None where it could not be told."""
    eager_ms: float | None = None
    """Of the modules as the user wrote them."""
    changed_ms: float | None = None
    """Of the same with this rung and those kept before it."""
    of_batch: bool = False
    """The times are of all that these modules did for one batch; not of some of their calls, nor of the optimizer's."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One enabled rung in the plan."""

    rung: str
    status: Status
    change: Change = field(default_factory=Change)
    reason: str | None = None
    """Why it is skipped, or what it waits for."""
    rehearsed: Rehearsed | None = None
    pays_back_after_steps: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All wants of all enabled rungs, merged; every key has one owner."""

    steps: tuple[Step, ...] = ()

    @property
    def wants(self) -> dict[str, Any]:
        """Merged settings of the planned rungs."""
        return {key: value for step in self.planned for key, value in step.change.wants.items()}

    @property
    def planned(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.status == "planned")

    @property
    def parity(self) -> Parity:
        """The weakest class among the planned rungs."""
        return max((step.change.parity for step in self.planned), key=PARITY_ORDER.index, default="exact")

    def owner(self, key: str) -> str | None:
        """The rung that sets `key`, or waits to; None where nobody does."""
        return next((step.rung for step in self.steps if key in (*step.change.wants, *step.change.may_want)), None)

    def step(self, rung: str) -> Step | None:
        return next((step for step in self.steps if step.rung == rung), None)


def changes_loader(wants: Iterable[str]) -> bool:
    """Whether one of these settings changes the train loader."""
    return any(key.startswith(("loader.", "feed.", "dataset.")) for key in wants)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Did a rung take? ``None``: nothing was run that could tell."""

    rung: str = ""
    took: bool | None = None
    why: str = ""
    parity_class: Parity = "exact"
    rehearsed: Rehearsed | None = None
    pays_back_after_steps: float | None = None
    """Optimizer steps after which the rung's one-time cost is saved, as the rehearsal estimates it; no verdict."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One bottleneck, its share of the step and the YAML patch that addresses it."""

    bottleneck: str
    share_pct: float | None = None
    """Of the step; None where it costs nothing here, or nothing is named."""
    why: str = ""
    patch: Mapping[str, Any] | None = None
    ceiling_gain_pct: float | None = None
    """What would be gained at most if it were gone; None where that is not known."""
    ceiling_is_estimate: bool = True
    """False where a trial measured it."""
    detail: tuple[str, ...] = ()
    """Further lines: the evidence behind the reason, and what makes the figures doubtful."""
    title: str = ""
    """Headline in capitals, filled by ``diagnose``."""
    alarm: str = ""
    """What the first line of a summary says beside the headline: figures that must not be overlooked."""
