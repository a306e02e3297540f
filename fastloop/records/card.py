"""The card of a rung: all that other files know of it. It stands in the rung's own file; nobody else names a rung.

Diagnosis, climb, tune, gates and reports get the cards from `fastloop.ladder.cards` and read them; a new rung is known
to all of them as soon as it is a field of the ladder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fastloop.records.measurement import Measurement

Family = Literal["feed", "fill", "compute", "sync"]
"""feed: batches and their way to the device; fill: how many samples a kernel gets; compute: the kernels themselves;
sync: what several devices exchange."""

DEVICE = "device"
"""The cause that stands for "the device is the limit": rungs that pay once nothing else is."""


Setting = bool | int | float | str | None
Settings = Mapping[str, Setting]
"""Fields of one rung by name."""
Stack = Mapping[str, Settings]
"""Settings by rung: what a climb has put on top of the configuration it began with."""
Patch = Mapping[str, Stack]
"""``{"rungs": stack}``, as YAML has it."""


def read_int(settings: Settings | None, name: str, default: int) -> int:
    """A number among the settings of a rung; the default where it is not set, or ``auto``."""
    value = (settings or {}).get(name, default)
    return value if isinstance(value, int) else default


@dataclass(frozen=True, kw_only=True)
class ClimbState:
    """Where a climb stands: all that the variants of a rung may depend on."""

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
    """The samples are made of image files."""
    gaps_count: bool = False
    """Starting workers anew for each epoch takes a share of the step that is worth saving."""
    epochs_end: bool = False
    """Epochs end within its trials, so samples come again."""
    recount: bool = False
    """Loading limits the step, and the number of loader processes was chosen on a lower stack."""
    stack: Stack = field(default_factory=dict)
    ended: Mapping[str, str] = field(default_factory=dict)
    """How the last attempt of each variant ended, by its key."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to switch a rung on that a climb may try."""

    name: str = ""
    """Tells it from the rung's other variants; empty: the plain one."""
    settings: tuple[Settings, ...] = ({},)
    """Its fields besides ``enabled``, the likeliest first; none where they are searched for."""
    changes: Literal["replayed", "loader", "gap", "engine"] = "replayed"
    """The cost that it changes, and so the trial that predicts it: the step on replayed batches, loading, or the gap
    between epochs, which needs no trial. What loads in the loader's place is not predicted, but screened at once."""
    every: bool = True
    """Predict with all settings and take the best; else take the first that runs (a micro-batch that fits)."""
    tune: bool = False
    """Search for the rung's number, if it has one, once the variant is predicted."""
    repeats: bool = False
    """May be tried again whenever the rung offers it."""
    changes_training: bool = False
    """Tried only where a climb may change the training."""
    refused: str | None = None
    """Why there is no need to try."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What bounds the values of a number."""

    cpus: int = 1
    """For each rank."""
    micro_batch: int = 1
    """Samples of a loader batch."""
    batches_per_step: int = 1
    """Loader batches of an optimizer step on one rank."""


@dataclass(frozen=True, kw_only=True)
class Tunable:
    """The one number of a rung that can be searched for."""

    field: str
    values: Callable[[SearchSpace], Iterable[int]]
    tolerance: float = 0.02
    """The smallest value that is slower than the best one by no more than this share is chosen."""
    trained: Literal["as_it_is", "replayed", "loader"] = "as_it_is"
    """How a value is measured: by a training; by one on replayed batches; or by the loader alone first, for a number of
    loader processes, of which only what can be the best is trained with."""
    without: Callable[[SearchSpace], int] = lambda _space: 0
    """The value that stands for the training without the rung."""
    no_values: str = "there is no value to try"
    """Why `values` may be empty."""
    least_devices: int = 1
    by_trial: bool = False
    """In a climb a trial of the changed cost compares the default with the largest value; nothing is trained."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a rung is good for, and when it applies. The first four fields make a rung."""

    # what diagnosis proposes
    family: Family
    does: str | Callable[[Measurement], str]
    """Why it helps, in one clause for a finding: "one fused kernel updates all parameters". A function where figures of
    what was measured say more."""
    answers: Mapping[str, int] = field(default_factory=dict)
    """Causes that it addresses (a finding's bottleneck, a culprit among the kernels, or `DEVICE`), each with its place
    among the rungs that do: 1 is tried first."""
    applies: Callable[[Measurement], bool] = lambda _seen: True
    """Whether it could apply to what was measured, is not what the user's script does already, and saves more than it
    costs."""
    follows: Mapping[str, int] = field(default_factory=dict)
    """Bottlenecks for which it is worth a try once a rung that answers them is on, each with its place then."""
    advice: Mapping[str, str | Callable[[Measurement, bool], str | None]] = field(default_factory=dict)
    """By bottleneck: what to do where no rung helps, in place of the rule's own advice. A function is given whether the
    rung is on; None where it knows nothing better."""
    patch: Callable[[Measurement], Settings] = lambda _seen: {"enabled": True}
    """Its fields in a patch that a finding proposes."""

    # what a climb and `fastloop tune` try
    variants: tuple[Variant, ...] | Callable[[ClimbState], Iterable[Variant]] = (Variant(tune=True),)
    """What a climb may try of it, the plain thing first. A function where that depends on where the climb stands."""
    tunes: Tunable | None = None
    batches_ready: Callable[[Settings | None, int], int] = lambda _settings, _workers: 0
    """Loader batches that it keeps ready, by its settings (None: it is off) and the number of loader processes."""
    first_start_s: float = 0.0
    """Seconds that its first training takes beyond another start, as long as none was timed."""
    plan_shows_refusal: bool = False
    """Its plan turns only on what a measurement without it shows: a refusal then holds on top of any other rung."""

    # what parity gates, configurations and error messages have to know
    regroups: bool = False
    """It makes an optimizer step of other micro-batches than the loader's."""
    loads_elsewhere: bool = False
    """It makes random augmentations in another process or earlier, and so from other random numbers; of several such
    rungs the first in the ladder says where."""
    owns_trainer_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of YAML's `trainer` section that must not be written where it is enabled, each with its own field for it."""
    explains: Mapping[str, str] = field(default_factory=dict)
    """Parts of the texts of exceptions that come of it, or of the files they passed through, each with a line that says
    what the exception does not."""

    def list_variants(self, state: ClimbState) -> tuple[Variant, ...]:
        """What a climb may try of it at this point."""
        return tuple(self.variants(state)) if callable(self.variants) else self.variants


Cards = Mapping[str, Card]
"""Cards by the name of their rung, in the ladder's order."""
