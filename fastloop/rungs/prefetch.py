"""Copy the next batches to the device ahead of time, on a side stream.

Faster because  the host-to-device copy runs beside the previous step's kernels instead of between two steps.
Costs           `depth` batches of device memory, and pinned host memory for those in flight.
Don't use when  batches are small (copies under 1 % of the step) or are made on the device.
Evidence        batches that had been copied on the side stream, from pinned memory, when the step got them
Source          https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

from __future__ import annotations

from dataclasses import dataclass

from fastloop.errors import NotApplicable, require_positive
from fastloop.records.card import Card, Tunable, read_int
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Verdict
from fastloop.records.readings import on_gpu

CARD = Card(
    family="feed",
    does="prefetch copies the next batches while the step runs",
    evidence={"ahead_batches": 0},
    answers={"h2d": 2},
    follows={"data_wait": 2},
    applies=on_gpu,
    tunes=Tunable(field="depth", values=lambda _space: (1, 2, 4), by_trial=True),
    batches_ready=lambda settings, _workers: 0 if settings is None else read_int(settings, "depth", 2),
    plan_shows_refusal=True,
    loads_elsewhere=True,
)
"""What other files know of this rung."""


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Batches ahead of the step, already on the device. Train loaders only."""

    enabled: bool = False
    depth: int = 2
    """Batches kept on the device ahead of the one in use."""

    def __post_init__(self) -> None:
        why, do = "fewer than one batch ahead is no prefetching", "write 1 or more, or prefetch.enabled: false"
        require_positive("prefetch.depth", self.depth, why=why, do=do)

    def plan(self, facts: Facts) -> Change:
        """Ask for a device feed around the train loader."""
        if facts.device != "cuda":
            raise NotApplicable(f"needs CUDA; this run is on {facts.device}, where there is no copy to hide")
        if facts.steps_with_iterator:
            raise NotApplicable("training_step(dataloader_iter) fetches and moves its own batches")
        if facts.loader is None:
            return Change(waits_for="the train loader", may_want=("feed.depth",))
        if facts.loader.on_device:
            raise NotApplicable(f"{facts.loader.engine} makes the batches on the device, ahead of the step itself")
        if facts.loader.sampler_hazards and not facts.loader.num_workers:
            why = "; ".join(facts.loader.sampler_hazards)
            raise NotApplicable(f"batches ahead of the training ask the sampler too early: {why}")
        notes = []
        if facts.loader.num_workers == 0 and facts.loader.draws_random:
            notes.append(
                "samples are drawn up to depth batches early in the main process: a training_step that draws"
                " from the CPU generator too gets other numbers"
            )
        return Change(wants={"feed.depth": self.depth}, notes=tuple(notes), parity="approximate" if notes else "exact")

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when the window's batches had been copied on the side stream before they were asked for."""
        evidence = seen.evidence.get("prefetch", {})
        ahead, total = evidence.get("ahead_batches", 0), evidence.get("batches", 0)
        if not total:
            return Verdict(took=False, why="no batch was prefetched")
        if not evidence.get("copied_bytes"):
            return Verdict(took=False, why="the batches were on the device already: nothing to copy ahead")
        return Verdict(
            took=ahead > 0,
            why=f"{ahead} of {total} batches were on the device before the step needed them"
            f" ({evidence['copied_bytes'] / total / 2**20:.1f} MiB each)",
        )
