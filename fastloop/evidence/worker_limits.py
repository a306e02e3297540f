"""Limits on worker processes: which loaders can have them, how many fit, how long they help, how much a run draws."""

from __future__ import annotations

from collections.abc import Iterable

from fastloop.errors import NotApplicable
from fastloop.records.facts import Facts, LoaderFacts

LITTLE_SHM_BYTES = 2**30
"""Less free shared memory may not hold the batches that workers have ready."""
_SHARE_OF_ROOM = 0.75
"""Share of the free shared memory; the rest is left for the user's other loaders and for larger batches."""


def fit_in_shm(workers: int, prefetch_factor: int, batch_bytes: int, room_bytes: int) -> tuple[int, int] | None:
    """The most workers, and prefetched batches for each, that fit into shared memory; None if not even one worker fits.

    Besides the workers' batches, shared memory holds the batch in use and the one being received.
    """
    held = int(_SHARE_OF_ROOM * room_bytes) // max(1, batch_bytes) - 2
    if held < 1:
        return None
    fitting = min(workers, held)
    return fitting, min(prefetch_factor, held // fitting)


def list_costs(loader: LoaderFacts, facts: Facts, count: int) -> list[str]:
    """Possible costs of this many workers per rank, one line each."""
    costs = []
    if count * facts.local_ranks > facts.cpu_count:
        costs.append(
            f"{count} workers for each of {facts.local_ranks} ranks on {facts.cpu_count} usable CPUs: they compete for"
            " CPUs and may slow down training"
        )
    if (room := facts.shm_free_bytes) is not None and room < LITTLE_SHM_BYTES:
        do = "fewer workers are used if their batches do not fit; give the container --shm-size=8g"
        costs.append(f"/dev/shm has room for only {room >> 20} MiB: {do}")
    if loader.long_lists and not loader.packable:
        costs.append(f"worker memory grows: {loader.long_lists[0]}, and each worker copies what it reads; use arrays")
    return costs


def count_used_batches(batches: int, limit: int | float | None) -> int:
    """Batches per epoch under ``limit_train_batches``, as Lightning counts them."""
    if limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def is_cut_short(loader: LoaderFacts, facts: Facts) -> bool:
    """Whether ``limit_train_batches`` ends epochs before the loader does, or may do so: then it matters how far ahead
    the sampler is read."""
    limit = facts.limit_train_batches
    if limit is None or (limit == 1.0 and isinstance(limit, float)):
        return False
    return loader.batches is None or count_used_batches(loader.batches, limit) < loader.batches


def count_epoch_batches(loader: LoaderFacts, facts: Facts) -> int | None:
    """Batches that each epoch takes from the loader if there are several epochs; None if unknown."""
    if loader.batches is None or facts.max_epochs == 1:
        return None
    batches = count_used_batches(loader.batches, facts.limit_train_batches)
    ends = facts.max_steps is not None and facts.max_steps * facts.accumulate <= batches
    return None if ends else batches


def count_draws(loader: LoaderFacts, facts: Facts) -> int | None:
    """Samples that the whole run draws on all ranks; None if unknown."""
    known = [] if facts.max_steps is None else [facts.max_steps * facts.accumulate]
    if loader.batches is not None and facts.max_epochs is not None:
        known.append(count_used_batches(loader.batches, facts.limit_train_batches) * facts.max_epochs)
    return min(known) * loader.batch_size * facts.world_size if known and loader.batch_size else None


def describe_sampler_draws(loader: LoaderFacts) -> tuple[str, ...]:
    """What reading this sampler ahead of the training changes, as one line; empty if it changes nothing."""
    if not loader.sampler_draws:
        return ()
    named = ", ".join(loader.sampler_draws)
    return (
        f"{named} draws random numbers between samples, and now does so before the training draws its own: both may"
        " differ",
    )


def refuse_other_order(loader: LoaderFacts, facts: Facts, rung: str) -> None:
    """Ladders keep the order of the samples.

    Raises:
        NotApplicable: a ladder switched on the rung, and its reading ahead may change the order.
    """
    if rung in facts.by_ladder and loader.sampler_draws:
        raise NotApplicable(
            f"reading ahead of {', '.join(loader.sampler_draws)}, which draws random numbers between samples, could"
            f" change the order; if that is fine, write rungs.{rung}.enabled: true"
        )


def can_keep_theirs(facts: Facts) -> bool:
    """Whether the user's own workers, which restart every epoch, can survive one, and nothing speaks against it."""
    loader = facts.loader
    if loader is None or facts.reload_every_n_epochs or loader.may_change:
        return False
    if loader.init_draws:  # it would run once instead of in each epoch
        return False
    if loader.not_ahead and loader.thread_hazards:  # a sample may have read a file once, which training writes anew
        return False
    return not (loader.worker_hazards or loader.remembers) and may_survive(loader)


def can_keep_for_validation(facts: Facts) -> bool:
    """Whether the user's workers of a validation loader can stay between validations, with the same results."""
    loader, room = facts.loader, facts.shm_free_bytes
    if loader is None or not can_keep_theirs(facts) or loader.draws_random or loader.asks_process:
        return False
    if loader.thread_hazards:  # a worker that stays has what earlier samples left there: a file that is new by now
        return False
    is_whole = facts.limit_val_batches in (None, 1.0)  # else batches that nobody takes stay in shared memory
    return is_whole and (room is None or room >= LITTLE_SHM_BYTES)


def may_survive(loader: LoaderFacts) -> bool:
    """Whether the user's own workers, which restart every epoch, can survive an epoch."""
    own = loader.num_workers and not loader.persistent_workers and loader.engine is None
    return bool(own) and loader.is_dataloader and loader.map_style and not loader.stateful and not loader.own_iterator


def find_obstacle_to_more(loader: LoaderFacts, facts: Facts) -> str | None:
    """Why other workers cannot take the place of the user's own; None if they can."""
    if loader.start_method != "fork":
        return f"workers are started with {loader.start_method} here, which is slow"
    if stale := [*loader.may_change, *(loader.remembers if loader.persistent_workers else ())]:
        return f"new workers would get a newer copy of the dataset than yours have: {stale[0]}"
    if loader.sampler_draws:
        draws = loader.sampler_draws[0]
        return f"more workers would read the sampler further ahead, and {draws} draws random numbers between samples"
    if is_cut_short(loader, facts):
        return "more workers would read the sampler further past limit_train_batches, which can change the next epoch"
    return find_obstacle(loader, facts, "auto", replaces=True)


def find_obstacle_to_next_epoch(loader: LoaderFacts, facts: Facts) -> str | None:
    """Why workers that stay cannot make the next epoch's first batches before it begins; None if they can."""
    if not (loader.is_dataloader and loader.map_style) or loader.stateful or loader.own_iterator:
        return f"{loader.kind} is not a plain map-style DataLoader"
    if is_cut_short(loader, facts):
        return "limit_train_batches ends epochs before the loader does"
    if facts.reload_every_n_epochs:
        return "the Trainer reloads its loaders"
    if facts.shm_free_bytes is not None and facts.shm_free_bytes < LITTLE_SHM_BYTES:
        return f"/dev/shm has room for only {facts.shm_free_bytes >> 20} MiB, and validation needs that"
    if loader.worker_hazards:  # batches reach other workers than in a plain run
        return f"each worker keeps its own state: {loader.worker_hazards[0]}"
    found = (*loader.may_change, *loader.changes_within, *loader.sampler_hazards, *loader.sampler_draws)
    return loader.not_ahead or next(iter(found), None)


def sum_up_hazards(hazards: Iterable[str]) -> str:
    """Join hazards; of several objects of one kind (``dataset.tf[0].rng (Generator) is …``) only the first is told."""
    alike: dict[str, list[str]] = {}
    for hazard in hazards:
        alike.setdefault(hazard.partition(" (")[2] or hazard, []).append(hazard)
    return "; ".join(
        first if not more else f"{first} (and {len(more)} more like it)" for first, *more in alike.values()
    )


def explain_own_number(loader: LoaderFacts) -> str:
    """Why a loader that has workers gets no others."""
    workers = "a worker" if loader.num_workers == 1 else f"{loader.num_workers} workers"
    return f"the loader already has {workers}; your setting stands"


def find_obstacle(loader: LoaderFacts, facts: Facts, start_method: str, *, replaces: bool = False) -> str | None:
    """Why this loader cannot have workers; None if it can.

    Args:
        start_method: their start method, or auto.
        replaces: whether they take the place of the user's own.
    """
    method = loader.start_method if start_method == "auto" else start_method
    if not loader.is_dataloader:
        return f"{loader.kind} is not a DataLoader: its workers, if any, cannot be set"
    if loader.engine is not None:
        return f"{loader.engine} loads the samples, without worker processes"
    if loader.num_workers and not replaces:
        return explain_own_number(loader)
    if not loader.map_style:
        return (
            "every worker would read the whole iterable dataset and repeat its samples, unless the dataset splits"
            " itself with torch.utils.data.get_worker_info; if yours does, set num_workers yourself"
        )
    if loader.stateful:
        return (
            f"{loader.kind} shuffles differently with workers, and its saved position is tied"
            " to their number; set num_workers yourself before the run starts"
        )
    if facts.is_daemon:
        return "this process is daemonic, as in a multiprocessing.Pool, and may not start workers"
    if facts.no_sockets_in is not None:
        return (
            f"workers send their batches through sockets, and socket paths below {facts.no_sockets_in} are too long;"
            " set TMPDIR to a shorter directory"
        )
    if loader.worker_hazards:
        return f"the dataset cannot be copied to workers: {sum_up_hazards(loader.worker_hazards)}"
    if loader.sampler_hazards:
        return f"workers read the sampler ahead of training: {'; '.join(loader.sampler_hazards)}"
    if loader.changes_within:
        return f"workers would load from an outdated copy: {'; '.join(loader.changes_within)}"
    if loader.own_iterator:
        return (
            f"{loader.kind} creates its own iterators, so what workers send cannot be checked first; set num_workers"
            " yourself"
        )
    if method != "fork" and loader.spawn_hazard:
        return f"workers are started with {method} here, and {loader.spawn_hazard}"
    return None
