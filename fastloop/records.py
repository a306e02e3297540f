"""The records that travel between the stages. Frozen, keyword-only, and free of torch and Lightning.

``Facts -> Change/Action -> Plan -> (run) -> Measurement -> Verdict, Finding``
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Parity = Literal["exact", "approximate", "changes-training"]
"""exact: bit-identical; approximate: same mathematics, other rounding; changes-training: neither."""

PARITY_ORDER: tuple[Parity, ...] = ("exact", "approximate", "changes-training")

Moment = Literal["model", "wrapped", "train_start"]
"""When an action runs: model = built, on its device, not yet wrapped; wrapped = after the DDP wrapper;
train_start = optimizers exist and hold their restored state."""

@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """What the train loader is, read without taking a sample from it."""

    kind: str
    """Class name of the loader."""
    is_dataloader: bool = True
    """A ``torch.utils.data.DataLoader`` or a subclass of it."""
    map_style: bool = True
    num_workers: int = 0
    pin_memory: bool = False
    batch_size: int | None = None
    """Samples a batch; None where the loader does not batch or a custom batch sampler decides."""
    batches: int | None = None
    """Batches an epoch on this rank; None where the loader has no length."""
    auto_collates: bool = True
    """False for ``batch_size=None``: the dataset hands out whole batches."""
    custom_collate: bool = False
    start_method: str = "fork"
    persistent_workers: bool = False
    stateful: bool = False
    """It can say where it stands (``state_dict``), so a run may resume mid-epoch."""
    draws_random: tuple[str, ...] = ()
    """Places in the dataset that draw random numbers, as far as reading its code shows."""
    worker_hazards: tuple[str, ...] = ()
    """Why worker processes would break or change this dataset: CUDA tensors, open handles, per-epoch state."""
    unpicklable: str | None = None
    """Attribute path of what cannot travel to a spawned worker."""
    sample_bytes: int | None = None
    """Bytes of one sample, where a dry run looked at one."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything ``plan`` may look at. ``plan`` is a pure function of it."""

    # the machine
    cpu_count: int = 1
    """CPUs this process may use: affinity and cgroup quota, whichever is smaller."""
    local_ranks: int = 1
    """Training processes that share those CPUs."""
    shm_free_bytes: int | None = None
    """Room in ``/dev/shm`` for batches on their way from workers; None where there is none, or it is not known."""
    no_sockets_in: str | None = None
    """The directory for temporary files, where its path is too long for the sockets that workers send batches by."""
    device: str = "cpu"
    """Device type the run trains on: cpu, cuda, mps."""
    device_name: str | None = None
    compute_capability: tuple[int, int] | None = None
    compiler: str | None = None
    """Path of the C++ compiler Inductor would call; None where there is none."""
    # the run
    world_size: int = 1
    strategy: str = "SingleDeviceStrategy"
    is_ddp: bool = False
    plain_gradients: bool = True
    """Whole gradients live in ``parameter.grad`` (one device or DDP), not in shards or an engine of the strategy's."""
    precision: str = "32-true"
    own_precision: bool = False
    """The user chose a precision or a precision plugin."""
    accumulate: int = 1
    """Batches per optimizer step as the Trainer counts them."""
    accumulation_scheduled: bool = False
    """A GradientAccumulationScheduler changes the accumulation during training."""
    averages_weights_by_swa: bool = False
    """StochasticWeightAveraging is there: it runs an extra epoch with the backward switched off."""
    micro_batches: bool = False
    """Several backward passes make one optimizer step, by accumulation or by a split."""
    clip: bool = False
    """Gradients are clipped, by the Trainer or in ``configure_gradient_clipping``."""
    automatic_optimization: bool = True
    reload_every_n_epochs: int = 0
    val_check_interval: int | float | None = 1.0
    val_every_n_epochs: int | None = 1
    """``check_val_every_n_epoch``; None: ``val_check_interval`` counts batches across epochs."""
    limit_train_batches: int | float | None = 1.0
    resuming: bool = False
    transfer_hooks: tuple[str, ...] = ()
    """Batch transfer hooks the user overrides."""
    steps_with_iterator: bool = False
    """``training_step(self, dataloader_iter)``: the module fetches its own batches."""
    # the model
    batchnorms: tuple[str, ...] = ()
    convs: tuple[str, ...] = ()
    """Names of the 2-D convolutions."""
    not_mean_losses: tuple[str, ...] = ()
    """Losses that can be seen not to be means over samples."""
    autocasts: tuple[str, ...] = ()
    """Methods of the user's module that enter autocast themselves."""
    compiled_by_user: tuple[str, ...] = ()
    compile_targets: tuple[str, ...] = ()
    """Inner modules that can be compiled in place."""
    detaches_grads: tuple[str, ...] = ()
    """Methods that call ``grad.detach_()``, which gradient bucket views forbid."""
    grad_hooks: bool = False
    """Parameters carry post-accumulate hooks (an optimizer inside the backward, for instance)."""
    user_comm_hook: bool = False
    # the data, known once the Trainer asks for the train loader
    loader: LoaderFacts | None = None

    def after(self, changes: Mapping[str, Any]) -> Facts:
        """These facts as later rungs see them once an earlier rung's change is in."""
        return dataclasses.replace(self, **changes) if changes else self


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What running an action gives back."""

    undo: Callable[[], None]
    """Puts everything back; harmless when called twice."""
    probe: Callable[[], Mapping[str, Any]] = dict
    """Evidence from the running process; called after the first step and at the end."""
    clean: Callable[[dict[str, Any]], None] = lambda _checkpoint: None
    """Takes out of a checkpoint, in place, what a run without the rung would not have written."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """A want that has to be done to live objects. Run by ``bridge/apply.py`` and nothing else."""

    keys: tuple[str, ...]
    when: Moment
    do: Callable[[Any], Applied]
    """Takes the site (trainer, model, wrapped model, optimizers, device); may raise NotApplicable."""


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
    waits_for: str | None = None
    """What must be known before this rung can be planned; the rest of the record then says what may come."""


Status = Literal["planned", "waiting", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One enabled rung in the plan."""

    rung: str
    status: Status
    change: Change = field(default_factory=Change)
    reason: str | None = None
    """Why it is skipped, or what it waits for."""


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

    def step(self, rung: str) -> Step | None:
        return next((step for step in self.steps if step.rung == rung), None)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Did a rung take? ``None``: nothing was run that could tell."""

    rung: str = ""
    took: bool | None = None
    why: str = ""
    parity_class: Parity = "exact"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One bottleneck, its share of the step and the YAML patch that addresses it."""

    bottleneck: str
    share_pct: float | None
    """Of the step; None where it costs nothing here, or nothing is named."""
    why: str
    patch: Mapping[str, Any] | None = None
    ceiling_gain_pct: float | None = None
    """What would be gained at most if it were gone; None where that is not known."""
    ceiling_is_estimate: bool = True
    """False where a trial measured it."""
    detail: tuple[str, ...] = ()
    """Further lines: the evidence behind the reason, and what makes the figures doubtful."""
    title: str = ""
    """Headline in capitals, filled by ``diagnose``."""
