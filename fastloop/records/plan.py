"""The records that the stages exchange. Frozen, keyword-only, and free of torch and Lightning.

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
"""When an action runs: model = built and restored, not yet wrapped; before_wrap = DDP is about to wrap the model, and
its settings can still be changed; wrapped = DDP has wrapped it; train_start = optimizers exist and their state is
restored."""

PayBack = Literal["auto", "required", "ignore"]
"""auto: required if a shipped ladder enabled the rung, ignored if the user did."""

Undo = Callable[[], None]
"""Reverts a change; safe to call twice."""


class Site(Protocol):
    """What an action can access when it runs: the live objects, and the parts of Lightning that it may change."""

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
        """The device this rank trains on."""

    def set_precision(self, mode: str, *, cache_weights: bool = False) -> Undo:
        """Switch Lightning's precision plugin to `mode`.

        Args:
            cache_weights: in mixed precision, round each weight once per forward, not at each use.
        """

    def scale_rates(self, factor: float) -> Undo:
        """Multiply all learning rates, and the values schedulers compute them from; train_start only."""

    def set_ddp(self, settings: Mapping[str, Any]) -> Undo:
        """Have DistributedDataParallel constructed with these keyword arguments; before_wrap only."""

    def convert_inputs(self, convert: Callable[[Any], Any]) -> Undo:
        """Apply `convert` to every batch after its transfer to the device, in training and evaluation."""

    @property
    def recorded(self) -> Mapping[str, Sequence[tuple[Sequence[Any], Mapping[str, Any]]]]:
        """Arguments of the calls in the first step, by module name; empty before that step."""

    @property
    def changed_sizes(self) -> Sequence[Mapping[int, int]]:
        """For each batch after the first recorded one: changed sizes, from the first batch's to its own."""

    @property
    def graph_passes(self) -> list[Callable[[Any], Any]]:
        """Functions that change each captured graph before it is compiled, see ``feeds/compiled/graph_passes.py``. A
        rung appends its pass and removes it in its undo; later compiles apply it."""

    @property
    def groups(self) -> Any:
        """The number of user batches in a call, see ``feeds/batch_norm/groups.py``."""

    def note_in_step(self, note: Callable[[], None]) -> None:
        """Call `note` once, from inside the first training_step of the user's module."""

    def note_each_batch(self, note: Callable[[], None]) -> Undo:
        """Call `note` before each training_step."""

    def thin_loop(self) -> Applied:
        """Skip work that the training loop does at every batch without any effect."""

    @property
    def graph_steps(self) -> Callable[[bool], Applied]:
        """Capture a training step as a CUDA graph and replay it if safe; with False, only if also faster."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The result of running an action."""

    undo: Undo
    probe: Callable[[], Mapping[str, Any]] = dict
    """Evidence from the running process; called after the first step and at the end."""
    clean: Callable[[dict[str, Any]], None] = lambda _checkpoint: None
    """Removes from a checkpoint, in place, everything that a run without the rung would not have written."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """A want that must be applied to live objects. Run only by ``bridge/apply/applier.py``."""

    keys: tuple[str, ...] = ()
    """Settings that it owns; empty if it only carries out another want of its rung."""
    when: Moment
    do: Callable[[Site], Applied]
    """May raise NotApplicable."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one rung wants."""

    wants: Mapping[str, Any] = field(default_factory=dict)
    """Settings by key (``loader.num_workers``); each key has one owner."""
    actions: tuple[Action, ...] = ()
    parity: Parity = "exact"
    notes: tuple[str, ...] = ()
    """What the user should know before step 1."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Changed facts for the rungs that come later."""
    evaluation: bool = False
    """Also applies in validate, test and predict, so that they compute what validation inside fit computed."""
    rehearse: Literal["modules", "optimizers"] | None = None
    """Set if the change alters the device's work: after the first step its actions are tried on these objects, and stay
    if that succeeds. Before that, sanity validation included, none of the actions has run."""
    check: Callable[[Site], None] | None = None
    """Looks at the optimizers of a fit once they exist, before anything is tried; may raise NotApplicable."""
    pay_back: PayBack | None = None
    """Whether the rest of the run must recover the one-time cost of the first call; None if there is no such cost."""
    first_call_s: float = 0.0
    """Rough time by which the first call takes longer than the second, where `pay_back` is None. A rung of a shipped
    ladder is tried only if that fits into the rehearsal's share of the run."""
    only_device: bool = False
    """Shortens the device's work, not its launches by the host: saves no more than the host waits for the device."""
    first_call_of: tuple[str, ...] = ()
    """Names of the modules that the first call compiles; empty: all."""
    cheaper: Change | None = None
    """A variant with a smaller one-time cost and a smaller gain; tried if this one cannot pay back or has failed."""
    waits_for: str | None = None
    """What must be known before this rung can be planned; until then the other fields describe what may come."""
    may_want: tuple[str, ...] = ()
    """Keys that it may set once that is known."""


