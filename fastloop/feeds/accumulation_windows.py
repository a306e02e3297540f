"""Merging accumulation windows into one batch: when it is impossible, and which settings then count steps."""

from __future__ import annotations

import math

from fastloop.evidence.worker_limits import count_used_batches
from fastloop.records.facts import Facts, LoaderFacts

LEAST_STEPS = 200
"""A shipped ladder searches for a micro-batch only in runs of at least this many optimizer steps; a search costs about
ten."""


def count_batches_between_validations(batches: int, interval: int | float) -> int:
    """Convert ``val_check_interval`` to batches, as Lightning does."""
    return interval if isinstance(interval, int) else max(1, int(batches * interval))


def explain_no_regrouping(facts: Facts) -> str | None:
    """Return why an optimizer step cannot use micro-batches other than the loader's batches; None if it can."""
    if not facts.automatic_optimization:
        return "manual optimization: the module runs its own backward passes"
    if not facts.plain_gradients:
        return f"{facts.strategy} keeps its own gradients; only one device and DDP are supported"
    if facts.static_graph:
        return "static_graph with several backward passes per step fails inside DDP; turn it off"
    if facts.accumulation_scheduled:
        return "a GradientAccumulationScheduler changes the accumulation during training; it wins"
    if facts.averages_weights_by_swa:
        return "StochasticWeightAveraging runs an extra epoch with the backward switched off; it wins"
    if facts.steps_with_iterator:
        return "training_step(dataloader_iter) fetches its own batches"
    if facts.grad_hooks:
        return "parameters have post-accumulate gradient hooks, which would run once per micro-batch"
    return None


def explain_no_merge(facts: Facts, loader: LoaderFacts) -> str | None:
    """Return why accumulation windows cannot become loader batches here; None if they can."""
    if not loader.is_dataloader or not loader.map_style or not loader.auto_collates:
        return (
            f"{loader.kind} yields ready-made batches, so an accumulation window cannot be merged; a micro_batch"
            " smaller than the batch can still split them"
        )
    if facts.skips_batches:
        return "training_step returns no loss for some batches: the whole merged window would be skipped"
    if facts.reads_batch_counts:
        return f"{facts.reads_batch_counts[0]}, which changes if windows are merged"
    if loader.stateful:
        return f"{loader.kind} keeps its own position for resuming, which merging would shift"
    if loader.batches is None:
        return f"{loader.kind} does not say how many batches an epoch has, so the last window's size is unknown"
    if loader.batch_size is None:
        return f"{loader.kind} does not say how many samples a batch has"
    batches, window = count_used_batches(loader.batches, facts.limit_train_batches), facts.accumulate
    if batches < window:
        return (
            f"an epoch has {batches} batches, fewer than the {window} of one window, so accumulation is already cut"
            " short; lower accumulate_grad_batches"
        )
    return _explain_moved_validation(facts, batches)


def count_steps(facts: Facts) -> int | None:
    """Return the optimizer steps of the whole run; None if unknown."""
    known, loader = [] if facts.max_steps is None else [facts.max_steps], facts.loader
    if loader is not None and loader.batches is not None and facts.max_epochs is not None:
        batches = count_used_batches(loader.batches, facts.limit_train_batches)
        known.append(math.ceil(batches / facts.accumulate) * facts.max_epochs)
    return min(known, default=None)


def _explain_moved_validation(facts: Facts, batches: int) -> str | None:
    interval, window = facts.val_check_interval, facts.accumulate
    if interval is None:
        return None  # validation runs by the clock
    every = count_batches_between_validations(batches, interval)
    if every == batches:
        return None  # validation runs at the end of each epoch
    setting = f"val_check_interval={interval}" + ("" if isinstance(interval, int) else f" ({every} batches)")
    if every % window:
        return (
            f"{setting} is not a multiple of accumulate_grad_batches={window}: validation would move; write a multiple"
        )
    if not batches % window:
        return None
    if facts.val_every_n_epochs is None:
        return (
            f"{setting} counts across epochs (check_val_every_n_epoch=None), and an epoch has {batches} batches, not a"
            f" multiple of accumulate_grad_batches={window}: validation would move"
        )
    if -(-batches // window) % (every // window) == 0:
        return (
            f"{setting}: the short last window of an epoch ({batches % window} of {window} batches) would count as a"
            " full one, with a validation after it"
        )
    return None


def list_changed_counts(facts: Facts, loader: LoaderFacts) -> list[str]:
    """List what counts optimizer steps instead of batches in a merged run, and what does not change."""
    window, interval, limit = facts.accumulate, facts.val_check_interval, facts.limit_train_batches
    notes = [f"batch_idx and on_train_batch_* now count optimizer steps: one call for every {window} batches"]
    if facts.counts_batches:
        notes.append(f"fewer and larger batches for: {', '.join(each.rstrip(',') for each in facts.counts_batches)}")
    if facts.changes_by_batch:
        names = ", ".join(facts.changes_by_batch)
        notes.append(
            f"DIFFERENT TRAINING: {names} may change weights or gradients, now once for every {window} batches"
        )
    if isinstance(interval, int):
        notes.append(f"val_check_interval {interval} batches = {interval // window} steps")
    elif interval not in (None, 1.0):
        notes.append(f"val_check_interval {interval}: validation stays after the same optimizer steps")
    if limit not in (None, 1.0):
        notes.append(f"limit_train_batches {limit} still counts your loader's batches")
    notes.append(
        "scheduler frequencies that count batches still do; max_steps, learning rates and global_step count optimizer"
        " steps, each with the same samples as before"
    )
    if not loader.num_workers and loader.draws_random and facts.device == "cpu":
        notes.append(
            f"samples now draw random numbers ({loader.draws_random[0]}) for {window} batches at once, so their draws"
            " and the model's, such as dropout, come in a different order"
        )
    if loader.num_workers > 1 and (loader.draws_random or loader.custom_collate):
        notes.append(
            f"each of your batches is collated as before, but one worker collates {window} in a row, so random draws"
            " there differ"
        )
    return notes
