"""Use the micro-batch that suits the device; the global batch stays the same.

Faster because  larger micro-batches fill the device and launch fewer kernels; smaller ones make a batch fit.
Costs           activation memory of the larger micro-batch; one held gradient copy while a batch is split.
Don't use when  the loss compares samples with each other (contrastive, in-batch negatives) or is a sum.
Evidence        micro-batches and samples seen per optimizer step; BatchNorm layers that kept merged batches apart
Source          https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html (no_sync); accumulation arithmetic
                checked in tests/rungs/test_batch.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from fastloop.errors import NotApplicable, require_positive
from fastloop.feeds.accumulation_windows import explain_no_merge, explain_no_regrouping, list_changed_counts
from fastloop.records.card import DEVICE, Card, ClimbState, SearchSpace, Tunable, Variant
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Parity, Site, Verdict
from fastloop.records.readings import micro_batches

MOST_TIMES_LARGER = 8
"""A micro-batch is not proposed to grow by more than this at once: its activations have to fit."""


def _larger(seen: Measurement) -> dict[str, Any]:
    """The whole of an optimizer step in one micro-batch, or as much of it as is likely to fit."""
    assert seen.micro_batch
    return {"enabled": True, "micro_batch": seen.micro_batch * min(micro_batches(seen), MOST_TIMES_LARGER)}


def _sizes(space: SearchSpace) -> Iterable[int]:
    """Whole loader batches that divide the step."""
    window = space.batches_per_step
    return [space.micro_batch * count for count in range(2, window + 1) if window % count == 0]


def _variants(state: ClimbState) -> Iterator[Variant]:
    """The whole step in one micro-batch, or half of it where that does not fit."""
    whole, micro = state.rank_batch, state.micro_batch
    if whole is None or micro is None or whole <= micro:
        refused = "a step is one micro-batch already: a larger one would change the global batch"
        yield Variant(settings=(), refused=refused)
        return
    sizes = [size for size in (whole, whole // 2) if size > micro and not size % micro]
    settings = tuple({"micro_batch": size} for size in sizes)
    yield Variant(settings=settings, every=False, tune=whole >= 4 * micro)


CARD = Card(
    family="fill",
    does="larger micro-batches at the same global batch launch fewer and larger kernels",
    evidence={"changed_steps": 0},
    answers={"launch_bound": 1, "tiny_step": 1, "small_kernels": 1, DEVICE: 4},
    follows={"memory_bound": 5, "fp32_math": 5, "compute_bound": 4},
    applies=lambda seen: micro_batches(seen) > 1,
    patch=_larger,
    variants=_variants,
    tunes=Tunable(
        field="micro_batch",
        values=_sizes,
        tolerance=0.01,
        trained="replayed",
        without=lambda space: space.micro_batch,
        no_values="an optimizer step has one loader batch, so there is nothing to merge",
    ),
    regroups=True,
)
"""What other files know of this rung."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Split a loader batch inside the step, or merge an accumulation window and then split it.

    *Split* (micro_batch smaller than the loader's batch): batch_idx, global_step, schedules, validation, checkpoints
    and batch callbacks see what they saw before. *Merge* (the Trainer accumulates smaller batches): the batches of a
    window, collated as ever, are put together, so whatever counted batches counts optimizer steps; the plan names it.
    Batches that cannot be put together run one by one, and so do all where the first window's gradient becomes another.
    What training_step logs is put together as its reduce_fx says: means by samples, sums added, extremes of the parts.
    """

    enabled: bool = False
    micro_batch: int | Literal["auto"] = "auto"
    """Samples per forward and backward pass. `auto` comes in a later version and is skipped until then."""
    global_batch: Literal["keep"] = "keep"
    """keep = the samples of each optimizer step stay what they were."""
    batch_norm: Literal["groups", "merge"] = "groups"
    """groups = where batches are merged, BatchNorm keeps the statistics of each. merge = it takes all of them as one,
    which is less work and another training."""
    loss_is_mean: bool = field(default=False)
    """Your word that the loss is a mean over samples where the code, or the first window's gradient, says otherwise."""

    def __post_init__(self) -> None:
        why = "a micro-batch needs at least one sample"
        require_positive("batch.micro_batch", self.micro_batch, why=why, do="write a positive number")

    def plan(self, facts: Facts) -> Change:
        """Decide between split, merge and nothing to do."""
        self._refuse(facts)
        if facts.loader is None:
            keys = ("step.micro_batch", "loader.window")
            return Change(waits_for="the train loader", may_want=keys, facts={"micro_batches": True})
        assert isinstance(self.micro_batch, int)
        micro, size, window = self.micro_batch, facts.loader.batch_size, facts.accumulate
        wants: dict[str, Any] = {}
        after: dict[str, Any] = {"micro_batches": True}
        merges = size is not None and micro > size and window > 1
        groups = merges and self.batch_norm == "groups" and bool(facts.batchnorms) and not facts.other_batchnorms
        notes = self._notes(facts, groups=groups)
        if size is not None and merges:
            if (reason := explain_no_merge(facts, facts.loader)) is not None:
                raise NotApplicable(reason)
            if groups:
                micro = self._round_down(size, notes)
                wants["step.batch_norm"] = "groups"
            wants |= {"loader.window": window, "trainer.accumulate_grad_batches": 1}
            if self.loss_is_mean:
                wants["step.loss_is_mean"] = True
            after["accumulate"] = 1  # a short last batch is a piece of its own even where a window runs in one
            notes += list_changed_counts(facts, facts.loader)
        elif size is not None and micro > size:
            none = f"micro_batch={micro} with batches of {size} and no accumulation"
            raise NotApplicable(f"{none}: a larger one would change the global batch")
        elif micro == size:
            raise NotApplicable(f"the loader's batches already have {size} samples")
        # BatchNorm's statistics are those of a micro-batch; all else is the same sum in another order.
        parity: Parity = "changes-training" if facts.batchnorms and not groups else "approximate"
        actions = (Action(keys=("model.batch_norm",), when="train_start", do=_group_norms),) if groups else ()
        wants["step.micro_batch"] = micro
        return Change(parity=parity, notes=tuple(notes), wants=wants, actions=actions, facts=after)

    def _round_down(self, size: int, notes: list[str]) -> int:
        """The largest micro-batch that holds whole batches of `size`, and several of them."""
        assert isinstance(self.micro_batch, int)
        if self.micro_batch < 2 * size:
            raise NotApplicable(
                f"micro_batch={self.micro_batch} holds one whole batch of {size}, and BatchNorm keeps the statistics of"
                f" whole batches: write {2 * size} or more, or batch_norm: merge"
            )
        micro = self.micro_batch // size * size
        if micro != self.micro_batch:
            notes.append(f"micro_batch {self.micro_batch} is taken as {micro}, whole batches of {size} for BatchNorm")
        return micro

    def _refuse(self, facts: Facts) -> None:
        if self.micro_batch == "auto":
            raise NotApplicable("micro_batch: auto does not exist yet; write a number")
        if (reason := explain_no_regrouping(facts)) is not None:
            raise NotApplicable(reason)
        if facts.batchnorms and self.micro_batch == 1:
            raise NotApplicable(f"BatchNorm needs more than one sample: {facts.batchnorms[0]}; write 2 or more")
        if facts.not_mean_losses and not self.loss_is_mean:
            raise NotApplicable(
                f"the loss is not a mean over samples: {', '.join(facts.not_mean_losses)};"
                " if it is, write batch.loss_is_mean: true"
            )

    def _notes(self, facts: Facts, *, groups: bool) -> list[str]:
        notes = [
            "a loss that compares samples of a batch (contrastive, in-batch negatives) or weighs tokens unequally"
            " changes with the micro-batch: prove yours with fastloop ab"
        ]
        if facts.batchnorms:
            names = ", ".join(facts.batchnorms[:3]) + (", …" if len(facts.batchnorms) > 3 else "")
            changes = f"normalise over micro-batches of {self.micro_batch}, which changes the training"
            if facts.loader and isinstance(self.micro_batch, int) and self.micro_batch < (facts.loader.batch_size or 0):
                changes += f" and cannot be helped below your batches of {facts.loader.batch_size}"
            told = "keep the statistics of each of your batches" if groups else changes
            notes.append(f"{len(facts.batchnorms)} BatchNorm layers {told}: {names}")
            if facts.other_batchnorms and self.batch_norm == "groups":
                other = facts.other_batchnorms[0]
                notes.append(
                    f"{other} is synchronized or no BatchNorm of torch's, so batches cannot be kept apart in it"
                )
        return notes

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when steps ran in micro-batches other than the loader's own."""
        evidence: Any = seen.evidence.get("batch", {})
        if not evidence.get("steps"):
            return Verdict(took=False, why="no optimizer step ran")
        problem, apart = evidence.get("problem"), evidence.get("apart_steps")
        if apart and not evidence["changed_steps"]:
            why = f"windows run batch by batch: {evidence['apart_why']}; hooks still see one batch a window"
            return Verdict(took=False, why=why)
        if not evidence["changed_steps"]:
            return Verdict(took=False, why=f"batches run whole: {problem or 'none was larger than micro_batch'}")
        sizes = "/".join(str(size) for size in evidence["micro_batches"][:4])
        why = f"{evidence['samples']} samples a loader batch ran as micro-batches of {sizes}"
        if norms := evidence.get("grouped_norms"):
            why += f"; {norms} BatchNorm layers kept up to {evidence['groups']} batches apart"
        if problem:
            why += f"; {evidence['uncut_steps']} of {evidence['steps']} batches could not be cut: {problem}"
        if apart:
            why += f"; {apart} of {evidence['steps']} windows run batch by batch: {evidence['apart_why']}"
        return Verdict(took=True, why=why)


def _group_norms(site: Site) -> Applied:
    from fastloop.feeds.batch_norm.groups import group_forwards

    undo = group_forwards(site.module, site.groups)
    return Applied(undo=undo, probe=lambda: {"grouped_norms": len(site.groups.norms), "groups": site.groups.most})
