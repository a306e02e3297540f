"""Load batches ahead of time, in worker processes.

Faster because  the device no longer waits while Python decodes the next batch.
Costs           about one copy of the dataset object per worker in host memory; a slower first batch of each epoch;
                samples see os.environ and global variables as they were when their worker started.
Don't use when  data_wait is already under 2 % of the step, or the samples are already on the device.
Evidence        live worker processes behind the loader during the timed window
Source          https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastloop.errors import NotApplicable, require_positive
from fastloop.evidence.worker_limits import (
    can_keep_for_validation,
    can_keep_theirs,
    count_epoch_batches,
    describe_sampler_draws,
    explain_own_number,
    find_obstacle,
    find_obstacle_to_more,
    find_obstacle_to_next_epoch,
    fit_in_shm,
    is_cut_short,
    list_costs,
    may_survive,
    refuse_other_order,
)
from fastloop.records.card import Card, ClimbState, Tunable, Variant, read_int
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Parity, Verdict, say_count
from fastloop.records.readings import (
    FEW_WORKERS,
    MORE_WORTH,
    count_possible_workers,
    is_gap_of_workers,
    may_hand_over,
    read_loader,
    read_step_ms,
    restarts_workers,
)

MOST = 8
"""Upper limit for `auto`: more workers seldom pay off and slow the launching thread down."""
MOST_GROWN = 16
"""The same if workers are added because the training waits."""
SHORT_EPOCH, LONG_EPOCH = 100, 1000
"""Batches per epoch. Starting a worker takes 0.02 to 0.3 s: epochs shorter than SHORT_EPOCH do not earn that back; in
epochs longer than LONG_EPOCH it no longer matters."""
FOR_VALIDATION = "evaluation.persistent_workers"
RELOADS = "the Trainer reloads its loaders, and the old workers would stay"
KEEP = "keep the workers between epochs: rungs.workers.persistent: true"


def _list_variants(state: ClimbState) -> Iterator[Variant]:
    """First try workers, with a count tuned on the loader alone; later persistent ones, and a new count. The user's own
    workers can be kept between epochs, and more can be added."""
    own = state.stack.get("workers")
    if own is None:
        yield Variant(changes="loader", tune=True)
    if state.gaps_count and (state.may_keep_workers if own is None else own.get("persistent") is not True):
        yield Variant(
            name="persistent",
            settings=({"persistent": True, "across_epochs": True},),
            changes="gap",
            theirs=own is None,
        )
    if own is None:
        if state.may_have_more_workers:
            yield Variant(name="grow", settings=({"grow": True},), changes="engine", theirs=True, first=True)
        return
    if state.recount:
        yield Variant(name="count", settings=(), changes="loader", tune=True, repeats=True)


def _keep_theirs(seen: Measurement) -> tuple[dict[str, Any], str] | None:
    """Keep the user's own workers, if the time between epochs is mostly their start."""
    loader = read_loader(seen)
    if not loader.get("can_keep_workers") or not is_gap_of_workers(seen):
        return None
    why = f"{_name_yours(loader['num_workers'])} can stay between epochs"
    return {"enabled": True, "persistent": True, "across_epochs": True}, why


def _may_keep(seen: Measurement) -> bool:
    loader = read_loader(seen)
    reloads = loader.get("reload_every_n_epochs")  # the Trainer makes the loader anew, and its workers with it
    return restarts_workers(seen) and loader.get("can_keep_workers") is not False and not reloads


def _replace_theirs(seen: Measurement) -> tuple[dict[str, Any], str] | None:
    """Propose more workers than the user has, as many as the step needs or the CPUs allow."""
    loader, step_ms, wait_ms = read_loader(seen), read_step_ms(seen), seen.parts_ms.get("data_wait")
    own, most = loader.get("num_workers"), count_possible_workers(seen)
    if not (own and most and step_ms and wait_ms and loader.get("can_have_more")):
        return None
    count = min(most, MOST_GROWN, math.ceil(own * step_ms / max(step_ms - wait_ms, step_ms / most)))
    if count < MORE_WORTH * own:
        return None
    why = f"{count} workers instead of {own}: {loader['usable_cpus']} CPUs are usable"
    return {"enabled": True, "count": count}, why


def _keep_for_validation(seen: Measurement) -> tuple[dict[str, Any], str] | None:
    """Keep the user's workers for validation, if the train loader has some, too: it would get workers otherwise."""
    loader = read_loader(seen)
    if not (loader.get("can_keep_for_validation") and loader.get("num_workers")):
        return None
    more = {"across_epochs": True} if loader.get("can_keep_workers") else {}
    why = f"{_name_yours(loader['validation_workers'])} for validation can stay"
    return {"enabled": True, "persistent": True, **more}, why


