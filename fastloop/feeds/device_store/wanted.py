"""The want that keeps pictures on the device, and when a rung may use it. Imports torch only when used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from fastloop.errors import NotApplicable
from fastloop.evidence.worker_limits import LITTLE_SHM_BYTES, count_draws
from fastloop.records.facts import Facts, LoaderFacts, format_bytes
from fastloop.records.images import (
    CenterCrop,
    ImageFacts,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToFloat,
    ToTensor,
)
from fastloop.records.plan import Change, Parity

ONCE, EACH_TIME = (Resize, CenterCrop), (RandomCrop, RandomHorizontalFlip)
"""Steps applied once when a picture is decoded, and steps that the device applies in each batch, in any order. A random
resized crop must come before all of these."""

SHARE = 0.25
"""Share of the device's free memory that pictures may take, measured before there are any activations."""


@dataclass(frozen=True, kw_only=True)
class CheckedEngine:
    """A want ``loader.engine`` whose engine is made when it is checked, and then used."""

    device: str
    """Device type; the process's current device of this type is used."""
    most_bytes: int | None = None
    """Most memory for samples; None for a share of the memory that is free at that time."""
    live: list[Any] = field(default_factory=list, compare=False, repr=False, metadata={"json": None})
    """The engine that `check` made, until `make` takes it."""

    def check(self, loader: Any, say: Callable[[str], None] = lambda _line: None) -> Mapping[str, Any]:
        """Make the engine and test it.

        Raises:
            NotApplicable: the samples do not fit, or a batch differs from the user's dataset.
        """
        self.live[:] = [engine := self._start(loader, say)]
        found: Mapping[str, Any] = engine.evidence()
        return found

    def make(self, loader: Any) -> Any:
        """Return the engine for this loader, which is the checked one, or our copy of it."""
        if not self.live:
            self.check(loader)
        engine = self.live.pop()
        engine.loader = loader
        return engine

    def _start(self, loader: Any, say: Callable[[str], None]) -> Any:
        raise NotImplementedError

    def _find_most(self, share: float) -> int:
        return int(share * measure_free(self.device)) if self.most_bytes is None else self.most_bytes


@dataclass(frozen=True, kw_only=True)
class PicturesOnDevice(CheckedEngine):
    """The want for a store of pictures on the device."""

    workers: int = 0
    """Processes that decode."""

    def _start(self, loader: Any, say: Callable[[str], None]) -> Any:
        import torch

        from fastloop.feeds.device_store.engine import make_engine

        device, most = torch.device(self.device), self._find_most(SHARE)
        return make_engine(loader, device, most_bytes=most, workers=self.workers, say=say)


def measure_free(device: str) -> int:
    """Return the free memory, in bytes, of the current device of this type."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)


def plan_on_device(facts: Facts, loader: LoaderFacts, most_bytes: int | None = None) -> Change:
    """Plan the change of a rung that keeps this loader's pictures on the device.

    Raises:
        NotApplicable: batches made there might differ from the loader's.
    """
    if (why := explain_no_engine(facts, loader)) is not None:
        raise NotApplicable(f"images cannot be kept on the device: {why}")
    little_shm = facts.shm_free_bytes is not None and facts.shm_free_bytes < LITTLE_SHM_BYTES
    workers = 0 if loader.worker_hazards or little_shm else facts.cpu_count // max(1, facts.local_ranks)
    want = PicturesOnDevice(device=facts.device, most_bytes=most_bytes, workers=workers if workers > 1 else 0)
    assert isinstance(loader.images, ImageFacts)
    room = f"{SHARE:.0%} of what is free there" if most_bytes is None else format_bytes(most_bytes)
    notes = [f"decodes all {loader.images.count:,} samples once and keeps them on the device, in at most {room}"]
    parity: Parity = "exact"
    if loader.num_workers and loader.draws_random:
        parity = "approximate"
        notes.append(
            f"your {loader.num_workers} workers are not started: crops and flips are drawn as without workers (with"
            " workers they would differ on every run)"
        )
    there = facts.device == "cuda"
    elsewhere = dataclasses.replace(loader, engine="an image store", on_device=there, num_workers=0)
    return Change(wants={"loader.engine": want}, parity=parity, notes=tuple(notes), facts={"loader": elsewhere})


def explain_no_engine(facts: Facts, loader: LoaderFacts) -> str | None:
    """Return why batches cannot be made on the device; None if they can."""
    if isinstance(loader.images, str):
        return loader.images
    if (why := explain_own_batches(facts, loader)) is not None:
        return why
    if facts.reload_every_n_epochs:
        return "the Trainer reloads its loaders, and all images would be decoded again"
    if facts.device == "cpu" and any(isinstance(step, RandomResizedCrop) for step in loader.images.steps):
        return "this run is on cpu, where Pillow resizes faster"
    draws = count_draws(loader, facts)
    if facts.weighs_costs and draws is not None and draws <= loader.images.count:
        return f"the run draws {draws:,} samples from {loader.images.count:,}: too few repeats to pay off"
    names = {type(step).__name__ for step in loader.images.steps}
    if strange := [name for name in loader.draws_random if name not in names]:
        return f"{strange[0]} also draws random numbers"
    return explain_no_steps(loader.images)


def explain_own_batches(facts: Facts, loader: LoaderFacts) -> str | None:
    """Return why only the loader itself can make its batches, whatever its samples are; None if an engine can."""
    if facts.device not in ("cuda", "cpu"):
        return f"this run is on {facts.device}"
    if facts.steps_with_iterator:
        return "training_step(dataloader_iter) fetches its own batches"
    if facts.transfer_hooks:
        return f"your {facts.transfer_hooks[0]} needs batches before they are on the device"
    if loader.engine is not None:
        return f"{loader.engine} already loads the samples"
    if loader.custom_collate or loader.own_iterator or not loader.auto_collates or loader.stateful:
        return "your code builds the batches or tracks their position"
    if loader.may_change:
        return f"the dataset may change between epochs: {loader.may_change[0]}"
    return loader.sampler_hazards[0] if loader.sampler_hazards else None


def explain_no_steps(images: ImageFacts) -> str | None:
    """Return why the device cannot do these steps with the same bits; None if it can."""
    if (why := images.explain_no_bytes()) is not None:
        return why
    allowed: tuple[type, ...] = (*ONCE, RandomResizedCrop)
    are_tensors, crops = False, 0
    for step in images.steps:
        if isinstance(step, (ToTensor, ToFloat, Normalize)):
            are_tensors = True
            continue
        if isinstance(step, RandomResizedCrop) and (are_tensors or step.interpolation != "bilinear"):
            return "RandomResizedCrop matches Pillow on the device only for bilinear interpolation"
        if not isinstance(step, (*allowed, *EACH_TIME)):
            return f"{type(step).__name__} in that position cannot be done on the device bit for bit"
        if not isinstance(step, ONCE):
            allowed = ()
        crops += isinstance(step, (RandomCrop, RandomResizedCrop))
    return "it crops twice" if crops > 1 else None
