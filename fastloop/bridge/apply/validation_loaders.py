"""Replaces validation loaders with a rung's engine, if requested. They arrive before the train loader is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fastloop.bridge.apply import read_facts
from fastloop.bridge.apply.site import LiveSite
from fastloop.errors import describe
from fastloop.feeds.lazy_loader import LazyLoader, clone, read_like_workers

ENGINE = "evaluation.engine"
"""The key of the engine that replaces them."""


class ValidationLoaders:
    """Gives each validation loader an engine, and takes it away again.

    Args:
        name: the rung's name.
        rung: plans the engine.
        say: receives a line about progress.
        warn: receives a line that the user must not miss.
    """

    def __init__(
        self, site: LiveSite, name: str, rung: Any, *, say: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._site, self.name, self._rung, self._say, self._warn = site, name, rung, say, warn
        self._made: list[tuple[LazyLoader, Any, Any]] = []
        """Our loader, the user's, and the engine."""
        self._why: str | None = None

    def change(self, loader: Any) -> Any:
        """Return a replacement whose batches the engine makes; the loader itself if the rung has no engine for it, or
        (with a warning) if replacing it fails."""
        loader = next((own for ours, own, _ in self._made if ours is loader), loader)
        others = [self._site.module, *self._site.trainer.callbacks]
        try:
            read = read_facts.read_loader_facts(loader, others=others)
            want = self._rung.plan(dataclasses.replace(self._site.facts, loader=read, evaluates=True)).wants.get(ENGINE)
            if want is None:
                return loader
            want.check(loader, self._say)
            twin = clone(loader, {})
            engine = want.make(twin)
        except Exception as error:
            self._why = describe(error)
            self._warn(f"{self.name} leaves a validation loader as it is: {self._why}")
            return loader
        if hasattr(engine, "wants_channels_last"):
            engine.wants_channels_last = self._site.staging.wants_channels_last
        read_like_workers(engine, loader)
        how: dict[str, Any] = {"keeps_iterator": loader.persistent_workers, "at_once": lambda: loader.num_workers > 0}
        ours = LazyLoader(twin, engine=engine, **how)
        self._made.append((ours, loader, engine))
        return self._made[-1][0]

    def evidence(self) -> Mapping[str, Any]:
        """What the engines loaded for validation."""
        found = [engine.evidence() for *_, engine in self._made]
        whys = [self._why, *(each.get("why_plain") for each in found)]
        counts = {f"validation_{key}": sum(each.get(key, 0) for each in found) for key in ("images", "row_batches")}
        return counts | {"validation_why_plain": next(filter(None, whys), None)}

    def give_back(self) -> None:
        """Hand the user's loaders back to Lightning; ours load without an engine from their next start on."""
        known = {id(ours): own for ours, own, _ in self._made}
        for ours, _, engine in self._made:
            ours.engine = None
            if hasattr(engine, "close"):
                engine.close()
        self._made = []
        for loop in (self._site.trainer.fit_loop.epoch_loop.val_loop, self._site.trainer.validate_loop):
            combined = getattr(loop, "_combined_loader", None)  # no public way to put them back
            if combined is not None:
                combined.flattened = [known.get(id(each), each) for each in combined.flattened]
