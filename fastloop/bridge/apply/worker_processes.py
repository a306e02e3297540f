"""The train loaders' worker processes: on trial if rungs start them, and more of them if they are too slow."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.rehearse.remembered import Remembered
from fastloop.bridge.apply.site import LiveSite
from fastloop.bridge.watch import loader_state
from fastloop.evidence import loader_queue
from fastloop.feeds.images.nested import find_user_dataset
from fastloop.feeds.lazy_loader import Epochs, begin_unchanged
from fastloop.feeds.workers.fresh_workers import FreshWorkers
from fastloop.feeds.workers.more_workers import MoreWorkers
from fastloop.feeds.workers.next_epoch import NextEpoch
from fastloop.feeds.workers.pace import Left
from fastloop.feeds.workers.read_twice import ReadTwice
from fastloop.feeds.workers.thread_rounding import list_adding
from fastloop.feeds.workers.tried_workers import TriedWorkers
from fastloop.records.facts import Facts
from fastloop.records.plan import Plan, say_count

MOST_WORKERS = "loader.most_workers"
"""The want for more workers, up to this number."""
NEXT_EPOCH = "loader.next_epoch"
"""The want for making an epoch's first batches before it begins."""
_MOST_COMPARED = 4
"""Loaders for which rounding is compared: with reloads, each epoch has others."""
ROUNDED = "samples are rounded differently: torch uses 1 thread in {place}, but {threads} here"
UNTRIED = (
    "samples may be rounded differently, which could not be tested: {function} may sum numbers with torch, which uses"
    " 1 thread in {place}, but {threads} here"
)
DREW = "samples draw random numbers, and workers draw different ones than a run without workers"


class _Rounding(NamedTuple):
    """A setting that has samples made with one of torch's threads, not as many as this process has."""

    key: str
    place: str
    adding: tuple[str, ...]
    """The user's functions that may add up numbers."""
    twice: ReadTwice | None

    def describe(self) -> str | None:
        """Return how its samples are rounded differently; None if they are not, or nothing is known yet."""
        threads = torch.get_num_threads()
        found = None if self.twice is None else self.twice.find_rounding()
        if found:
            return ROUNDED.format(place=self.place, threads=threads)
        if found is not None or threads == 1 or not (self.twice is None or self.twice.is_over):
            return None
        return UNTRIED.format(function=self.adding[0], place=self.place, threads=threads) if self.adding else None


