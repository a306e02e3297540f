"""Plans an optimizer step in micro-batches that differ from the loader's batches, and judges its evidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from fastloop.errors import NotApplicable
from fastloop.feeds.accumulation_windows import explain_no_merge, list_changed_counts
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.plan import Change, Parity, Verdict, say_count

RATES: Mapping[str, Callable[[float], float]] = {"none": lambda _ratio: 1.0, "linear": float, "sqrt": math.sqrt}
"""Factors for learning rates, as functions of the ratio of global batch sizes."""
NOTE = (
    "the first step's gradient decides whether batches are regrouped: they are left as they are if the loss compares"
    " samples (contrastive, in-batch negatives)"
)
Size = int | Literal["auto"]


def count_window(facts: Facts, loader: LoaderFacts, samples: int) -> int:
    """Count the loader batches in an optimizer step of `samples` samples over all ranks.

    Raises:
        NotApplicable: whole batches do not add up to it.
    """
    if loader.batch_size is None:
        raise NotApplicable(f"global_batch={samples}: {loader.kind} does not say how many samples a batch has")
    each = loader.batch_size * facts.world_size
    if samples % each:
        near = max(each, round(samples / each) * each)
        ranks = f" on each of {facts.world_size} ranks" if facts.world_size > 1 else ""
        raise NotApplicable(f"global_batch={samples} must be a multiple of {loader.batch_size}{ranks}: write {near}")
    return samples // each


def plan_step(
    facts: Facts,
    loader: LoaderFacts,
    samples: int | Literal["keep"],
    scaling: str,
    *,
    micro: Size,
    batch_norm: str,
) -> tuple[Change, float]:
    """Run `plan_regrouping` for `samples` samples per step over all ranks; also return the learning-rate factor."""
    window = facts.accumulate if samples == "keep" else count_window(facts, loader, samples)
    if samples == "keep" or window == facts.accumulate:
        return plan_regrouping(facts, loader, micro=micro, batch_norm=batch_norm), 1.0
    regrouped = dataclasses.replace(facts, accumulate=window)
    change = plan_regrouping(regrouped, loader, micro=micro, batch_norm=batch_norm, idle_is_fine=True)
    factor = RATES[scaling](window / facts.accumulate)
    rates = "as they are" if scaling == "none" else f"multiplied by {factor:g} ({scaling})"
    if facts.resuming:
        rates, factor = "those of the checkpoint", 1.0
    before = samples * facts.accumulate // window
    loud = f"DIFFERENT TRAINING: an optimizer step has {samples} samples instead of {before}; learning rates {rates}"
    wants = {"trainer.accumulate_grad_batches": window, **change.wants}
    steps = f"max_steps and schedules still count steps, each of {window / facts.accumulate:g} times the samples"
    notes = (loud, steps, *change.notes)
    return dataclasses.replace(change, parity="changes-training", wants=wants, notes=notes), factor


def plan_regrouping(
    facts: Facts, loader: LoaderFacts, *, micro: Size, batch_norm: str, idle_is_fine: bool = False
) -> Change:
    """Plan a step in micro-batches of `micro` samples, or of a size that its first run finds.

    Args:
        batch_norm: ``groups`` normalizes each of the user's batches separately, ``merge`` all samples together.
        idle_is_fine: do not raise if the loader's batches already have the right size.

    Raises:
        NotApplicable: there is nothing to do, or it cannot be done.
    """
    size, window, notes = loader.batch_size, facts.accumulate, [NOTE]
    merges = window > 1 and (micro == "auto" or size is None or micro > size)
    unmerged = explain_no_merge(facts, loader) if merges else None
    if unmerged is not None:
        if micro != "auto" and size is not None:
            raise NotApplicable(unmerged)
        merges = False
        notes.append(f"batches are not merged: {unmerged}")
    norms = bool(facts.batchnorms)
    groups = merges and batch_norm == "groups" and norms and not facts.other_batchnorms
    wants: dict[str, Any] = {} if unmerged is None else {"step.unmerged": unmerged}
    changes = norms and not groups
    if micro == "auto":
        _check_choice(facts, loader, merges=merges, unmerged=unmerged, groups=groups, batch_norm=batch_norm)
        wants["step.whole_batches"] = norms
        notes.append(
            "auto: the first step tries micro-batch sizes on its own samples and keeps the fastest, which may be yours;"
            " when longer samples come, the size is tried on them first, and reduced if it does not fit"
        )
    elif size is not None and not merges and not (idle_is_fine and micro >= size):
        _check_size(size, micro)
    if size is not None and merges and groups and micro != "auto":
        micro = _round_down(micro, size, notes)
    if norms:
        notes += _list_norm_notes(facts, loader, micro, groups=groups, batch_norm=batch_norm)
    if facts.precision in ("bf16-true", "16-true") and not merges:
        notes.append(f"gradients accumulate in {facts.precision}: many small ones are lost; bf16-mixed keeps them")
    after: dict[str, Any] = {"micro_batches": True}
    if merges:
        wants |= {"loader.window": window, "trainer.accumulate_grad_batches": 1}
        after["accumulate"] = 1  # a short last batch is a separate piece even if a window otherwise runs as one
        notes += list_changed_counts(facts, loader)
        changes |= bool(facts.changes_by_batch)
    wants["step.micro_batch"] = micro
    if groups:
        wants["step.batch_norm"] = "groups"
    # BatchNorm takes its statistics from a micro-batch, and the user's hooks may change gradients after each batch;
    # everything else is the same sum in another order.
    parity: Parity = "changes-training" if changes else "approximate"
    return Change(parity=parity, notes=tuple(notes), wants=wants, facts=after)


def _check_size(size: int, micro: int) -> None:
    if micro > size:
        none = f"micro_batch={micro} with batches of {size} and no accumulation"
        raise NotApplicable(f"{none}: a larger one would change the global batch")
    if micro == size:
        raise NotApplicable(f"the loader's batches already have {size} samples")


def _check_choice(
    facts: Facts, loader: LoaderFacts, *, merges: bool, unmerged: str | None, groups: bool, batch_norm: str
) -> None:
    """Refuse to search if the user's own micro-batch is the only candidate."""
    if merges and (groups or batch_norm == "merge" or not facts.batchnorms):
        return
    if facts.batchnorms:
        none = "gradients are not accumulated" if unmerged is None else f"windows are not merged ({unmerged})"
        if merges:
            none = f"{facts.other_batchnorms[0]} cannot keep merged batches apart"
        raise NotApplicable(
            f"limited to your batch size: BatchNorm keeps the statistics of each batch, and {none}; setting a"
            " micro-batch yourself changes the training"
        )
    if loader.batch_size == 1 and not merges:
        raise NotApplicable("limited to your batch size of 1: a larger micro-batch would change the global batch")


