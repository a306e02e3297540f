"""Validation loaders that a rung's engine replaces, if requested. They come before the train loader is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from fastloop.bridge.apply import read_facts
from fastloop.bridge.apply.site import LiveSite
from fastloop.errors import describe
from fastloop.feeds.lazy_loader import LazyLoader, clone

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
        """A replacement whose batches the engine makes; if that is impossible, the loader itself, with a warning."""
        loader = next((own for ours, own, _ in self._made if ours is loader), loader)
        facts = dataclasses.replace(self._site.facts, loader=read_facts.read_loader_facts(loader), evaluates=True)
        try:
            want = self._rung.plan(facts).wants[ENGINE]
            want.check(loader, self._say)
        except Exception as error:
            self._why = describe(error)
            self._warn(f"{self.name} leaves a validation loader as it is: {self._why}")
            return loader
        assert isinstance(loader, DataLoader)
        twin = clone(loader, {})
        engine = want.make(twin)
        engine.wants_channels_last = self._site.staging.wants_channels_last
        self._made.append((LazyLoader(twin, engine=engine), loader, engine))
        return self._made[-1][0]

    def evidence(self) -> Mapping[str, Any]:
        """What the engines loaded for validation."""
        found = [engine.evidence() for *_, engine in self._made]
        whys = [self._why, *(each["why_plain"] for each in found)]
        return {
            "validation_images": sum(each["images"] for each in found),
            "validation_why_plain": next(filter(None, whys), None),
        }

    def give_back(self) -> None:
        """Let the user's loaders load without an engine from their next start on, and hand them back to Lightning."""
        known = {id(ours): own for ours, own, _ in self._made}
        for ours, _, engine in self._made:
            ours.engine = None
            engine.close()
        self._made = []
        for loop in (self._site.trainer.fit_loop.epoch_loop.val_loop, self._site.trainer.validate_loop):
            combined = getattr(loop, "_combined_loader", None)  # no public way to put them back
            if combined is not None:
                combined.flattened = [known.get(id(each), each) for each in combined.flattened]
