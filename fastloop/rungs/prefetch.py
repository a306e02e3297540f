"""Keep the next batches on the device, copied there by a side stream.

Faster because  the host-to-device copy runs beside the previous step's kernels instead of between two steps.
Costs           `depth` batches of device memory, and pinned host memory for those in flight.
Don't use when  batches are small (copies under 1 % of the step) or are made on the device.
Evidence        batches handed out that had been copied on the side stream, from pinned memory
Source          https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

from __future__ import annotations

from dataclasses import dataclass

from fastloop.errors import ConfigError, NotApplicable
from fastloop.measurement import Measurement
from fastloop.records import Change, Facts, Verdict


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Batches ahead of the step, already on the device. Train loaders only."""

    enabled: bool = False
    depth: int = 2
    """Batches kept on the device ahead of the one in use."""

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ConfigError(key="prefetch.depth", got=f"prefetch.depth={self.depth}",
                              why="fewer than one batch ahead is no prefetching",
                              do="write 1 or more, or prefetch.enabled: false")  # fmt: skip

    def plan(self, facts: Facts) -> Change:
        """Ask for a device feed around the train loader."""
        if facts.device != "cuda":
            raise NotApplicable(f"needs CUDA; this run is on {facts.device}, where there is no copy to hide")
        if facts.steps_with_iterator:
            raise NotApplicable("training_step(dataloader_iter) fetches and moves its own batches")
        if facts.loader is None:
            return Change(waits_for="the train loader")
        notes = []
        if facts.loader.num_workers == 0 and facts.loader.draws_random:
            notes.append("samples are drawn up to depth batches early in the main process: a training_step that draws"
                         " from the CPU generator too gets other numbers")  # fmt: skip
        return Change(wants={"feed.depth": self.depth}, notes=tuple(notes),
                      parity="approximate" if notes else "exact")  # fmt: skip

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when the window's batches had been copied on the side stream before they were asked for."""
        evidence = seen.evidence.get("prefetch", {})
        ahead, total = evidence.get("ahead_batches", 0), evidence.get("batches", 0)
        if not total:
            return Verdict(took=False, why="no batch went through the device feed")
        if not evidence.get("copied_bytes"):
            return Verdict(took=False, why="the batches were on the device already: nothing to copy ahead")
        return Verdict(took=ahead > 0, why=f"{ahead} of {total} batches were on the device before they were asked for"
                                           f" ({evidence['copied_bytes'] / total / 2**20:.1f} MiB each)")  # fmt: skip
