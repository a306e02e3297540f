"""Load batches ahead of time, in worker processes.

Faster because  the device no longer waits while Python decodes the next batch.
Costs           about one copy of the dataset object per worker in host memory; a slower first batch of each epoch.
Don't use when  data_wait is already under 2 % of the step, or the samples are already on the device.
Evidence        live worker processes behind the loader during the timed window
Source          https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import NotApplicable, require_positive
from fastloop.records.card import Card, ClimbState, Tunable, Variant, read_int
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Parity, Verdict
from fastloop.records.readings import is_worth_handing_over, loader

MOST = 8
"""`auto` stops here: more workers seldom pay and slow the launching thread down."""
LITTLE_SHM_BYTES = 2**30
KEEP = "keep the workers between epochs: rungs.workers.persistent: true"


def _variants(state: ClimbState) -> Iterator[Variant]:
    """Workers with the number that the loader alone suggests; then persistent ones, and another number."""
    own = state.stack.get("workers")
    if own is None:
        yield Variant(changes="loader", tune=True)
        return
    if state.gaps_count and not own.get("persistent"):
        yield Variant(name="persistent", settings=({"persistent": True},), changes="gap")
    if state.recount:
        yield Variant(name="count", settings=(), changes="loader", tune=True, repeats=True)


CARD = Card(
    family="feed",
    does=lambda seen: f"the loader has 0 workers, {loader(seen).get('usable_cpus')} CPUs are usable",
    evidence={"loader.num_workers": 0},
    answers={"data_wait": 1},
    applies=lambda seen: (
        loader(seen).get("num_workers") == 0 and bool(loader(seen).get("map_style")) and is_worth_handing_over(seen)
    ),
    advice={"epoch_gap": lambda seen, on: KEEP if on and loader(seen).get("num_workers") else None},
    variants=_variants,
    tunes=Tunable(
        field="count",
        values=lambda space: (*(2**power for power in range(space.cpus.bit_length())), space.cpus),
        trained="loader",
    ),
    batches_ready=lambda settings, workers: workers * read_int(settings, "prefetch_factor", 2),
    plan_shows_refusal=True,
    loads_elsewhere=True,
)
"""What other files know of this rung."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Worker processes for map-style loaders that have none. Evaluation loaders stay as they are."""

    enabled: bool = False
    count: int | Literal["auto"] = "auto"
    """Worker processes per rank; auto = CPUs of this process (affinity and cgroup) shared by the local ranks,
    less one, at most 8."""
    prefetch_factor: int = 2
    """Batches each worker keeps ready."""
    persistent: bool = False
    """Keep the workers between epochs. They then never see what callbacks change in the dataset after epoch 0."""
    start_method: Literal["auto", "fork", "spawn", "forkserver"] = "auto"
    """How workers start; auto = as the loader or the platform has it."""

    def __post_init__(self) -> None:
        do = "write a positive number or auto, or workers.enabled: false"
        require_positive("workers.count", self.count, why="zero workers means that this rung is off", do=do)
        why, do = "each worker must keep at least one batch ready", "write 1 or more (2 is PyTorch's own default)"
        require_positive("workers.prefetch_factor", self.prefetch_factor, why=why, do=do)

    def plan(self, facts: Facts) -> Change:
        """Ask for worker processes where the train loader has none and its dataset can bear them."""
        if facts.loader is None:
            return Change(waits_for="the train loader", may_want=("loader.num_workers",))
        loader = facts.loader
        self._refuse(loader, facts)
        count = auto_count(facts) if self.count == "auto" else self.count
        notes = []
        if count * facts.local_ranks > facts.cpu_count:
            notes.append(
                f"{count} workers for each of {facts.local_ranks} ranks on {facts.cpu_count} usable CPUs:"
                " they compete for CPUs and may slow training down"
            )
        if facts.shm_free_bytes is not None and facts.shm_free_bytes < LITTLE_SHM_BYTES:
            notes.append(
                f"/dev/shm has room for {facts.shm_free_bytes >> 20} MiB only, and {count} workers keep up to"
                f" {count * self.prefetch_factor} batches there: if one dies, give the container --shm-size=8g"
            )
        persistent = self.persistent and not facts.reload_every_n_epochs
        if persistent != self.persistent:
            notes.append("persistent workers are off: the Trainer reloads its loaders, and the old workers would stay")
        parity: Parity = "approximate" if loader.draws_random else "exact"
        if loader.draws_random:
            notes.append(f"augmentation draws differ from a run without workers ({', '.join(loader.draws_random[:3])})")
        wants: dict[str, Any] = {
            "loader.num_workers": count,
            "loader.prefetch_factor": self.prefetch_factor,
            "loader.persistent_workers": persistent,
        }
        if self.start_method != "auto":
            wants["loader.multiprocessing_context"] = self.start_method
        return Change(wants=wants, parity=parity, notes=tuple(notes))

    def _refuse(self, loader: LoaderFacts, facts: Facts) -> None:
        if not loader.is_dataloader:
            raise NotApplicable(f"{loader.kind} is not a DataLoader: it has no workers to set")
        if loader.num_workers:
            raise NotApplicable(f"the loader already has {loader.num_workers} workers; your number stands")
        if not loader.map_style:
            raise NotApplicable(
                "an iterable dataset would be read whole by every worker and so be duplicated;"
                " shard it by torch.utils.data.get_worker_info and set num_workers"
            )
        if loader.stateful:
            raise NotApplicable(
                f"{loader.kind} shuffles differently with workers, and its saved position is bound"
                " to their number; set num_workers yourself before the run starts"
            )
        if facts.no_sockets_in is not None:
            raise NotApplicable(
                "workers send their batches through sockets, and no socket's path may be as long as"
                f" those below {facts.no_sockets_in}; set TMPDIR to a shorter directory"
            )
        if loader.worker_hazards:
            raise NotApplicable(f"the dataset cannot go to workers: {'; '.join(loader.worker_hazards)}")
        method = loader.start_method if self.start_method == "auto" else self.start_method
        if method != "fork" and loader.unpicklable:
            raise NotApplicable(
                f"workers start by {method} here, and {loader.unpicklable} cannot be pickled;"
                " make it a module-level function or class"
            )

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when living worker processes stood behind the loader of the timed window."""
        count = seen.evidence.get("workers", {}).get("live_workers")
        if count is None:
            return Verdict(took=None, why="the loader's iterator could not be inspected")
        return Verdict(took=count > 0, why=f"{count} live worker process{'' if count == 1 else 'es'} fed the window")


def auto_count(facts: Facts) -> int:
    """Workers per rank that leave each rank's own thread a CPU."""
    return max(1, min(MOST, facts.cpu_count // max(1, facts.local_ranks) - 1))
