"""Choose the micro-batch size that suits the device; the global batch stays the same.

Faster because  larger micro-batches fill the device and launch fewer kernels; smaller ones make a batch fit.
Costs           activation memory of the larger micro-batch; an extra copy of the gradients while a batch is split.
                `auto`: about ten steps' time, once per model and machine.
Don't use when  the loss compares samples with each other (contrastive, in-batch negatives) or is a sum: fastloop
                sees this in the first step's gradient, and then leaves batches as they are.
Evidence        micro-batches and samples per optimizer step; BatchNorm layers that kept merged batches separate
Source          https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html (no_sync); accumulation arithmetic
                checked in tests/rungs/test_batch.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastloop.errors import ConfigError, NotApplicable, require_positive
from fastloop.feeds.accumulation_windows import LEAST_STEPS, count_steps, explain_no_regrouping
from fastloop.feeds.regrouped_steps import judge_regrouping, plan_step
from fastloop.records.card import DEVICE, Card, ClimbState, SearchSpace, Tunable, Variant
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Site, Verdict
from fastloop.records.readings import count_micro_batches

MOST_TIMES_LARGER = 8
"""Largest proposed growth of a micro-batch in one step, since its activations must fit."""


def _enlarge(seen: Measurement) -> dict[str, Any]:
    """Propose a whole optimizer step as one micro-batch, or as much of it as is likely to fit."""
    assert seen.micro_batch
    return {"enabled": True, "micro_batch": seen.micro_batch * min(count_micro_batches(seen), MOST_TIMES_LARGER)}


def _list_sizes(space: SearchSpace) -> Iterable[int]:
    """List the multiples of a loader batch that divide the step evenly."""
    window = space.batches_per_step
    return [space.micro_batch * count for count in range(2, window + 1) if window % count == 0]


def _list_variants(state: ClimbState) -> Iterator[Variant]:
    """Try the whole step as one micro-batch, or half of it if that does not fit."""
    whole, micro = state.rank_batch, state.micro_batch
    if whole is None or micro is None or whole <= micro:
        refused = "a step is already one micro-batch: a larger one would change the global batch"
        yield Variant(settings=(), refused=refused)
        return
    settings = tuple({"micro_batch": size} for size in (whole, whole // 2) if size > micro and not size % micro)
    yield Variant(settings=settings, every=False, tune=whole >= 4 * micro)


CARD = Card(
    family="fill",
    does="larger micro-batches at the same global batch launch fewer and larger kernels",
    answers={"launch_bound": 1, "tiny_step": 1, "small_kernels": 1, DEVICE: 4},
    follows={"memory_bound": 5, "fp32_math": 5, "compute_bound": 4},
    applies=lambda seen: count_micro_batches(seen) > 1,
    patch=_enlarge,
    variants=_list_variants,
    tunes=Tunable(
        field="micro_batch",
        values=_list_sizes,
        tolerance=0.01,
        trained="replayed",
        without=lambda space: space.micro_batch,
        no_values="an optimizer step has one loader batch, so there is nothing to merge",
    ),
    regroups=True,
)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Split a loader batch inside the step, or merge an accumulation window and then split it.

    *Split* (micro_batch smaller than the loader's batch): batch_idx, global_step, schedules, validation, checkpoints
    and batch callbacks see what they saw before. *Merge* (the Trainer accumulates smaller batches): the batches of an
    accumulation window are collated as before and then concatenated, so whatever counted batches now counts optimizer
    steps; the plan names what changes. Batches that cannot be concatenated run one by one, and all batches do if
    merging changes the gradient of a window that is compared. Values logged in training_step are combined as their
    reduce_fx says: means over samples or tokens, sums, extremes.
    """

    enabled: bool = False
    micro_batch: int | Literal["auto"] = "auto"
    """Samples per forward and backward pass. auto = the fastest that fits, tried on the first step's own samples."""
    target_memory: float = 0.9
    """For auto: share of the device's memory that may be used, including the optimizer's state."""
    global_batch: int | Literal["keep"] = "keep"
    """Samples in each optimizer step over all ranks; keep = unchanged. A number changes the training."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How to scale learning rates with a new global batch: by its ratio to the old one, or by the ratio's root."""
    batch_norm: Literal["groups", "merge"] = "groups"
    """groups = in merged batches, BatchNorm keeps separate statistics for each of your batches. merge = it treats them
    as one, which is less work but changes the training."""
    loss_is_mean: bool = False
    """Your assurance that the loss is a mean over samples, although the code or the first window's gradient suggests
    otherwise."""

    def __post_init__(self) -> None:
        why = "a micro-batch needs at least one sample"
        require_positive("batch.micro_batch", self.micro_batch, why=why, do="write a positive number")
        require_positive("batch.global_batch", self.global_batch, why="a step needs samples", do="write keep")
        if not 0 < self.target_memory <= 1:
            key = "batch.target_memory"
            raise ConfigError(key=key, got=f"{key}={self.target_memory}", why="it must be a fraction", do="write 0.9")
        if self.lr_scaling != "none" and self.global_batch == "keep":
            got, do = f"batch.lr_scaling={self.lr_scaling}", "write batch.global_batch as well"
            raise ConfigError(key="batch.lr_scaling", got=got, why="the global batch is unchanged", do=do)

    def plan(self, facts: Facts) -> Change:
        """Decide between split, merge and nothing to do."""
        self._refuse(facts)
        if facts.loader is None:
            keys = ("step.micro_batch", "loader.window", "trainer.accumulate_grad_batches")
            return Change(waits_for="the train loader", may_want=keys, facts={"micro_batches": True})
        change, factor = plan_step(
            facts,
            facts.loader,
            self.global_batch,
            self.lr_scaling,
            micro=self.micro_batch,
            batch_norm=self.batch_norm,
        )
        wants, actions = dict(change.wants), []
        wants |= {"step.target_memory": self.target_memory} if self.micro_batch == "auto" else {}
        wants |= {"step.loss_is_mean": True} if self.loss_is_mean else {}
        if "step.batch_norm" in wants:
            actions.append(Action(keys=("model.batch_norm",), when="train_start", do=_group_norms))
        if factor != 1:
            scale = partial(_scale_rates, factor)
            actions.append(Action(keys=("optimizer.rates",), when="train_start", do=scale))
        return dataclasses.replace(change, wants=wants, actions=tuple(actions))

    def _refuse(self, facts: Facts) -> None:
        if (reason := explain_no_regrouping(facts)) is not None:
            raise NotApplicable(reason)
        if "batch" in facts.by_ladder:
            _refuse_by_ladder(facts, searches=self.micro_batch == "auto")
        if facts.batchnorms and self.micro_batch == 1:
            raise NotApplicable(f"BatchNorm needs more than one sample: {facts.batchnorms[0]}; write 2 or more")
        if facts.not_mean_losses and not self.loss_is_mean:
            losses, word = ", ".join(facts.not_mean_losses), "if it is one, write batch.loss_is_mean: true"
            raise NotApplicable(f"the loss does not look like a mean over samples: {losses}; {word}")

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if micro-batches differed from the loader's batches, or steps had `global_batch`
        samples."""
        verdict = judge_regrouping(seen.evidence.get("batch", {}))
        if verdict.took and (larger := _find_larger(seen)) is not None:
            peak, room = seen.peak_gib, seen.evidence["batch"]["room_gib"]
            more = f"since the other rungs started, a step takes {peak:.1f} of {room:.1f} GiB: rungs.batch.micro_batch:"
            verdict = dataclasses.replace(verdict, why=f"{verdict.why}; {more} {larger} may fit now")
        if seen.global_batch != self.global_batch:
            return verdict
        return Verdict(took=True, why=f"each optimizer step had {self.global_batch} samples; {verdict.why}")


def _find_larger(seen: Measurement) -> int | None:
    """Twice the size that a search found before the other rungs started, if memory limited it then and no longer does;
    else None."""
    found = seen.evidence["batch"]
    size, room_gib = found.get("micro_batch"), found.get("room_gib")
    if not (size and room_gib and seen.peak_gib) or 2 * size > found["samples"] or 2 * seen.peak_gib > room_gib:
        return None
    return int(2 * size)


def _group_norms(site: Site) -> Applied:
    from fastloop.feeds.batch_norm.groups import group_forwards

    undo = group_forwards(site.module, site.groups)
    return Applied(undo=undo, probe=lambda: {"grouped_norms": len(site.groups.norms), "groups": site.groups.most})


def _refuse_by_ladder(facts: Facts, *, searches: bool) -> None:
    """Raise NotApplicable if there is nothing to merge, the user's own code would notice, or no time for a search."""
    by_name = "if that is fine, write rungs.batch.enabled: true yourself"
    if facts.accumulate == 1:
        raise NotApplicable("an optimizer step is one batch, so there is nothing to merge")
    if facts.counts_batches:
        raise NotApplicable(f"{facts.counts_batches[0]} would see fewer and larger batches; {by_name}")
    steps = count_steps(facts)
    if searches and facts.weighs_costs and steps is not None and steps < LEAST_STEPS:
        raise NotApplicable(f"this run is too short to search for a micro-batch: {steps} steps")


def _scale_rates(factor: float, site: Site) -> Applied:
    return Applied(undo=site.scale_rates(factor))