Status = Literal["planned", "waiting", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """Results of trying a rung on the calls of the first step: forward and backward, eager versus changed."""

    deviation: float | None = None
    """The larger deviation of outputs and gradients, relative to their norm; None if not determined."""
    eager_ms: float | None = None
    """Time of the modules as the user wrote them."""
    changed_ms: float | None = None
    """Time of the same modules with this rung and those kept before it."""
    of_batch: bool = False
    """The times cover all work of these modules for one batch; not just some calls, nor the optimizer's."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One enabled rung in the plan."""

    rung: str
    status: Status
    change: Change = field(default_factory=Change)
    reason: str | None = None
    """Why it is skipped, or what it is waiting for."""
    has_acted: bool = False
    """It is skipped from some step on, and trained before that."""
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
        """The weakest class among the rungs that train, or did for some of the steps."""
        classes = (step.change.parity for step in self.steps if step.status == "planned" or step.has_acted)
        return max(classes, key=PARITY_ORDER.index, default="exact")

    def owner(self, key: str) -> str | None:
        """The rung that sets `key`, or may set it later; None if no rung does."""
        return next((step.rung for step in self.steps if key in (*step.change.wants, *step.change.may_want)), None)

    def step(self, rung: str) -> Step | None:
        return next((step for step in self.steps if step.rung == rung), None)


def changes_loader(wants: Iterable[str]) -> bool:
    """Whether one of these settings changes the train loader."""
    return any(key.startswith(("loader.", "feed.", "dataset.")) for key in wants)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a rung took effect. ``None``: nothing ran that could show it."""

    rung: str = ""
    took: bool | None = None
    why: str = ""
    parity_class: Parity = "exact"
    rehearsed: Rehearsed | None = None
    pays_back_after_steps: float | None = None
    """Optimizer steps until the rung's one-time cost is recovered, by the rehearsal; not a verdict."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One bottleneck, its share of the step and the YAML patch that addresses it."""

    bottleneck: str
    share_pct: float | None = None
    """Share of the step; None if it costs nothing here, or there is no bottleneck."""
    why: str = ""
    patch: Mapping[str, Any] | None = None
    ceiling_gain_pct: float | None = None
    """Upper limit of the gain from removing it; None if unknown."""
    ceiling_is_estimate: bool = True
    """False if a trial measured it."""
    detail: tuple[str, ...] = ()
    """Further lines: the evidence behind the reason, and caveats about the figures."""
    title: str = ""
    """Headline in capitals, filled by ``diagnose``."""
    alarm: str = ""
    """Text that the first line of a summary adds to the headline: figures that must not be overlooked."""


def say_duration(seconds: float) -> str:
    """A time in the unit that suits it: ``45 s``, ``12 min``, ``6 h 44 min``."""
    if seconds <= 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes <= 120 else f"{minutes // 60} h {minutes % 60} min"


def say_count(count: int, noun: str) -> str:
    """A number with its noun, as evidence says it: ``1 batch``, ``1,024 batches``."""
    return f"{count:,} {noun if count == 1 else f'{noun}es' if noun.endswith(('s', 'tch')) else f'{noun}s'}"
