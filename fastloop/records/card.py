"""The card of a rung: all that other files know about it. It is in the rung's own file; no other file names a rung.

Diagnosis, climb, tune, gates and reports get the cards from `fastloop.ladder.collect_cards` and read them; to make a
new rung known to all of them, add it as a field of the ladder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fastloop.records.measurement import Measurement

Family = Literal["feed", "fill", "compute", "sync"]
"""feed: batches and their way to the device; fill: how many samples a kernel processes; compute: the kernels
themselves; sync: communication between devices."""

DEVICE = "device"
"""The cause meaning "the device is the limit": rungs that help once nothing else limits."""


Setting = bool | int | float | str | None
Settings = Mapping[str, Setting]
"""Fields of one rung by name."""
Stack = Mapping[str, Settings]
"""Settings by rung: what a climb has added to the configuration it started from."""
Patch = Mapping[str, Stack]
"""``{"rungs": stack}``, as in YAML."""


def read_int(settings: Settings | None, name: str, default: int) -> int:
    """An integer among the settings of a rung; the default if it is not set, or ``auto``."""
    value = (settings or {}).get(name, default)
    return value if isinstance(value, int) else default


@dataclass(frozen=True, kw_only=True)
class ClimbState:
    """The state of a climb: everything the variants of a rung may depend on."""

    on_cuda: bool = False
    micro_batch: int | None = None
    """Samples of a loader batch on one rank, at the start."""
    rank_batch: int | None = None
    """Samples of an optimizer step on one rank."""
    one_backward: bool = True
    """A step is one micro-batch, and no rung regroups batches."""
    launch_bound: bool | None = None
    """The device waits for launches; None: not measured."""
    image_files: bool = False
    """The samples are made from image files."""
    gaps_count: bool = False
    """Restarting workers for each epoch takes a share of the step that is worth saving."""
    may_keep_workers: bool = False
    """The start has workers of its own, which could stay between epochs."""
    may_have_more_workers: bool = False
    """The start has workers of its own, which others could replace."""
    epochs_end: bool = False
    """Epochs end within its trials, so samples repeat."""
    recount: bool = False
    """Loading limits the step, and the number of worker processes was chosen on a lower stack."""
    stack: Stack = field(default_factory=dict)
    ended: Mapping[str, str] = field(default_factory=dict)
    """How the last attempt of each variant ended, by its key."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to enable a rung that a climb may try."""

    name: str = ""
    """Distinguishes it from the rung's other variants; empty: the plain one."""
    settings: tuple[Settings, ...] = ({},)
    """Its fields besides ``enabled``, the most promising first; empty if they are searched for."""
    changes: Literal["replayed", "loader", "gap", "engine"] = "replayed"
    """The cost that it changes, which determines the trial that predicts it: the step on replayed batches, loading, or
    the gap between epochs, which needs no trial. An engine that replaces the loader is not predicted but screened
    directly."""
    first: bool = False
    """Try it before the other rungs of its family, which bring little without it."""
    together: bool = False
    """Also try it together with the other variants marked so, on top of the largest shipped ladder: each removes one
    limit of the step and leaves those that the others remove."""
    replaces: tuple[str, ...] = ()
    """Rungs of the stack to switch off with it, because they would do its work in its place."""
    theirs: bool = False
    """It changes what the start's loader already does; the rung's plain settings are refused there."""
    every: bool = True
    """Predict with all settings and take the best; otherwise take the first that runs (a micro-batch that fits)."""
    tune: bool = False
    """After the variant is predicted, search for the best value of the rung's number, if it has one."""
    repeats: bool = False
    """May be tried again each time the rung offers it."""
    changes_training: bool = False
    """Tried only if the climb may change the training."""
    refused: str | None = None
    """Why there is no need to try."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Limits on the values of a number."""

    cpus: int = 1
    """CPUs per rank."""
    micro_batch: int = 1
    """Samples of a loader batch."""
    batches_per_step: int = 1
    """Loader batches per optimizer step on one rank."""


