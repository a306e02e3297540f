"""Load batches ahead of time, in threads of the training process.

Faster because  the device no longer waits while the next batch is decoded, and no batch is copied between processes.
Costs           two batches in host memory per thread; the threads compete with the training loop for Python's GIL.
Don't use when  samples are made in pure Python: threads run in parallel only inside libraries that release the GIL, or
                in free-threaded Python. Pick only one of `nodes`, `workers` and `dali`.
Evidence        threads that made batches of an epoch, and the samples in them
Source          https://docs.pytorch.org/data/0.11/torchdata.nodes.html
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import NotApplicable, require_positive
from fastloop.evidence.worker_limits import describe_sampler_draws, explain_own_number
from fastloop.records.card import Card, Variant, read_int
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Verdict, say_count
from fastloop.records.readings import may_hand_over

MOST = 16
"""Upper limit for `auto`: the threads of one process take turns when they run Python code."""
GIL = "threads take turns running Python code: this pays off if libraries read and decode the samples"

CARD = Card(
    family="feed",
    does="threads of this process read and decode, and no batch is copied between processes",
    applies=may_hand_over,
    variants=(Variant(changes="engine"),),
    loads_elsewhere=True,
    batches_ready=lambda settings, _workers: 0 if settings is None else 2 * read_int(settings, "threads", MOST),
)


@dataclass(frozen=True, kw_only=True)
class Threads:
    """The engine that loads in place of the loader."""

    threads: int
    own_draws: bool = False
    """Whether each batch draws its random numbers from a separate generator."""

    def make(self, loader: Any) -> Any:
        """Make the pipeline over this loader's dataset, sampler and collate function."""
        from fastloop.feeds.nodes.pipeline import ThreadEngine

        off = "rungs.nodes.enabled: false"
        return ThreadEngine(loader, self.threads, turn_off=off, own_draws=self.own_draws)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """A torchdata.nodes pipeline of threads for map-style loaders without workers, where threads can share the dataset.
    Evaluation loaders stay as they are."""

    enabled: bool = False
    threads: int | Literal["auto"] = "auto"
    """Threads per rank; auto = CPUs of this process (affinity and cgroup) divided by the local ranks, minus one, at
    most 16."""

    def __post_init__(self) -> None:
        do = "write a positive number or auto, or nodes.enabled: false"
        require_positive("nodes.threads", self.threads, why="zero threads load nothing", do=do)

    def plan(self, facts: Facts) -> Change:
        """Request threads in place of the loader if its dataset's code shows that threads can share it."""
        if facts.loader is None:
            return Change(waits_for="the train loader", may_want=("loader.engine",))
        if (obstacle := _find_obstacle(facts.loader)) is not None:
            raise NotApplicable(obstacle)
        share = max(1, min(MOST, facts.cpu_count // max(1, facts.local_ranks) - 1))
        threads = share if self.threads == "auto" else self.threads
        engine = f"a pipeline of {say_count(threads, 'thread')}"
        left = {"loader": dataclasses.replace(facts.loader, engine=engine)}
        draws, early = facts.loader.draws_random, describe_sampler_draws(facts.loader)
        seen = (
            f"random augmentations may differ from a run without threads ({', '.join(draws[:3])}); each batch has its"
            " own generator"
        )
        return Change(
            wants={"loader.engine": Threads(threads=threads, own_draws=bool(draws))},
            notes=(GIL, *([seen] if draws else []), *early),
            facts=left,
            parity="approximate" if draws or early else "exact",
        )

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if threads made the training's batches."""
        found = seen.evidence.get("nodes", {})
        threads, samples = found.get("threads", 0), found.get("samples", 0)
        if not threads:
            return Verdict(took=False, why="no batch came from a thread")
        return Verdict(took=True, why=f"{say_count(threads, 'thread')} loaded {say_count(samples, 'sample')}")


def _find_obstacle(loader: LoaderFacts) -> str | None:
    """Return why threads cannot load in place of this loader; None if they can."""
    if loader.engine is not None:
        return f"{loader.engine} already loads the samples"
    if not loader.is_dataloader:
        return f"{loader.kind} is not a DataLoader: its dataset and sampler are not known"
    if not loader.map_style:
        return "threads can only share a dataset with indexed samples, not an iterable one"
    if loader.num_workers:
        return f"{explain_own_number(loader)} (set num_workers=0 for threads)"
    if loader.stateful:
        return f"{loader.kind} tracks its own position, which threads would not update"
    if loader.own_iterator:
        return f"{loader.kind} creates its own iterators, which threads would bypass"
    if loader.sampler_hazards:
        return f"threads read ahead of training: {'; '.join(loader.sampler_hazards)}"
    if loader.changes_within:
        return f"threads would load too early: {'; '.join(loader.changes_within)}"
    if loader.shared_draws:
        return f"threads would share the random numbers of {', '.join(loader.shared_draws[:3])}; use workers"
    if loader.thread_hazards:
        return f"threads cannot share the dataset as it is: {'; '.join(loader.thread_hazards)}"
    return None
