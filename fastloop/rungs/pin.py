"""Put batches into page-locked host memory before they go to the device.

Faster because  the copy engine reads pinned memory itself; pageable memory is first copied into a pinned buffer.
Costs           pinned host memory for the batches in flight; one thread in the training process.
Don't use when  there is no CUDA device, or the batches are made on the device.
Evidence        share of the batch's tensors that were pinned when they were copied to the device
Source          https://docs.pytorch.org/docs/stable/data.html#memory-pinning
"""

from __future__ import annotations

from dataclasses import dataclass

from fastloop.errors import NotApplicable
from fastloop.records.card import Card
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Verdict
from fastloop.records.readings import on_gpu, read_loader

CARD = Card(
    family="feed",
    does="pinned memory lets the copy engine read it directly",
    answers={"h2d": 1},
    follows={"data_wait": 3},
    applies=lambda seen: (
        on_gpu(seen) and read_loader(seen).get("num_workers") is not None and not read_loader(seen).get("pin_memory")
    ),
    plan_shows_refusal=True,
)


@dataclass(frozen=True, kw_only=True)
class Pin:
    """The loader's own ``pin_memory``, for CUDA runs."""

    enabled: bool = False

    def plan(self, facts: Facts) -> Change:
        """Request ``pin_memory`` if it can have an effect and is not already on."""
        if facts.device != "cuda":
            raise NotApplicable(f"needs CUDA; this run is on {facts.device}, where nothing is copied to a device")
        if facts.loader is None:
            return Change(waits_for="the train loader", may_want=("loader.pin_memory",))
        if not facts.loader.is_dataloader:
            raise NotApplicable(f"{facts.loader.kind} is not a DataLoader: pin its batches where you create them")
        if facts.loader.on_device:
            raise NotApplicable(f"{facts.loader.engine} makes the batches on the device: there is no copy")
        if facts.loader.pin_memory:
            raise NotApplicable("the loader already pins its memory")
        return Change(wants={"loader.pin_memory": True})

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if tensors arrived pinned; a custom batch type without ``pin_memory()`` has none."""
        evidence = seen.evidence.get("pin", {})
        if "pinned_tensors" not in evidence:
            return Verdict(took=None, why="no batch was copied to the device")
        pinned, total = evidence["pinned_tensors"], evidence["tensors"]
        if not total:
            return Verdict(took=None, why=f"a {evidence['batch_type']} has no tensors to pin")
        if not pinned:
            why = f"none of the {total} tensors of a {evidence['batch_type']} was pinned; give it a pin_memory() method"
            return Verdict(took=False, why=why)
        return Verdict(took=True, why=f"{pinned} of {total} tensors of each batch were pinned")
