"""Load batches in worker processes, ahead of need.

Faster because  the device no longer waits while Python decodes the next batch.
Costs           about one copy of the dataset object per worker in host memory; a slower first batch of each epoch.
Don't use when  data_wait is already under 2 % of the step, or the samples already sit on the device.
Evidence        live worker processes behind the loader that fed the timed window
Source          https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import ConfigError, NotApplicable
from fastloop.measurement import Measurement
from fastloop.records import Change, Facts, LoaderFacts, Parity, Verdict

MOST = 8
"""`auto` stops here: more workers seldom pay and slow the launching thread down."""
LITTLE_SHM_BYTES = 2**30


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
        if isinstance(self.count, int) and self.count < 1:
            raise ConfigError(key="workers.count", got=f"workers.count={self.count}",
                              why="a loader without workers is what you have when this rung is off",
                              do="write a positive number or auto, or workers.enabled: false")  # fmt: skip
        if self.prefetch_factor < 1:
            raise ConfigError(key="workers.prefetch_factor", got=f"workers.prefetch_factor={self.prefetch_factor}",
                              why="each worker must keep at least one batch ready",
                              do="write 1 or more (2 is PyTorch's own default)")  # fmt: skip

    def plan(self, facts: Facts) -> Change:
        """Ask for worker processes where the train loader has none and its dataset can bear them."""
        if facts.loader is None:
            return Change(waits_for="the train loader")
        loader = facts.loader
        self._refuse(loader, facts)
        count = auto_count(facts) if self.count == "auto" else self.count
        notes = []
        if count * facts.local_ranks > facts.cpu_count:
            notes.append(f"{count} workers for each of {facts.local_ranks} ranks on {facts.cpu_count} usable CPUs:"
                         " they will take turns, and may slow the training process down")  # fmt: skip
        if facts.shm_free_bytes is not None and facts.shm_free_bytes < LITTLE_SHM_BYTES:
            kept = count * self.prefetch_factor
            notes.append(f"/dev/shm has room for {facts.shm_free_bytes >> 20} MiB only, and {count} workers keep up to"
                         f" {kept} batches there: if one dies, give the container --shm-size=8g")  # fmt: skip
        persistent = self.persistent
        if persistent and facts.reload_every_n_epochs:
            persistent = False
            notes.append("persistent workers are off: the Trainer reloads its loaders, and the old workers would stay")
        parity: Parity = "approximate" if loader.draws_random else "exact"
        if loader.draws_random:
            notes.append(f"augmentation draws differ from a run without workers ({', '.join(loader.draws_random[:3])})")
        wants: dict[str, Any] = {"loader.num_workers": count, "loader.prefetch_factor": self.prefetch_factor,
                                 "loader.persistent_workers": persistent}  # fmt: skip
        if self.start_method != "auto":
            wants["loader.multiprocessing_context"] = self.start_method
        return Change(wants=wants, parity=parity, notes=tuple(notes))

    def _refuse(self, loader: LoaderFacts, facts: Facts) -> None:
        if not loader.is_dataloader:
            raise NotApplicable(f"{loader.kind} is not a DataLoader: it has no workers to set")
        if loader.num_workers:
            raise NotApplicable(f"the loader already has {loader.num_workers} workers; your number stands")
        if not loader.map_style:
            raise NotApplicable("an iterable dataset would be read whole by every worker and so be duplicated;"
                                " shard it by torch.utils.data.get_worker_info and set num_workers")  # fmt: skip
        if loader.stateful:
            raise NotApplicable(f"{loader.kind} shuffles differently with workers, and its saved position is bound"
                                " to their number; set num_workers yourself before the run starts")  # fmt: skip
        if facts.no_sockets_in is not None:
            raise NotApplicable("workers send their batches through sockets, and no socket's path may be as long as"
                                f" those below {facts.no_sockets_in}; set TMPDIR to a shorter directory")  # fmt: skip
        if loader.worker_hazards:
            raise NotApplicable(f"the dataset cannot go to workers: {'; '.join(loader.worker_hazards)}")
        method = loader.start_method if self.start_method == "auto" else self.start_method
        if method != "fork" and loader.unpicklable:
            raise NotApplicable(f"workers start by {method} here, and {loader.unpicklable} cannot be pickled;"
                                " make it a module-level function or class")  # fmt: skip

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when living worker processes stood behind the loader of the timed window."""
        count = seen.evidence.get("workers", {}).get("live_workers")
        if count is None:
            return Verdict(took=None, why="the loader's iterator could not be looked at")
        return Verdict(took=count > 0, why=f"{count} live worker process{'' if count == 1 else 'es'} fed the window")


def auto_count(facts: Facts) -> int:
    """Workers per rank that leave each rank's own thread a CPU."""
    return max(1, min(MOST, facts.cpu_count // max(1, facts.local_ranks) - 1))
