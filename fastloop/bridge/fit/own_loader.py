"""Reads the user's own train loader after a fit, so that the diagnosis proposes only what that loader can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastloop.bridge.apply import read_facts
from fastloop.bridge.apply.applier import Applier
from fastloop.bridge.watch import loader_state
from fastloop.errors import describe, let_through
from fastloop.evidence.worker_limits import (
    can_keep_for_validation,
    can_keep_theirs,
    find_obstacle,
    find_obstacle_to_more,
)
from fastloop.ladder import Ladder, list_refused
from fastloop.records.facts import Facts


def gather_loader_evidence(
    trainer: Any, applier: Applier | None, ladder: Ladder, seen: Mapping[str, Any]
) -> dict[str, Any]:
    """Gather evidence on what the diagnosis may propose: feeds, and whether workers can be kept or added.

    Feeds are considered if the loader has no workers, or yields image files or rows in memory.

    Args:
        seen: the evidence on the loader so far.
    """
    decode_ms, rows = loader_state.measure_decode_ms(trainer), loader_state.find_rows(trainer)
    if not loader_state.find_loaders(trainer):
        return {}
    facts = _read_loader(trainer, applier, ladder)
    loader = dict(seen)
    if rows is not None:
        loader["rows"] = rows
    if facts is None or facts.loader is None:
        loader |= {"can_keep_workers": False, "can_have_more": False}
    else:
        if facts.loader.repeats is not None:
            loader["repeats"] = facts.loader.repeats
        if facts.loader.num_workers:
            loader["can_keep_workers"] = can_keep_theirs(facts)
            loader["can_have_more"] = find_obstacle_to_more(facts.loader, facts) is None
        if seen.get("validation_workers") and not seen.get("validation_keeps_workers"):
            loader["can_keep_for_validation"] = _can_keep_for_validation(trainer, facts, ladder)
        loader |= _explain_without_workers(trainer, applier, facts, seen)
    if decode_ms is not None:
        loader["decode_ms"] = decode_ms
    elif rows is None and seen.get("num_workers"):
        return {"loader": loader}
    return {"loader": loader, "refused": {} if facts is None else list_refused(ladder, facts)}


def _read_loader(trainer: Any, applier: Applier | None, ladder: Ladder) -> Facts | None:
    """Return the run's facts with the user's own train loader, the first of several; None if they cannot be read."""
    found, *more = loader_state.find_loaders(trainer)
    facts = None if applier is None else applier.facts  # read before rungs changed the objects
    if applier is not None and applier.loaders is not None:
        found = applier.loaders.find_original(found)
    others = read_facts.list_hook_owners(trainer)
    try:
        facts = facts or read_facts.read_run_facts(trainer, trainer.strategy)
        read = read_facts.read_loader_facts(found, ladder.start_method, others, ranks=facts.world_size)
    except Exception as error:  # from the user's model or dataset, used in an unusual way
        let_through(error)
        return None
    if more and isinstance(batches := trainer.num_training_batches, int):
        # Each loader gives a part of every batch, and a different one may set the number of batches.
        facts, read = dataclasses.replace(facts, limit_train_batches=None), dataclasses.replace(read, batches=batches)
    return dataclasses.replace(facts, loader=read)


def _explain_without_workers(
    trainer: Any, applier: Applier | None, facts: Facts, seen: Mapping[str, Any]
) -> dict[str, Any]:
    """Say why loaders without workers cannot have any, or None where they can: those for validation, and each of
    several train loaders."""
    found: dict[str, Any] = {}
    if seen.get("validation_workers") == 0:
        idle = [each for each in loader_state.find_validation_loaders(trainer) if each.num_workers == 0]
        whys = [_find_obstacle(trainer, facts, loader) for loader in idle]
        found["validation_obstacle"] = next(filter(None, whys), None)
    changed = None if applier is None else applier.loaders
    for name, loader in loader_state.list_without_workers(trainer):
        own = loader if changed is None else changed.find_original(loader)
        found.setdefault("without_workers", {})[name] = _find_obstacle(trainer, facts, own)
    return found


def _find_obstacle(trainer: Any, facts: Facts, loader: Any) -> str | None:
    try:
        read = read_facts.read_loader_facts(loader, others=read_facts.list_hook_owners(trainer))
    except Exception as error:
        return f"its code cannot be read: {describe(error)}"
    return find_obstacle(read, facts, "auto")


def _can_keep_for_validation(trainer: Any, facts: Facts, ladder: Ladder) -> bool:
    """Whether the workers of each validation loader can stay between validations."""
    others = read_facts.list_hook_owners(trainer)
    loaders = loader_state.find_validation_loaders(trainer)
    try:
        reads = [read_facts.read_loader_facts(loader, ladder.start_method, others) for loader in loaders]
    except Exception as error:
        let_through(error)
        return False
    return bool(reads) and all(can_keep_for_validation(dataclasses.replace(facts, loader=read)) for read in reads)
