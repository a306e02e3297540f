"""Run each optimizer step's batch in the micro-batches that suit the device; the global batch stays.

Faster because  larger micro-batches fill the device and launch fewer kernels; smaller ones make a batch fit.
Costs           activation memory of the larger micro-batch; one held gradient copy while a batch is split.
Don't use when  the loss compares samples with each other (contrastive, in-batch negatives) or is a sum.
Evidence        micro-batches and samples seen per optimizer step
Source          https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html (no_sync); accumulation arithmetic
                checked in tests/rungs/test_batch.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fastloop.errors import ConfigError, NotApplicable
from fastloop.records import Change, Facts, LoaderFacts, Measurement, Verdict


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Split a loader batch inside the step, or merge an accumulation window and then split it.

    *Split* (micro_batch smaller than the loader's batch): batch_idx, global_step, schedules, validation, checkpoints
    and batch callbacks see what they saw before. *Merge* (the Trainer accumulates smaller batches): each window
    becomes one loader batch, so whatever counted batches counts optimizer steps; the plan names it.
    """

    enabled: bool = False
    micro_batch: int | Literal["auto"] = "auto"
    """Samples per forward and backward pass. `auto` comes in a later version and is skipped until then."""
    global_batch: Literal["keep"] = "keep"
    """keep = the samples of each optimizer step stay what they were."""
    loss_is_mean: bool = field(default=False)
    """Your word that the loss is a mean over samples where the code looks otherwise."""

    def __post_init__(self) -> None:
        if isinstance(self.micro_batch, int) and self.micro_batch < 1:
            raise ConfigError(key="batch.micro_batch", got=f"batch.micro_batch={self.micro_batch}",
                              why="a micro-batch needs at least one sample", do="write a positive number")  # fmt: skip

    def plan(self, facts: Facts) -> Change:
        """Decide between split, merge and nothing to do."""
        self._refuse(facts)
        if facts.loader is None:
            return Change(waits_for="the train loader", facts={"micro_batches": True})
        assert isinstance(self.micro_batch, int)
        micro, size, window = self.micro_batch, facts.loader.batch_size, facts.accumulate
        notes = [*self._notes(facts)]
        if size is not None and micro > size and window > 1:
            _refuse_merge(facts, facts.loader)
            notes += _counts_steps(facts)
            split = micro < size * window
            return Change(parity="approximate", notes=tuple(notes),
                          wants={"step.micro_batch": micro, "loader.window": window,
                                 "trainer.accumulate_grad_batches": 1},
                          facts={"accumulate": 1, "micro_batches": split})  # fmt: skip
        if size is not None and micro >= size:
            raise NotApplicable(f"micro_batch={micro} with batches of {size} and no accumulation: a larger one would"
                                " change the global batch" if micro > size else
                                f"the loader's batches already have {size} samples")  # fmt: skip
        return Change(parity="approximate", notes=tuple(notes), wants={"step.micro_batch": micro},
                      facts={"micro_batches": True})  # fmt: skip

    def _refuse(self, facts: Facts) -> None:
        if self.micro_batch == "auto":
            raise NotApplicable("micro_batch: auto comes in a later version; write a number")
        if not facts.automatic_optimization:
            raise NotApplicable("manual optimization: the module runs its own backward passes")
        if not facts.plain_gradients:
            raise NotApplicable(f"{facts.strategy} keeps gradients of its own; only one device and DDP are supported")
        if facts.accumulation_scheduled:
            raise NotApplicable("a GradientAccumulationScheduler changes the accumulation during training; it wins")
        if facts.averages_weights_by_swa:
            raise NotApplicable("StochasticWeightAveraging runs an extra epoch with the backward switched off; it wins")
        if facts.steps_with_iterator:
            raise NotApplicable("training_step(dataloader_iter) fetches its own batches")
        if facts.grad_hooks:
            raise NotApplicable("parameters carry post-accumulate gradient hooks, which would run once a micro-batch")
        if facts.not_mean_losses and not self.loss_is_mean:
            raise NotApplicable(f"the loss is not a mean over samples: {', '.join(facts.not_mean_losses)};"
                                " if it is, write batch.loss_is_mean: true")  # fmt: skip

    def _notes(self, facts: Facts) -> list[str]:
        notes = ["a loss that compares samples of a batch (contrastive, in-batch negatives) or weighs tokens unequally"
                 " changes with the micro-batch: prove yours with fastloop ab"]  # fmt: skip
        if facts.batchnorms:
            names = ", ".join(facts.batchnorms[:3]) + (", …" if len(facts.batchnorms) > 3 else "")
            notes.append(f"{len(facts.batchnorms)} BatchNorm layers see micro-batches of {self.micro_batch}: {names}")
        return notes

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when the steps ran in micro-batches other than the loader's own."""
        evidence: Any = seen.evidence.get("batch", {})
        if evidence.get("problem"):
            return Verdict(took=False, why=evidence["problem"])
        if not evidence.get("steps"):
            return Verdict(took=False, why="no optimizer step ran")
        sizes = "/".join(str(size) for size in evidence["micro_batches"][:4])
        changed = evidence["merged_batches"] > 1 or len(evidence["micro_batches"]) > 1
        return Verdict(took=changed, why=f"{evidence['samples']} samples a loader batch ran as micro-batches of {sizes}")


def _refuse_merge(facts: Facts, loader: LoaderFacts) -> None:
    """Refuse what cannot become one loader batch per accumulation window."""
    if not loader.is_dataloader or not loader.map_style or not loader.auto_collates:
        raise NotApplicable(f"{loader.kind} hands out ready batches, so an accumulation window cannot be merged;"
                            " a micro_batch smaller than the batch can still be split")  # fmt: skip
    if loader.stateful:
        raise NotApplicable(f"{loader.kind} keeps its own position for resuming, which merging would shift")
    if loader.batches is not None and loader.batches < facts.accumulate:
        raise NotApplicable(f"an epoch has {loader.batches} batches, fewer than the {facts.accumulate} of one window:"
                            " accumulation is already cut short; lower accumulate_grad_batches")  # fmt: skip
    interval = facts.val_check_interval
    if isinstance(interval, int) and interval % facts.accumulate:
        raise NotApplicable(f"val_check_interval={interval} is not a multiple of accumulate_grad_batches="
                            f"{facts.accumulate}: validation would move; write a multiple")  # fmt: skip


def _counts_steps(facts: Facts) -> list[str]:
    """What counted batches and now counts optimizer steps, each by name."""
    window = facts.accumulate
    notes = [f"batch_idx and on_train_batch_* now count optimizer steps: one call for every {window} batches"]
    if isinstance(facts.val_check_interval, int):
        notes.append(f"val_check_interval {facts.val_check_interval} batches = {facts.val_check_interval // window} steps")
    elif facts.val_check_interval not in (None, 1.0):
        notes.append(f"val_check_interval {facts.val_check_interval} is rounded to whole windows of {window} batches")
    if facts.limit_train_batches not in (None, 1.0):
        notes.append(f"limit_train_batches {facts.limit_train_batches} still means the loader's own batches")
    notes.append("scheduler frequencies that count batches are divided to count steps")
    return notes
