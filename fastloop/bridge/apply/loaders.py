"""The train loaders of a run: changed copies for the Trainer, with batch counters kept correct."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sized
from functools import partial
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.sampler import BatchSampler

from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.micro.accumulation import Merge
from fastloop.bridge.apply.site import LiveSite
from fastloop.bridge.apply.worker_processes import MOST_WORKERS, NEXT_EPOCH, WorkerProcesses
from fastloop.bridge.attributes import set_attribute
from fastloop.bridge.place.keeping import PlaceKeeper
from fastloop.errors import NotApplicable, describe
from fastloop.feeds.lazy_loader import (
    LazyLoader,
    begin_unchanged,
    bound_batches,
    clone,
    name_sampler,
    read_like_workers,
)
from fastloop.feeds.made_anew import watch_loader
from fastloop.feeds.place.kept_order import EpochPlace
from fastloop.feeds.window_batches import WindowDataset, WindowSampler, collate_window
from fastloop.feeds.workers.ending import end_workers
from fastloop.records.facts import Facts
from fastloop.records.measurement import CACHE_FILL
from fastloop.records.plan import Plan, Undo, changes_loader

_FETCHERS = "/loops/fetchers.py"
_LOOPS = "/loops/evaluation_loop.py", "/loops/fit_loop.py"
"""Lightning's file with the only code that requests batches from the train loaders, and the files whose loops set up
their data."""


class TrainLoaders:
    """Changes train loaders as they arrive (several, and again on reload) and remembers the user's originals.

    Args:
        place: keeps the run's position in its data.
        undo: receives a setting's key and the function that reverts its change.
        give_up: receives the key of a planned setting that turns out not to apply, and the reason; `is_refusal=False`
            if it could apply but is not worth it.
        by_ladder: rungs that a shipped ladder switched on; they must be worth their cost.
    """

    def __init__(
        self,
        site: LiveSite,
        live: LivePlan,
        *,
        place: PlaceKeeper,
        undo: Callable[[str, Undo], None],
        give_up: Callable[..., None],
        by_ladder: Collection[str],
    ) -> None:
        self.trainer, self.staging, self._undo, self._give_up = site.trainer, site.staging, undo, give_up
        self._site, self.place = site, place
        self._merge: Merge | None = None
        self._originals: dict[int, tuple[Any, Any]] = {}
        self._before_reload: dict[int, Any] = {}
        """The user's loaders before the last reload, by ours; each only as long as something else holds ours."""
        self._made: list[tuple[str, Any]] = []
        """Objects that change a dataset or replace a loader, each with its setting's key."""
        self._checked: Mapping[str, Any] = {}
        """Result of an engine's check."""
        self._workers = WorkerProcesses(
            site, live, give_up=give_up, is_training=is_called_by_fetcher, by_ladder=by_ladder
        )
        self._leaves = 0
        self._find_fetcher: Callable[[], Any] = lambda: None
        """Returns the fetcher that existed when Lightning last began to pass its train loaders."""
        self._plain_sizes: tuple[int, int] | None = None
        undo("loaders", self._give_back)

    @property
    def windows(self) -> WindowSampler | None:
        return self._merge.windows if self._merge else None

    @property
    def batch_sizes(self) -> tuple[int, int] | None:
        """Samples in a full batch and in an epoch's last batch; None if unknown."""
        return self._plain_sizes if self._leaves == 1 and self._merge is None else None

    def find_original(self, loader: Any) -> Any:
        """The user's loader if `loader` is one of ours (a CombinedLoader keeps those), else `loader` itself."""
        known = self._originals.get(id(loader))
        return self._before_reload.get(id(loader), loader) if known is None else known[1]

    def change(self, loader: Any, plan: Plan, facts: Facts) -> Any:
        """Return the loader with the planned changes; the user's object stays as it is."""
        self._count_leaf()
        if isinstance(loader, LazyLoader) and self.find_original(loader) is not loader:
            loader.take_back()
        loader = self.find_original(loader)
        self._plain_sizes = _read_plain_sizes(getattr(loader, "batch_sampler", None))
        if self._leaves > 1:
            self._drop_single_loader_changes(facts)
        asked = partial(self._count_asked, facts)
        bounded = bound_batches(loader, asked)
        base = self._keep_data_position(loader, plan, facts, bounded)
        settings = self._read_settings(loader, plan)
        epochs = self._workers.arrange(loader, plan, settings, facts)
        self._regroup(base, loader, plan, facts, settings)
        if "batch_sampler" not in settings and base is loader and bounded is not None and _reads_ahead(plan, settings):
            settings[name_sampler(loader)] = bounded
        copies = bool(settings) or (base is loader and "loader.engine" in plan.wants)
        changed = clone(base, settings) if copies else base
        engine = self._make_engine(changed, loader, plan)
        if getattr(engine, "has_one_thread_each", False):
            self._workers.compare_rounding("loader.engine", loader, facts)
        has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
        start: dict[str, Any] = {
            "keeps_iterator": bool(getattr(loader, "persistent_workers", False)),
            "epochs": epochs,
            "engine": engine,
            "at_once": lambda: has_workers and not self.trainer.fit_loop.restarting,
        }
        is_replaced = epochs is not begin_unchanged or engine is not None or base is not loader
        if (depth := plan.wants.get("feed.depth")) is not None and not (self._leaves > 1 and facts.transfer_hooks):
            self._undo("feed.depth", self.staging.take_over_first_hook(lambda: self.staging.is_ahead))
            changed = self.staging.feed(
                changed,
                depth,
                count=asked if bounded is None else lambda: None,  # else the bounded sampler ends the epoch
                watch=watch_loader(changed, loader),
                step_down=partial(self._workers.leave, "feed.depth"),
                **start,
            )
        elif is_replaced or "persistent_workers" in settings:
            changed = LazyLoader(changed, **start)
        if changed is not loader:
            self._originals[id(changed)] = (changed, loader)
        return changed

    def _keep_data_position(self, loader: Any, plan: Plan, facts: Facts, bounded: Any) -> Any:
        """Return a copy of the loader that keeps its position in its data, if that is possible, it is the only loader,
        and it will be changed; else the loader itself."""
        can_keep = facts.loader is not None and facts.loader.place_lost is None
        if self._leaves > 1 or not can_keep or not changes_loader(plan.wants):
            return loader
        return self.place.keep(self.trainer, loader, bounded)

    def _read_settings(self, loader: Any, plan: Plan) -> dict[str, Any]:
        """The planned arguments of a DataLoader, its dataset included."""
        settings = {
            key.removeprefix("loader."): value
            for key, value in plan.wants.items()
            if key.startswith("loader.") and key not in ("loader.window", "loader.engine", MOST_WORKERS, NEXT_EPOCH)
        }
        for key, value in plan.wants.items():
            if key.startswith("dataset."):
                self._wrap(key, value, loader, settings)
        return settings

    def _regroup(self, base: Any, loader: Any, plan: Plan, facts: Facts, settings: dict[str, Any]) -> None:
        """Merge accumulation windows into batches, or change the number of accumulated batches, if planned."""
        if (window := plan.wants.get("loader.window")) is not None:
            if self._leaves == 1:  # else merging was given up, and with it the number in its plan
                settings |= self._merge_windows(base, settings.get("dataset", loader.dataset), window, facts)
        elif (count := plan.wants.get("trainer.accumulate_grad_batches")) is not None:
            self._undo("trainer.accumulate_grad_batches", set_attribute(self.trainer, "accumulate_grad_batches", count))

    def _make_engine(self, changed: Any, loader: Any, plan: Plan) -> Any:
        """Make the engine that loads in place of the changed loader; None if none is planned."""
        if (planned := plan.wants.get("loader.engine")) is None:
            return None
        engine = self._keep("loader.engine", planned.make(changed))
        if self._merge is None:
            read_like_workers(engine, loader)
        if hasattr(engine, "wants_channels_last"):
            engine.wants_channels_last = self.staging.wants_channels_last
        if hasattr(engine, "step_down"):
            engine.step_down = partial(self._workers.leave, "loader.engine")
        return engine

    def check_engines(self, loader: Any, plan: Plan, plan_anew: Callable[[Plan, str], Plan]) -> Plan:
        """Have each engine that would replace the loader check the loader first; returns the plan that is left.

        Raises:
            NotApplicable: the plan stays the same although its engine was refused: another loader also has it.
        """
        while (why := self._find_engine_fault(loader, plan)) is not None:
            refused, plan = plan, plan_anew(plan, why)
            if plan == refused:
                raise NotApplicable(why)
        return plan

    def has_engine(self) -> bool:
        """Whether an engine loads in place of one of the loaders."""
        return any(key == "loader.engine" for key, _ in self._made)

    def _find_engine_fault(self, loader: Any, plan: Plan) -> str | None:
        """Have the engine that would replace the loader check it first; returns why that is impossible, or None."""
        engine: Any = plan.wants.get("loader.engine")
        if not hasattr(engine, "check"):
            return None
        try:
            self._checked = engine.check(self.find_original(loader), self._site.say)
        except Exception as error:  # from the user's dataset, which the check uses in an unusual way
            return describe(error)
        return None

    def _wrap(self, key: str, want: Any, loader: Any, settings: dict[str, Any]) -> None:
        """Replace the loader's dataset with one that `want` makes from it. ``evidence()`` and ``close()`` are methods
        of the want, because the new dataset may have the user's methods with these names."""
        finishes = hasattr(want, "finish")  # it leaves work to the device, for batches of one loader only
        if finishes and self._leaves > 1:
            return
        try:
            settings["dataset"] = want.wrap(settings.get("dataset", loader.dataset))
        except NotApplicable as reason:
            if finishes:  # loading batches ahead is worth it without that
                self._site.warn(f"images are sent as floats: {reason}")
            else:
                self._give_up(key, str(reason))
        else:
            self._keep(key, want)
            if hasattr(want, "read_fill_s"):
                self._site.one_time.follow(CACHE_FILL, want.read_fill_s)
            self.staging.to_floats = want.finish if finishes else self.staging.to_floats

    def _keep(self, key: str, made: Any) -> Any:
        """Register an object that changes a dataset or replaces a loader. It may have ``evidence()``, and ``close()``
        to end what it started."""
        self._made.append((key, made))
        if hasattr(made, "close"):
            self._undo(key, made.close)
        return made

    def _count_asked(self, facts: Facts) -> int | None:
        """Return how many batches Lightning will request in this epoch, or in the rest of it if the sampler starts
        anew: in a resumed run, or as the shorter of several loaders. None if that is unlimited, user code requests
        them, or windows are counted."""
        most = self.trainer.num_training_batches
        if math.isinf(most) or facts.steps_with_iterator or self._merge is not None or not is_called_by_fetcher():
            return None
        goes_on = self.place.saved is not None
        return int(most) - (0 if goes_on else self.trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _count_leaf(self) -> None:
        """Count a train loader: Lightning passes them one at a time, and all again when it reloads them."""
        # Each pass over all loaders ends with a new fetcher. Lightning's Tuner makes several in one epoch.
        fetcher = getattr(self.trainer.fit_loop, "_data_fetcher", None)
        if fetcher is not None and fetcher is not self._find_fetcher():
            self._find_fetcher, self._leaves = weakref.ref(fetcher), 0
            self._before_reload = {key: original for key, (_, original) in self._originals.items()}
            for key, (changed, _) in self._originals.items():
                weakref.finalize(changed, self._before_reload.pop, key, None).atexit = False
            self._originals = {}
            self.staging.retire_feeds()
        self._leaves += 1

    def _drop_single_loader_changes(self, facts: Facts) -> None:
        """Give up changes that support only one loader, now that there is another."""
        self.place.give_up()
        if self._merge is not None:
            self._merge.give_up()
            self._merge = None
            self._give_up("loader.window", "windows of several train loaders cannot be merged")
        if self.staging.feeds and facts.transfer_hooks:
            self.staging.retire_feeds()
            self._give_up(
                "feed.depth",
                "with several train loaders, your transfer hooks expect the batches of all of them at once",
            )

    def _merge_windows(self, loader: DataLoader[Any], dataset: Any, window: int, facts: Facts) -> dict[str, Any]:
        if self._merge is None:
            self._merge = Merge(self.trainer, window, undo=self._undo)
        if facts.transfer_hooks:  # the hooks still get the user's batches; their results are concatenated
            self._undo("loader.window", self.staging.take_over_first_hook(lambda: self.staging.is_ahead))
        data = WindowDataset(dataset, loader.collate_fn, concatenates=not facts.transfer_hooks)
        return {"batch_sampler": self._merge.make_sampler(loader), "dataset": data, "collate_fn": collate_window}

    def train_start(self) -> None:
        """Optimizers, schedulers and restored counters exist now."""
        behind = self.place.train_start(1 if self._merge is None else self._merge.window)
        if self._merge is not None:
            self._merge.train_start(behind)

    def read_place(self) -> EpochPlace | None:
        """The training's position in its data, for a checkpoint."""
        return self.place.read(int if self._merge is None else self._merge.count_batches)

    def clean_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write batch counters as a run without us would."""
        if self._merge is not None:
            self._merge.write_batch_counts(checkpoint)

    # -- evidence -------------------------------------------------------------------------------------------------

    def list_probes(self) -> list[tuple[str, Callable[[], Mapping[str, Any]]]]:
        """Evidence probes of the loaders, each with the key of its setting."""
        return [
            ("loader.num_workers", self._workers.count),
            ("loader.persistent_workers", self._workers.collect_kept_evidence),
            (MOST_WORKERS, self._workers.collect_growth_evidence),
            (NEXT_EPOCH, self._workers.collect_next_epoch_evidence),
            ("loader.pin_memory", self.staging.count_pinned),
            ("feed.depth", self.staging.count_ahead),
            ("loader.engine", lambda: self._checked),
            ("loader.engine", self._workers.note_rounding),
            *((key, each.evidence) for key, each in self._made if hasattr(type(each), "evidence")),
        ]

    def _give_back(self) -> None:
        """Put the user's loaders back into their CombinedLoader, which Lightning filled with ours."""
        self._workers.end()
        combined = getattr(self.trainer.fit_loop, "_combined_loader", None)
        if combined is not None and any(id(loader) in self._originals for loader in combined.flattened):
            combined.flattened = [self.find_original(loader) for loader in combined.flattened]
        for changed, _ in self._originals.values():  # Lightning ends only the workers of the loaders it holds now
            if (kept := getattr(changed, "_iterator", None)) is not None:
                end_workers(kept)
                changed._iterator = None
        # They also refer to us, and the reference cycle would keep their workers alive until garbage collection.
        self._originals, self._before_reload = {}, {}


def _reads_ahead(plan: Plan, settings: Mapping[str, Any]) -> bool:
    """Whether batches are requested before the training needs them."""
    return bool(settings.get("num_workers")) or not plan.wants.keys().isdisjoint(("feed.depth", "loader.engine"))


def is_called_by_fetcher() -> bool:
    """Whether this call comes from Lightning's fetcher, and not from a callback that reads the loader itself."""
    return _find_caller(_FETCHERS) is not None


def is_called_by_evaluation_loop() -> bool:
    """Whether this call comes from an evaluation loop that is setting up its data. The Trainer's stage does not show
    that: Lightning's BatchSizeFinder sets up validation while it trains."""
    return (_find_caller(_LOOPS) or "").endswith(_LOOPS[0])


def _find_caller(files: str | tuple[str, ...]) -> str | None:
    """The innermost file in the current call stack whose path ends with one of `files`; None if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith(files):
        frame = frame.f_back
    return None if frame is None else frame.f_code.co_filename


def _read_plain_sizes(sampler: Any) -> tuple[int, int] | None:
    """Sizes of a full batch and of an epoch's last one; None unless torch's own batch sampler makes them."""
    if type(sampler) is not BatchSampler or not isinstance(sampler.sampler, Sized):
        return None
    short = 0 if sampler.drop_last else len(sampler.sampler) % sampler.batch_size
    return sampler.batch_size, short or sampler.batch_size