def _describe(seen: Measurement) -> str:
    cpus = read_loader(seen).get("usable_cpus") or 0
    more = f", although {cpus} CPUs are usable" if cpus > 1 else ""
    return f"batches are loaded in the training process (0 workers){more}"


CARD = Card(
    family="feed",
    does=_describe,
    answers={"data_wait": 1, "picking": 2, "epoch_gap": 1, FEW_WORKERS: 1, "validation": 1},
    applies=may_hand_over,
    remedies={"epoch_gap": _keep_theirs, FEW_WORKERS: _replace_theirs, "validation": _keep_for_validation},
    advice={"epoch_gap": lambda seen, on: KEEP if on and _may_keep(seen) else None},
    variants=_list_variants,
    tunes=Tunable(
        field="count",
        values=lambda space: (*(2**power for power in range(space.cpus.bit_length())), space.cpus),
        trained="loader",
    ),
    batches_ready=lambda settings, workers: workers * read_int(settings, "prefetch_factor", 2),
    plan_shows_refusal=True,
    loads_elsewhere=True,
    explains={
        "DataLoader worker (pid": "a worker process was killed, most often because memory ran out: use fewer workers"
        " (rungs.workers.count, or your loader's num_workers) and continue from your last checkpoint"
    },
)


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Worker processes for map-style train loaders that have none, or too few. Validation loaders get none, but your
    own can stay between validations.

    If a shipped ladder switched them on, the first batches are timed; if taking a batch from a worker takes longer than
    making it, the run continues without workers.
    """

    enabled: bool = False
    count: int | Literal["auto"] = "auto"
    """Worker processes per rank; auto = yours, or if you have none: CPUs of this process (affinity and cgroup) divided
    by the local ranks, minus one, at most 8."""
    grow: bool = False
    """With ``count: auto``: if the training waits for batches, replace the workers, including yours, with more of them,
    if that saves more time than it costs. Random augmentations draw other numbers from that batch on. Later runs of
    the same model and loader start with the number that was found."""
    across_epochs: bool = False
    """Let workers that stay between epochs prefetch the next epoch's first batches while this one ends, and during
    validation. These batches are used only if the sampler then draws the same indices."""
    prefetch_factor: int = 2
    """Batches that each worker keeps ready that this rung starts; your own keep their number."""
    persistent: bool | Literal["auto"] = "auto"
    """Keep the workers between epochs; true also keeps yours. Such workers miss changes of the dataset after epoch 0.
    auto = keep ours, and under a ladder yours, if epochs have fewer than 1,000 batches and no code is known to change
    the dataset. Your validation loaders' workers are then kept as well, unless that could change results."""
    start_method: Literal["auto", "fork", "spawn", "forkserver"] = "auto"
    """How workers start; auto = the loader's setting, or the platform's default."""

    def __post_init__(self) -> None:
        do = "write a positive number or auto, or workers.enabled: false"
        require_positive("workers.count", self.count, why="without a worker this rung is off", do=do)
        why, do = "each worker must keep at least one batch ready", "write 1 or more (2 is PyTorch's own default)"
        require_positive("workers.prefetch_factor", self.prefetch_factor, why=why, do=do)

    def plan(self, facts: Facts) -> Change:
        """Request worker processes if the train loader has none and its dataset works with them."""
        if facts.loader is None:
            return Change(waits_for="the train loader", may_want=("loader.num_workers", FOR_VALIDATION))
        if facts.evaluates:
            return self._plan_validation(facts.loader, facts)
        kept = facts.kept_validation_workers
        note = f"{_name_yours(kept)} for validation {_BE[kept > 1]} kept between validations"
        try:
            change = self._plan_training(facts.loader, facts)
        except NotApplicable as reason:
            if not kept:
                raise
            return Change(wants={FOR_VALIDATION: True}, notes=(f"{note}; the train loader is unchanged: {reason}",))
        return replace(change, notes=(*change.notes, note)) if kept else change

    def _plan_validation(self, loader: LoaderFacts, facts: Facts) -> Change:
        """Keep the user's workers between validations, if these are short and none of their results can change."""
        is_asked = self.persistent is True or (self.persistent == "auto" and "workers" in facts.by_ladder)
        is_short = loader.batches is not None and loader.batches < LONG_EPOCH
        keeps = is_asked and is_short and can_keep_for_validation(facts)
        return Change(wants={FOR_VALIDATION: True} if keeps else {})

    def _plan_training(self, loader: LoaderFacts, facts: Facts) -> Change:
        if loader.num_workers and self.count in ("auto", loader.num_workers):
            return self._plan_theirs(loader, facts)
        replaces = loader.num_workers > 0
        if (obstacle := find_obstacle(loader, facts, self.start_method, replaces=replaces)) is not None:
            raise NotApplicable(obstacle)
        count, ahead = self._count(loader, facts)
        notes = list_costs(loader, facts, count)
        if replaces:
            notes.append(f"they replace {_name_yours(loader.num_workers)}")
        wants: dict[str, Any] = {"loader.num_workers": count}
        if not replaces or ahead != 2:  # 2 is the default; your loader may have another
            wants["loader.prefetch_factor"] = ahead
        if facts.cpu_count > 2 * facts.local_ranks:
            wants["launch.free_cpus"] = facts.local_ranks
            notes.append(f"{facts.local_ranks} of {facts.cpu_count} CPUs are left for the training's own threads")
        wants["loader.persistent_workers"] = self._keep(loader, facts, notes)
        refuse_other_order(loader, facts, "workers")
        notes += (drawn := describe_sampler_draws(loader))
        if replaces and is_cut_short(loader, facts):
            drawn = ("the sampler is read further past limit_train_batches, so its next epoch may differ", *drawn)
            notes.append(drawn[0])
        differences = _list_differences(loader, "a run with yours" if replaces else "a run without workers")
        parity: Parity = "approximate" if differences or drawn else "exact"
        notes += differences
        if loader.packable:
            from fastloop.feeds.workers.packed_list import Packing  # it imports torch

            wants["dataset.packed"] = Packing(samples=loader.packable)
            notes.append(f"{loader.packable} file names are packed into arrays, which workers share instead of copying")
        if self.start_method != "auto":
            wants["loader.multiprocessing_context"] = self.start_method
        elif self._may_grow(count, facts) and find_obstacle_to_more(loader, facts) is None:
            wants["loader.most_workers"] = _count_most(facts)
        if wants["loader.persistent_workers"]:
            self._plan_next_epoch(loader, facts, wants, notes)
        return Change(wants=wants, parity=parity, notes=tuple(notes))

    def _plan_theirs(self, loader: LoaderFacts, facts: Facts) -> Change:
        """Keep the user's own workers between epochs, or let their number grow."""
        own, wants, notes = loader.num_workers, dict[str, Any](), list[str]()
        # Not if only this rung was named: new workers would see changed globals, helpers and environment variables.
        by_ladder = self.persistent == "auto" and "workers" in facts.by_ladder and can_keep_theirs(facts)
        if (by_ladder or (self.persistent is True and may_survive(loader))) and self._keep(loader, facts, []):
            wants["loader.persistent_workers"] = True
            notes.append(f"{_name_yours(own)} {_BE[own > 1]} kept between epochs, instead of being restarted")
            notes += _list_differences(loader, "a run that restarts them in each epoch")
        why = explain_own_number(loader)
        if self._may_grow(own, facts):
            obstacle = find_obstacle_to_more(loader, facts)
            if obstacle is None:
                wants["loader.most_workers"] = most = _count_most(facts)
                notes.append(f"up to {most} workers replace {_name_yours(own)} if the training waits for batches")
                notes += _list_differences(loader, "a run with yours")
            why = f"{why}: {obstacle}"
        if "loader.persistent_workers" in wants or (
            loader.persistent_workers and not (loader.draws_random and not wants)
        ):
            self._plan_next_epoch(loader, facts, wants, notes)
        if not wants:
            raise NotApplicable(why)
        parity: Parity = "approximate" if loader.draws_random or loader.asks_process else "exact"
        return Change(wants=wants, parity=parity, notes=tuple(notes))

    def _plan_next_epoch(self, loader: LoaderFacts, facts: Facts, wants: dict[str, Any], notes: list[str]) -> None:
        """Let workers that stay between epochs make the next epoch's first batches before it begins."""
        if not self.across_epochs or count_epoch_batches(loader, facts) is None:
            return
        if (obstacle := find_obstacle_to_next_epoch(loader, facts)) is None:
            wants["loader.next_epoch"] = True
        else:
            notes.append(f"no batches are prefetched across epochs: {obstacle}")

    def _may_grow(self, count: int, facts: Facts) -> bool:
        return self.grow and self.count == "auto" and _count_most(facts) > count

    def _count(self, loader: LoaderFacts, facts: Facts) -> tuple[int, int]:
        """Return the number of workers, and of batches that each keeps ready: as configured, or fewer if shared memory
        is too small for them."""
        count, room = choose_count(facts) if self.count == "auto" else self.count, facts.batch_room_bytes
        if room is None or loader.sample_bytes is None or loader.batch_size is None:
            return count, self.prefetch_factor
        size = loader.sample_bytes * loader.batch_size
        fitting = fit_in_shm(count, self.prefetch_factor, size, room // facts.local_ranks)
        if fitting is None:
            is_shm = room == facts.shm_free_bytes
            raise NotApplicable(
                f"a batch takes {size / 2**20:.1f} MiB and {'/dev/shm' if is_shm else 'the memory'} has"
                f" {room / 2**20:.0f} MiB free: too little for one worker"
                f"{'; give the container --shm-size=8g' if is_shm else ''}"
            )
        return fitting

    def _keep(self, loader: LoaderFacts, facts: Facts, notes: list[str]) -> bool:
        """Whether the workers stay between epochs; if they should but cannot, add a note that says why."""
        if self.persistent is True and facts.reload_every_n_epochs:
            notes.append(f"persistent workers are off: {RELOADS}")
        if self.persistent != "auto":
            return self.persistent and not facts.reload_every_n_epochs
        if loader.persistent_workers:
            return True
        batches = count_epoch_batches(loader, facts)
        if batches is None or batches >= LONG_EPOCH:
            return False
        why_not = RELOADS if facts.reload_every_n_epochs else next(iter(loader.may_change), None)
        if why_not is not None and batches < SHORT_EPOCH and self.count == "auto" and not loader.num_workers:
            do = "if that is fine, write workers.persistent: true"
            do = "to start them anyway, set workers.count" if why_not is RELOADS else do  # none would be kept
            raise NotApplicable(
                f"epochs of {batches} batches are too short to restart workers in each, and keeping them is not safe:"
                f" {why_not}; {do}"
            )
        return why_not is None

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if live worker processes fed the loader in the timed window."""
        found = seen.evidence.get("workers", {})
        if not found.get("validation_kept"):
            return self._verify_training(found, seen)
        count = found["validation_workers"]
        why = f"{_name_yours(count)} for validation {_WERE[count > 1]} kept between validations"
        if not found.get("only_validation"):
            why = f"{self._verify_training(found, seen).why}; {why}"
        return Verdict(took=True, why=why)

    def _verify_training(self, found: Mapping[str, Any], seen: Measurement) -> Verdict:
        if (ahead := found.get("epochs_ahead")) is None:
            return self._verify_workers(found, seen)
        why = f"{say_count(ahead, 'epoch')} started with prefetched batches"
        if found.get("order_differed"):
            why += ", until the sampler drew a different order than predicted"
        if found.get("only_ahead"):
            return Verdict(took=ahead > 0, why=why)
        verdict = self._verify_workers(found, seen)
        return replace(verdict, took=True, why=f"{verdict.why}; {why}") if ahead else verdict

    def _verify_workers(self, found: Mapping[str, Any], seen: Measurement) -> Verdict:
        if (more := found.get("more")) is not None:
            return Verdict(took=found.get("faster") if found.get("theirs") else True, why=more)
        if "kept" in found:
            kept = bool(found["kept"])
            why = f"your workers were {'' if kept else 'not '}kept between epochs"
            reason = None if kept else found.get("restarted_because")
            return Verdict(took=kept, why=why if reason is None else f"{why}: {reason}")
        if found.get("theirs"):
            return Verdict(took=False, why="your workers kept up, or more of them would not have paid off")
        count, fewer = found.get("live_workers"), found.get("fewer")
        if count is None:
            return Verdict(
                took=None,
                why="no step ran" if seen.total_steps == 0 else "the loader's iterator could not be inspected",
            )
        fed = "fed the window" if seen.steps else "made the batches"  # a fit may end before its window
        why = f"{say_count(count, 'live worker process')} {fed}"
        return Verdict(took=count > 0, why=f"{why}; {fewer}" if fewer else why)


def _count_most(facts: Facts) -> int:
    """Return the most workers per rank that leave a CPU for each rank's own thread, at most `MOST_GROWN`."""
    return min(MOST_GROWN, facts.cpu_count // max(1, facts.local_ranks) - 1)


_BE, _WERE = ("is", "are"), ("was", "were")


def _name_yours(count: int) -> str:
    return "your worker" if count == 1 else f"your {count} workers"


def _list_differences(loader: LoaderFacts, run: str) -> list[str]:
    """List why samples may differ from those of `run`."""
    found = []
    if loader.draws_random:
        found.append(f"random augmentations may differ from {run} ({', '.join(loader.draws_random[:3])})")
    if loader.asks_process:
        found.append(f"{loader.asks_process[0]} reads its worker or process id, so samples may differ from {run}")
    return found


def choose_count(facts: Facts) -> int:
    """Return the number of workers per rank that leaves a CPU for each rank's own thread."""
    return max(1, min(MOST, _count_most(facts)))