@dataclass(frozen=True, kw_only=True)
class Tunable:
    """The one number of a rung that a search can optimize."""

    field: str
    values: Callable[[SearchSpace], Iterable[int]]
    tolerance: float = 0.02
    """The search chooses the smallest value that is slower than the best one by no more than this share."""
    trained: Literal["as_it_is", "replayed", "loader"] = "as_it_is"
    """How a value is measured: by a training; by a training on replayed batches; or, for a number of worker processes,
    by the loader alone first, after which only values that may be the best are trained."""
    without: Callable[[SearchSpace], int] = lambda _space: 0
    """The value that represents the training without the rung."""
    no_values: str = "there is no value to try"
    """Why `values` may be empty."""
    least_devices: int = 1
    by_trial: bool = False
    """In a climb, a trial of the changed cost compares the default with the largest value; no training is run."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a rung improves, and when it applies. The first four fields suffice to define a rung."""

    # what diagnosis proposes
    family: Family
    does: str | Callable[[Measurement], str]
    """Why it helps, in one clause for a finding: "one fused kernel updates all parameters". A function if the text
    should include measured figures."""
    answers: Mapping[str, int] = field(default_factory=dict)
    """Causes that it addresses (a finding's bottleneck, a culprit among the kernels, or `DEVICE`), each with its rank
    among the rungs that address it: 1 is tried first."""
    applies: Callable[[Measurement], bool] = lambda _seen: True
    """Whether it could apply to this measurement, is not already done by the user's script, and saves more than it
    costs."""
    follows: Mapping[str, int] = field(default_factory=dict)
    """Bottlenecks for which it is worth a try once a rung that addresses them is on, each with its rank then."""
    advice: Mapping[str, str | Callable[[Measurement, bool], str | None]] = field(default_factory=dict)
    """By bottleneck: what to do if no rung helps, replacing the rule's own advice. A function receives whether the rung
    is on, and returns None if it has no better advice."""
    replaces_loader: Callable[[Measurement], bool] = lambda _seen: False
    """Whether it would make the batches in place of this loader, so that rungs for loaders have nothing left to do."""
    patch: Callable[[Measurement], Settings] = lambda _seen: {"enabled": True}
    """Its fields in the patch of a finding."""
    remedies: Mapping[str, Callable[[Measurement], tuple[Settings, str] | None]] = field(default_factory=dict)
    """By bottleneck, if it helps there in another way: its fields in the patch and the clause for the finding, in place
    of `patch` and `does`; None if it does not apply."""

    # what a climb and `fastloop tune` try
    variants: tuple[Variant, ...] | Callable[[ClimbState], Iterable[Variant]] = (Variant(tune=True),)
    """Variants that a climb may try, the plain one first. A function if they depend on the climb's state."""
    tunes: Tunable | None = None
    batches_ready: Callable[[Settings | None, int], int] = lambda _settings, _workers: 0
    """Loader batches that it prefetches, given its settings (None: it is off) and the number of worker processes."""
    first_start_s: float = 0.0
    """Extra seconds that its first training takes compared with a later start; used until one has been timed."""
    plan_shows_refusal: bool = False
    """True if a refusal depends only on what a measurement shows, not on other rungs, so that a climb need not try it
    again later."""

    # what parity gates, configurations and error messages need
    regroups: bool = False
    """It builds an optimizer step from micro-batches that differ from the loader's."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it needs before CUDA starts in the process; the user's own values stay."""
    loads_elsewhere: bool = False
    """It draws random augmentations in another process or earlier, and so from other random numbers; of several such
    rungs, the first in the ladder decides where."""
    owns_trainer_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of YAML's `trainer` section that must not be set if it is enabled, each with the field that replaces it."""
    explains: Mapping[str, str] = field(default_factory=dict)
    """Fragments of the exception texts that it can cause, or of the paths of files in their tracebacks, each with a
    line that explains what the exception does not say."""

    def list_variants(self, state: ClimbState) -> tuple[Variant, ...]:
        """The variants that a climb may try at this point."""
        return tuple(self.variants(state)) if callable(self.variants) else self.variants


Cards = Mapping[str, Card]
"""Cards by rung name, in the ladder's order."""
