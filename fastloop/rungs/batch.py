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
from fastloop.feeds.windows import counted_in_steps, why_not_merged
from fastloop.measurement import Measurement
from fastloop.records import Change, Facts, Parity, Verdict


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Split a loader batch inside the step, or merge an accumulation window and then split it.

    *Split* (micro_batch smaller than the loader's batch): batch_idx, global_step, schedules, validation, checkpoints
    and batch callbacks see what they saw before. *Merge* (the Trainer accumulates smaller batches): each window
    becomes one loader batch, so whatever counted batches counts optimizer steps; the plan names it. What training_step
    logs is put together as its reduce_fx says: means by samples, sums added, extremes of the parts.
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
            if (reason := why_not_merged(facts, facts.loader)) is not None:
                raise NotApplicable(reason)
            notes += counted_in_steps(facts, facts.loader)
            return Change(parity=_parity(facts), notes=tuple(notes),
                          wants={"step.micro_batch": micro, "loader.window": window,
                                 "trainer.accumulate_grad_batches": 1},
                          # A short last batch is a piece of its own even where a window runs in one.
                          facts={"accumulate": 1, "micro_batches": True})  # fmt: skip
        if size is not None and micro >= size:
            raise NotApplicable(f"micro_batch={micro} with batches of {size} and no accumulation: a larger one would"
                                " change the global batch" if micro > size else
                                f"the loader's batches already have {size} samples")  # fmt: skip
        return Change(parity=_parity(facts), notes=tuple(notes), wants={"step.micro_batch": micro},
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
        if facts.batchnorms and self.micro_batch == 1:
            raise NotApplicable(f"BatchNorm needs more than one sample: {facts.batchnorms[0]}; write 2 or more")
        if facts.not_mean_losses and not self.loss_is_mean:
            raise NotApplicable(f"the loss is not a mean over samples: {', '.join(facts.not_mean_losses)};"
                                " if it is, write batch.loss_is_mean: true")  # fmt: skip

    def _notes(self, facts: Facts) -> list[str]:
        notes = ["a loss that compares samples of a batch (contrastive, in-batch negatives) or weighs tokens unequally"
                 " changes with the micro-batch: prove yours with fastloop ab"]  # fmt: skip
        if facts.batchnorms:
            names = ", ".join(facts.batchnorms[:3]) + (", …" if len(facts.batchnorms) > 3 else "")
            notes.append(f"{len(facts.batchnorms)} BatchNorm layers normalise over micro-batches of {self.micro_batch},"
                         f" which changes the training: {names}")  # fmt: skip
        return notes

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when steps ran in micro-batches other than the loader's own."""
        evidence: Any = seen.evidence.get("batch", {})
        if not evidence.get("steps"):
            return Verdict(took=False, why="no optimizer step ran")
        problem = evidence.get("problem")
        if not evidence["changed_steps"]:
            return Verdict(took=False, why=f"batches run whole: {problem or 'none was larger than micro_batch'}")
        sizes = "/".join(str(size) for size in evidence["micro_batches"][:4])
        why = f"{evidence['samples']} samples a loader batch ran as micro-batches of {sizes}"
        if problem:
            why += f"; {evidence['uncut_steps']} of {evidence['steps']} batches could not be cut: {problem}"
        return Verdict(took=True, why=why)


def _parity(facts: Facts) -> Parity:
    """BatchNorm's statistics are those of a micro-batch; all else is the same sum in another order."""
    return "changes-training" if facts.batchnorms else "approximate"
