"""Replaces validation loaders, if a rung requests that. They arrive before the train loader is known."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar

from fastloop.bridge.apply import read_facts
from fastloop.bridge.apply.changes import Changes
from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.loaders import is_called_by_fetcher
from fastloop.bridge.apply.site import LiveSite
from fastloop.errors import describe
from fastloop.feeds.lazy_loader import LazyLoader, clone, read_like_workers
from fastloop.feeds.workers.ending import end_workers
from fastloop.feeds.workers.fresh_workers import FreshWorkers
from fastloop.feeds.workers.read_twice import ReadTwice
from fastloop.records.facts import LoaderFacts
from fastloop.records.plan import Applied


class ValidationLoaders(ABC):
    """Replaces each validation loader as one rung requests, and hands the user's back.

    Args:
        name: the rung's name.
    """

    KEY: ClassVar[str]
    """The setting that requests it."""

    def __init__(self, site: LiveSite, live: LivePlan, name: str) -> None:
        self._site, self._live, self.name, self._rung = site, live, name, getattr(live.ladder, name)
        self._made: list[tuple[LazyLoader, Any, Any]] = []
        """Our loader, the user's, and the engine if there is one."""
        self._why: str | None = None

    def find_original(self, loader: Any) -> Any:
        """The user's loader if `loader` is one of ours, else `loader` itself."""
        return next((own for ours, own, _ in self._made if ours is loader), loader)

    def change(self, loader: Any, read: Callable[[], LoaderFacts]) -> Any:
        """Return a replacement; the loader itself if the rung requests none, or (with a warning) if that fails.

        Args:
            read: returns the loader's facts.
        """
        try:
            facts = dataclasses.replace(self._site.facts, loader=read(), evaluates=True)
            want = self._rung.plan(facts).wants.get(self.KEY)
            if want is None:
                return loader
            ours, engine = self._replace(loader, want)
        except Exception as error:
            self._why = describe(error)
            self._site.warn(f"{self.name} leaves a validation loader as it is: {self._why}")
            return loader
        self._made.append((ours, loader, engine))
        return ours

    @abstractmethod
    def _replace(self, loader: Any, want: Any) -> tuple[LazyLoader, Any]:
        """Return the replacement, and its engine if it has one."""

    @abstractmethod
    def evidence(self) -> Mapping[str, Any]:
        """Return what the replacements did."""

    def give_back(self) -> None:
        """Hand the user's loaders back to Lightning; ours load like them from their next start on."""
        known = {id(ours): own for ours, own, _ in self._made}
        for ours, own, engine in self._made:
            ours.engine = None
            if hasattr(engine, "close"):
                engine.close()
            ours.inner.__dict__["persistent_workers"] = own.persistent_workers
            if (kept := ours.inner._iterator) is not None:
                end_workers(kept)
                ours.inner._iterator = None
        self._made = []
        for loop in (self._site.trainer.fit_loop.epoch_loop.val_loop, self._site.trainer.validate_loop):
            combined = getattr(loop, "_combined_loader", None)  # no public way to put them back
            if combined is not None:
                combined.flattened = [known.get(id(each), each) for each in combined.flattened]


class ValidationEngines(ValidationLoaders):
    """Has a rung's engine make the batches."""

    KEY = "evaluation.engine"

    def _replace(self, loader: Any, want: Any) -> tuple[LazyLoader, Any]:
        want.check(loader, self._site.say)
        twin = clone(loader, {})
        engine = want.make(twin)
        if hasattr(engine, "wants_channels_last"):
            engine.wants_channels_last = self._site.staging.wants_channels_last
        read_like_workers(engine, loader)
        ours = LazyLoader(
            twin,
            engine=engine,
            keeps_iterator=loader.persistent_workers,
            at_once=lambda: bool(loader.num_workers > 0),
        )
        return ours, engine

    def evidence(self) -> Mapping[str, Any]:
        """What the engines loaded for validation."""
        found = [engine.evidence() for *_, engine in self._made]
        whys = [self._why, *(each.get("why_plain") for each in found)]
        counts = {f"validation_{key}": sum(each.get(key, 0) for each in found) for key in ("images", "row_batches")}
        return counts | {"validation_why_plain": next(filter(None, whys), None)}


class ValidationWorkers(ValidationLoaders):
    """Keeps the user's workers between validations. The loader still draws a seed for each, as it did before."""

    KEY = "evaluation.persistent_workers"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._fresh: list[FreshWorkers] = []
        self._twice: list[ReadTwice] = []

    @property
    def count(self) -> int:
        """How many workers the changed loaders have together."""
        return sum(own.num_workers for _, own, _ in self._made)

    def _replace(self, loader: Any, want: bool) -> tuple[LazyLoader, Any]:
        self._twice.append(twice := ReadTwice(loader))
        self._fresh.append(fresh := FreshWorkers(tell=self._site.say, twice=twice))
        return LazyLoader(clone(loader, {}), at_once=lambda: True, epochs=partial(self._begin, fresh)), None

    def _begin(self, fresh: FreshWorkers, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Start a validation. No workers are kept from the sanity check, which leaves batches behind in shared memory,
        and by code other than Lightning's loop, which may read the loader while a validation does."""
        if is_called_by_fetcher() and not self._site.trainer.sanity_checking:
            loader.__dict__["persistent_workers"] = True
            return fresh.batches(loader, begin)
        kept, loader.__dict__["_iterator"] = loader._iterator, None
        loader.__dict__["persistent_workers"] = False
        try:
            return begin()
        finally:
            loader.__dict__.update(_iterator=kept, persistent_workers=kept is not None)

    def give_back(self) -> None:
        for twice in self._twice:
            twice.end()
        super().give_back()

    def evidence(self) -> Mapping[str, Any]:
        """Whether validations had the workers of the one before; empty if no loader was changed."""
        if not self._made:
            return {}
        alone = set(self._live.list_wants(self.name)) == {self.KEY}
        kept = any(fresh.kept for fresh in self._fresh)
        return {"validation_workers": self.count, "validation_kept": kept, "only_validation": alone}


class Validation:
    """All that the rungs of a ladder replace for validation."""

    def __init__(self, site: LiveSite, live: LivePlan, changes: Changes) -> None:
        self._site, self._live, self._made = site, live, list[ValidationLoaders]()
        for kind in (ValidationEngines, ValidationWorkers):
            if (name := live.may_want.owner(kind.KEY)) is not None:
                self._made.append(made := kind(site, live, name))
                changes.add(name, Applied(undo=made.give_back, probe=made.evidence))

    def change(self, loader: Any) -> Any:
        """Return the loader that Lightning should use: a replacement that a rung requests, or the user's."""
        for made in self._made:
            loader = made.find_original(loader)
        others = read_facts.list_hook_owners(self._site.trainer)
        read = cache(lambda: read_facts.read_loader_facts(loader, others=others))
        for made in self._made:
            step = self._live.plan.step(made.name)
            is_on = step is not None and step.status != "skipped"
            if is_on and (changed := made.change(loader, read)) is not loader:
                return changed
        return loader

    def give_back_unplanned(self) -> None:
        """Training begins: hand back the loaders of rungs that do not apply to it."""
        for made in self._made:
            if self._live.plan.step(made.name) not in self._live.plan.planned:
                made.give_back()

    def give_back(self, rung: str) -> None:
        """Hand back the loaders of a rung that was given up."""
        for made in self._made:
            if made.name == rung:
                made.give_back()

    def count_kept_workers(self) -> int:
        """How many of the user's workers stay between validations."""
        return sum(made.count for made in self._made if isinstance(made, ValidationWorkers))