class WorkerProcesses:
    """Arranges the workers of each train loader, and reports what became of them.

    Args:
        give_up, by_ladder: see `TrainLoaders`.
        is_training: whether Lightning's loop, not a callback, is requesting batches now.
    """

    def __init__(
        self,
        site: LiveSite,
        live: LivePlan,
        *,
        give_up: Callable[..., None],
        is_training: Callable[[], bool],
        by_ladder: Collection[str],
    ) -> None:
        self.trainer, self._give_up, self._by_ladder = site.trainer, give_up, by_ladder
        self._site, self._live, self._is_training = site, live, is_training
        self._fewer: tuple[dict[str, int], str] | None = None
        """Settings after the number of workers had to be reduced, and why; None if it was not."""
        self._tried: TriedWorkers | None = None
        self._without: dict[str, str] = {}
        """Why a loader's workers ended while other loaders kept theirs, by what it loads."""
        self._drew = multiprocessing.RawValue("b", 0)
        self._more: MoreWorkers | None = None
        self._fresh: FreshWorkers | None = None
        self._next: NextEpoch | None = None
        self._twice: list[ReadTwice] = []
        self._rounding: list[_Rounding] = []
        self._most_alive: int | None = None
        self._keeps_theirs = False

    def arrange(self, loader: Any, plan: Plan, settings: dict[str, Any], facts: Facts) -> Epochs:
        """Complete the settings of a loader; returns what makes an epoch's batches."""
        self._keeps_theirs = "persistent_workers" in settings and "num_workers" not in settings
        starts = bool(settings.get("num_workers"))
        # The user's own have one thread, too.
        compares = starts and not loader.num_workers and len(self._rounding) < _MOST_COMPARED
        twice = self._read_twice(loader, facts, compares) if self._keeps_theirs or starts else None
        epochs: Epochs = begin_unchanged
        if starts:
            epochs = self._try(loader, plan, settings, facts, twice)
        most = plan.wants.get(MOST_WORKERS)
        if most is not None and self._fewer is None and getattr(loader, "in_order", True):
            known = Remembered([self._site.module], self._site.device)
            described = _describe(loader, settings.get("num_workers", loader.num_workers), most)
            self._more = MoreWorkers(
                most,
                count_left=self._count_left,
                tell=self._site.say,
                epochs=epochs,
                room_bytes=_find_room(facts, plan),
                is_training=self._is_training,
                found=known.find_workers(described),
                keep=partial(known.keep_workers, described),
            )
            epochs = self._more.batches
        if settings.get("persistent_workers") and not loader.persistent_workers:
            self._fresh = FreshWorkers(
                tell=self._site.say,
                epochs=epochs,
                twice=twice if loader.num_workers else None,
                is_training=self._is_training,
            )
            epochs = self._fresh.batches
        begins_early = NEXT_EPOCH in plan.wants and settings.get("in_order", getattr(loader, "in_order", True))
        return self._begin_early(loader, epochs) if begins_early else epochs

    def compare_rounding(self, key: str, loader: Any, facts: Facts) -> None:
        """Find out whether an engine with this key, whose threads have one of torch's each, rounds samples as here."""
        if len(self._rounding) < _MOST_COMPARED:
            twice, adding = self._read_twice(loader, facts, True), list_adding(loader.dataset, loader.collate_fn)
            self._rounding.append(_Rounding(key, "the loading threads", adding, twice))

    def _read_twice(self, loader: Any, facts: Facts, compares_threads: bool) -> ReadTwice | None:
        """Have samples read twice in another process, while this one goes on; None if that might disturb it."""
        if facts.loader is None or facts.loader.worker_hazards:  # an open file, say, whose position is shared
            return None
        self._twice.append(twice := ReadTwice(loader, compares_threads=compares_threads))
        return twice

    def end(self) -> None:
        """End processes that still read samples."""
        for twice in self._twice:
            twice.end()

    def _begin_early(self, loader: Any, epochs: Epochs) -> Epochs:
        """Have an epoch's first batches made before it begins."""
        self._next = next_epoch = NextEpoch(
            count_next=self._count_next, count_draws=self._count_draws, draws_seed=not loader.persistent_workers
        )
        return lambda loader, begin: epochs(loader, partial(next_epoch.begin, loader, begin))

    def _try(self, loader: Any, plan: Plan, settings: dict[str, Any], facts: Facts, twice: ReadTwice | None) -> Epochs:
        """Complete the settings of a loader that gets workers, which have to prove that they work."""
        settings["in_order"] = True  # without workers there is no other order
        if self._fewer is not None:
            settings.update(self._fewer[0])
        owner, replaces = plan.owner("loader.num_workers"), loader.num_workers > 0
        kind = type(find_user_dataset(loader.dataset)).__name__
        if not replaces and len(self._rounding) < _MOST_COMPARED:
            adding = list_adding(loader.dataset, loader.collate_fn)
            self._rounding.append(_Rounding("loader.num_workers", "workers", adding, twice))
        self._tried = TriedWorkers(
            room_bytes=_find_room(facts, plan),
            is_training=self._is_training,
            replaces=replaces,
            step_down=partial(self._step_down, kind),
            warn=self._site.warn,
            turn_off=f"rungs.{owner}.enabled: false",
            free_cpus=plan.wants.get("launch.free_cpus", 0),
            leave_out=partial(self._leave_out, kind) if owner in self._by_ladder else None,
            report_outdated=self._report_outdated,
            twice=None if replaces else twice,
            drew=self._drew,
        )
        return self._tried.batches

    def _leave_out(self, kind: str, _workers: int, _ahead: int, why: str) -> None:
        """Workers would work but are not worth it in this run; the verdict says so."""
        if self._have_others(kind, why):
            return
        self._give_up("loader.num_workers", why, is_refusal=False, has_acted=True)

    def _have_others(self, kind: str, why: str) -> bool:
        """Whether another loader still has workers, so that the setting stays where those of one with this `kind` of
        dataset have ended."""
        counts = map(loader_queue.count_live_workers, loader_state.find_iterators(self.trainer))
        if not any(counts):
            return False
        self._without[kind] = f"the loader of {kind} went on without workers: {why}"
        return True

    def _report_outdated(self, batches: int, key: str = "loader.num_workers") -> None:
        """Batches of the training may have been made from outdated data."""
        made = "1 batch was" if batches == 1 else f"{batches} batches were"
        self._live.weaken(key, f"up to {made} loaded from data that has changed since", "changes-training")

    def leave(self, key: str, why: str, outdated: int) -> None:
        """A feed or an engine has stopped loading ahead; `outdated` of its batches may have been made from old data."""
        if outdated:
            self._report_outdated(outdated, key)
        self._give_up(key, why, has_acted=True)
        self._site.warn(f"no batches are loaded ahead from now on: {why}")

    def _step_down(self, kind: str, workers: int, ahead: int, why: str) -> None:
        """Continue with fewer workers than planned, or none."""
        if workers:
            why = f"{say_count(workers, 'worker')} with prefetch_factor {ahead}: {why}"
            self._fewer = {"num_workers": workers, "prefetch_factor": ahead}, why
        elif self._have_others(kind, why):
            why = self._without[kind]
        else:
            has_acted = self._tried is not None and self._tried.has_handed_out
            self._give_up("loader.num_workers", why, has_acted=has_acted)
            why = f"no workers are used from now on: {why}"
        self._site.warn(why)

    def _count_left(self) -> Left:
        """Batches that the Trainer will still take. A merged batch counts as one, like any other."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        ready, most = loop.epoch_loop.batch_progress.current.ready, trainer.num_training_batches
        in_epoch = math.inf if math.isinf(most) else max(0, most - ready)
        epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs - trainer.current_epoch - 1
        in_run = in_epoch + epochs * most if epochs else in_epoch
        if trainer.max_steps != -1:
            in_run = min(in_run, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        return Left(*(None if math.isinf(count) else int(count) for count in (min(in_epoch, in_run), in_run)))

    def _count_next(self) -> int | None:
        """Batches after this epoch that its workers may make; None if unknown, 0 if they are restarted for the next."""
        if self._fresh is not None and not self._fresh.may_keep():
            return 0
        left = self._count_left()
        return None if left.in_run is None or left.in_epoch is None else left.in_run - left.in_epoch

    def _count_draws(self) -> int | None:
        """Numbers that validation draws for its loaders before the next epoch; None if unknown."""
        trainer = self.trainer
        if not trainer.enable_validation:
            return 0
        if trainer.val_check_batch != trainer.num_training_batches or not trainer.check_val_every_n_epoch:
            return None
        if (trainer.current_epoch + 1) % trainer.check_val_every_n_epoch:
            return 0
        combined = getattr(trainer.fit_loop.epoch_loop.val_loop, "_combined_loader", None)
        counts = [None] if combined is None else list(map(_count_draws_of, combined.flattened))
        return None if None in counts else sum(filter(None, counts))

    # -- evidence -----------------------------------------------------------------------------------------------------

    def note_rounding(self) -> Mapping[str, Any]:
        """Weaken the settings whose samples are now known to be rounded differently. Returns no evidence."""
        for each in self._rounding:
            if (note := each.describe()) is not None:
                self._live.weaken(each.key, note)
        return {}

    def count(self) -> Mapping[str, Any]:
        """Report the highest number of live workers so far (they exit after an epoch's last batch, which a feed fetches
        early), why there are fewer than planned, their CPUs, and the time lost."""
        if self._drew.value:
            self._live.weaken("loader.num_workers", DREW)
        self.note_rounding()
        iterators = list(loader_state.find_iterators(self.trainer))
        if (workers := loader_state.find_workers(self.trainer)) is not None:
            alive = {worker.pid for worker in workers if worker.is_alive()}  # of all loaders
            self._most_alive = max(self._most_alive or 0, len(alive))
        cpus = min(
            (cpus for each in iterators if (cpus := loader_queue.count_worker_cpus(each)) is not None), default=None
        )
        fewer = [*([] if self._fewer is None else [self._fewer[1]]), *self._without.values()]
        return {
            "live_workers": self._most_alive,
            "fewer": "; ".join(fewer) or None,
            "worker_cpus": cpus,
            "loss_ms": None if self._tried is None else self._tried.loss_ms,
        }

    def collect_kept_evidence(self) -> Mapping[str, Any]:
        """Whether an epoch had the user's own workers of the one before; empty if no rung planned that."""
        if not self._keeps_theirs or self._fresh is None:
            return {}
        return {
            "kept": self._fresh.kept > 0,
            "restarted_because": self._fresh.reason or "no second epoch began with them",
        }

    def collect_growth_evidence(self) -> Mapping[str, Any]:
        """How the number of workers changed; empty if no rung planned more."""
        if self._more is None:
            return {}
        return {"more": self._more.change, "faster": self._more.is_faster, "theirs": self._tried is None}

    def collect_next_epoch_evidence(self) -> Mapping[str, Any]:
        """How many epochs began with batches made ahead, and whether an order was predicted wrong; empty if no order
        could be predicted."""
        if self._next is None or self._next.may_predict is not True:
            return {}
        alone = self._tried is None and self._more is None and not self._keeps_theirs
        return {"epochs_ahead": self._next.used, "order_differed": self._next.is_wrong, "only_ahead": alone}


