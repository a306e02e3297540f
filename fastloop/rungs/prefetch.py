"""Copy the next batches to the device ahead of time, on a side stream.

Faster because  host-to-device copies overlap the previous step's kernels instead of running between steps; images
                travel as bytes, a quarter of the size of floats, and the device normalizes them.
Costs           `depth` batches of device memory, and pinned host memory for those in flight.
Don't use when  batches are small (copies under 1 % of the step) or are made on the device.
Evidence        batches already copied, on the side stream and from pinned memory, when the step needed them; batches
                sent as bytes
Source          https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import NotApplicable, require_positive
from fastloop.evidence.worker_limits import describe_sampler_draws, refuse_other_order
from fastloop.records.card import Card, Tunable, read_int
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.images import ImageFacts, Normalize, ToFloat
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Parity, Verdict
from fastloop.records.readings import on_gpu

AHEAD = 2
"""Value of `depth: auto`."""

CARD = Card(
    family="feed",
    does="prefetch copies the next batches while the step runs",
    answers={"h2d": 2},
    follows={"data_wait": 2},
    applies=on_gpu,
    tunes=Tunable(field="depth", values=lambda _space: (1, 2, 4), by_trial=True),
    batches_ready=lambda settings, _workers: 0 if settings is None else read_int(settings, "depth", AHEAD),
    plan_shows_refusal=True,
    loads_elsewhere=True,
)


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Batches ahead of the step, already on the device. Train loaders only."""

    enabled: bool = False
    depth: int | Literal["auto"] = AHEAD
    """Batches to keep on the device ahead of the current one."""
    uint8: bool | Literal["auto"] = "auto"
    """Copy pictures to the device as bytes, and do ToTensor and Normalize there, with bit-identical results; auto = if
    the dataset holds image files and no other code reads its batches before the step."""

    def __post_init__(self) -> None:
        why, do = "prefetching needs a depth of at least 1", "write 1 or more, or prefetch.enabled: false"
        require_positive("prefetch.depth", self.depth, why=why, do=do)

    def plan(self, facts: Facts) -> Change:
        """Request a device feed around the train loader."""
        if facts.device != "cuda":
            raise NotApplicable(f"needs CUDA; this run is on {facts.device}, where there is no copy to overlap")
        if facts.steps_with_iterator:
            raise NotApplicable("training_step(dataloader_iter) fetches and moves its own batches")
        if facts.loader is None:
            return Change(waits_for="the train loader", may_want=("feed.depth", "dataset.uint8"))
        if facts.loader.on_device:
            raise NotApplicable(f"{facts.loader.engine} makes the batches on the device, ahead of the step itself")
        if facts.loader.sampler_hazards and not facts.loader.num_workers:
            why = "; ".join(facts.loader.sampler_hazards)
            raise NotApplicable(f"prefetching would read the sampler too early: {why}")
        if facts.loader.changes_within and not facts.loader.num_workers:
            raise NotApplicable(f"prefetching would load too early: {'; '.join(facts.loader.changes_within)}")
        refuse_other_order(facts.loader, facts, "prefetch")
        notes = [*describe_sampler_draws(facts.loader)]
        if facts.loader.num_workers == 0 and facts.loader.draws_random:
            notes.append("samples are loaded early in this process: training_step gets different CPU random numbers")
        for held in () if facts.loader.num_workers else facts.loader.holds_training:
            notes.append(f"batches are made ahead of the step, so what they read from {held} may be out of date")
        for hook in facts.timed_hooks:
            notes.append(
                f"your {hook} draws random numbers or reads the step, and now runs before that step: both may differ"
            )
        parity: Parity = "approximate" if notes else "exact"
        wants: dict[str, Any] = {"feed.depth": AHEAD if self.depth == "auto" else self.depth}
        if self.uint8 is not False and (left := self._leave_to_device(facts, facts.loader, notes)):
            from fastloop.feeds.images.byte_batches import AsBytes

            wants["dataset.uint8"] = AsBytes(left)
        return Change(wants=wants, notes=tuple(notes), parity=parity)

    def _leave_to_device(self, facts: Facts, loader: LoaderFacts, notes: list[str]) -> tuple[str, ...]:
        """List the steps to move to the device; none if pictures stay floats, with a note if they are image files."""
        if (why := explain_no_bytes(facts, loader)) is None:
            steps = loader.images.steps if isinstance(loader.images, ImageFacts) else ()
            return tuple(type(step).__name__ for step in steps if isinstance(step, (ToFloat, Normalize)))
        if self.uint8 is True:
            raise NotApplicable(f"images cannot be sent as bytes: {why}; write prefetch.uint8: auto")
        if isinstance(loader.images, ImageFacts):
            notes.append(f"images are sent as floats: {why}")
        return ()

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if batches were copied on the side stream before the step requested them."""
        evidence = seen.evidence.get("prefetch", {})
        ahead, total = evidence.get("ahead_batches", 0), evidence.get("batches", 0)
        as_bytes = f"; {count} came as bytes" if (count := evidence.get("byte_batches")) else ""
        if not total:
            return Verdict(took=False, why="no batch was prefetched")
        if not evidence.get("copied_bytes"):
            return Verdict(took=False, why="the batches were already on the device: nothing to copy ahead")
        return Verdict(
            took=ahead > 0,
            why=f"{ahead} of {total} batches were on the device before the step needed them"
            f" ({evidence['copied_bytes'] / total / 2**20:.1f} MiB each){as_bytes}",
        )


def explain_no_bytes(facts: Facts, loader: LoaderFacts) -> str | None:
    """Return why pictures must be copied as floats; None if bytes work."""
    if facts.transfer_hooks:
        return f"your {facts.transfer_hooks[0]} expects the loader's own batches"
    if isinstance(loader.images, str):
        return loader.images
    if loader.engine is not None and "thread" not in loader.engine:  # threads read the dataset, like a DataLoader
        return f"{loader.engine} makes the batches"
    if loader.custom_collate or loader.own_iterator or not loader.auto_collates:
        return "your own code builds the batches, and may need floats"
    if loader.may_change:
        return f"the dataset may change between epochs, but batches come from a copy of it: {loader.may_change[0]}"
    return loader.images.explain_no_bytes()