def _round_down(micro: int, size: int, notes: list[str]) -> int:
    """Return the largest micro-batch up to `micro` made of whole batches of `size`, at least two."""
    if micro < 2 * size:
        raise NotApplicable(
            f"micro_batch={micro} holds one whole batch of {size}, and BatchNorm keeps the statistics of"
            f" whole batches: write {2 * size} or more, or batch_norm: merge"
        )
    whole = micro // size * size
    if whole != micro:
        notes.append(f"micro_batch {micro} is rounded to {whole}, whole batches of {size} for BatchNorm")
    return whole


def _list_norm_notes(facts: Facts, loader: LoaderFacts, micro: Size, *, groups: bool, batch_norm: str) -> list[str]:
    names = ", ".join(facts.batchnorms[:3]) + (", …" if len(facts.batchnorms) > 3 else "")
    of = "the size found" if micro == "auto" else str(micro)
    one = len(facts.batchnorms) == 1
    changes = f"{'normalizes' if one else 'normalize'} over micro-batches of {of}, which changes the training"
    if micro != "auto" and micro < (loader.batch_size or 0):
        changes += f" and cannot be avoided below your batch size of {loader.batch_size}"
    keep = "keeps" if one else "keep"
    what = f"{keep} separate statistics for each of your batches" if groups else changes
    notes = [f"{say_count(len(facts.batchnorms), 'BatchNorm layer')} {what}: {names}"]
    if facts.other_batchnorms and batch_norm == "groups":
        other = facts.other_batchnorms[0]
        kinds = "synchronized, not torch's own BatchNorm, or an InstanceNorm with running statistics"
        notes.append(f"{other} is {kinds}, so batches cannot be kept apart in it")
    return notes


def judge_regrouping(evidence: Mapping[str, Any]) -> Verdict:
    """Judge whether steps ran in micro-batches other than the loader's batches."""
    if not evidence.get("steps"):
        return Verdict(took=False, why="no optimizer step ran")
    problem, apart = evidence.get("problem"), evidence.get("apart_steps") or 0
    if apart > evidence["changed_steps"]:
        count = f"{apart} of {evidence['steps']} " if evidence["changed_steps"] else ""
        why = f"{count}windows run batch by batch: {evidence['apart_why']}; hooks still see one batch per window"
        return Verdict(took=False, why=why)
    searched = evidence.get("searched")
    if not evidence["changed_steps"]:
        none = "none was larger than micro_batch" if searched is None else f"keeping your micro-batch size: {searched}"
        unmerged = f"; nor merged: {evidence['unmerged']}" if evidence.get("unmerged") else ""
        return Verdict(took=False, why=f"batches are not split: {problem or none}{unmerged}")
    pieces = evidence["micro_batches"]
    sizes = "/".join(map(str, pieces[:4])) + (f"/… ({len(pieces)} of them)" if len(pieces) > 4 else "")
    merged, samples = evidence.get("merged_batches") or 1, evidence["samples"]
    whole = f"{merged} loader batches ({samples} samples)" if merged > 1 else f"each loader batch of {samples} samples"
    why = f"{whole} ran as micro-batches of {sizes}"
    if norms := evidence.get("grouped_norms"):
        layers = say_count(norms, "BatchNorm layer")
        why += f"; {layers} kept separate statistics for up to {evidence['groups']} batches"
    if weighed := evidence.get("weighed_by"):
        why += f"; weighted by {weighed}"
    if unequal := evidence.get("unequal_logs"):
        why += f"; logged values that are not means over samples differ: {', '.join(unequal)}"
    if problem:
        why += f"; {evidence['uncut_steps']} of {evidence['steps']} batches could not be cut: {problem}"
    if apart:
        why += f"; {apart} of {evidence['steps']} windows run batch by batch: {evidence['apart_why']}"
    if searched is not None:
        why += f"; auto chose {evidence['micro_batch']}: {searched}"
    return Verdict(took=True, why=why)