def _describe(loader: Any, workers: int, most: int) -> str:
    """Describe what decides, beside the model, how many workers keep up."""
    kind = type(find_user_dataset(loader.dataset))
    size = f"{loader_queue.count_batches(loader)} batches of {loader.batch_size}"
    return f"{kind.__module__}.{kind.__qualname__}, {size}, {workers} to {most} workers"


def _count_draws_of(loader: Any) -> int | None:
    """Numbers that a validation loader draws from torch's global stream when it begins: a seed for its workers, and one
    for its order. None if unknown."""
    if not isinstance(loader, DataLoader):
        return None
    keeps = getattr(loader, "keeps_iterator", loader.persistent_workers)  # a LazyLoader may draw though workers stay
    is_begun = keeps and loader._iterator is not None
    seeds = int(loader.generator is None and not is_begun)
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return seeds + (sampler.generator is None)
    return seeds if type(sampler) in (SequentialSampler, DistributedSampler) else None


def _find_room(facts: Facts, plan: Plan) -> int | None:
    """Room for the batches of one rank's workers, beside what the plan keeps in shared memory; None if unknown."""
    for step in plan.planned:
        facts = facts.after(step.change.facts)
    return None if facts.batch_room_bytes is None else facts.batch_room_bytes // facts.local_ranks
