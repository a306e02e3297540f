"""Notices when a dataset's transforms are changed during the training, as progressive resizing does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastloop.errors import describe
from fastloop.feeds.dali.graph import DaliResources
from fastloop.feeds.dali.pictures import find_obstacle
from fastloop.feeds.dali.pixels import check_pixels
from fastloop.feeds.images.reading import ImageSource, NotImages, read_source
from fastloop.records.images import ImageStep

MOST_CHANGES = 3
"""Changes in an epoch after which its other batches come from the dataset: a new pipeline costs more than it saves."""


class StepsWatch:
    """Reads a dataset's transforms again, as often as a plain run would see a change: without workers at each batch,
    with workers at the start of each epoch, with persistent workers at their start.

    Args:
        loader: the loader whose workers a plain run would start.
        steps: those that DALI was planned with.
    """

    def __init__(self, loader: Any, dataset: Any, source: ImageSource, steps: Sequence[ImageStep]) -> None:
        self._has_workers, self._stay = bool(loader.num_workers), bool(loader.persistent_workers)
        self._dataset, self.source, self.steps = dataset, source, tuple(steps)
        self.obstacle: str | None = None
        """Why DALI cannot make the batches now; None if it can."""
        self._seen: Any = (self.steps, source.unknown)
        self._epochs = self._changes = 0

    def look(self, machine: DaliResources, *, begins: bool) -> bool:
        """Read the transforms if they may have changed; return whether they have. Check new ones like the first.

        Args:
            begins: whether an epoch begins.
        """
        self._epochs += begins
        self._changes = 0 if begins else self._changes
        if (self._has_workers and not begins) or (self._has_workers and self._stay and self._epochs > 1):
            return False
        source = self._read()
        seen = source if isinstance(source, str) else (source.facts.steps, source.unknown)
        if seen == self._seen and not (begins and self.obstacle == _TOO_OFTEN):
            return False
        self._seen, self._changes = seen, self._changes + 1
        if isinstance(source, str):
            self.obstacle = f"the dataset was changed: {source}"
            return True
        self.source, self.steps = source, source.facts.steps
        self.obstacle = _TOO_OFTEN if self._changes > MOST_CHANGES else self._check(source, machine)
        return True

    def _read(self) -> ImageSource | str:
        try:
            return read_source(self._dataset)
        except NotImages as reason:
            return str(reason)
        except Exception as error:  # from the user's dataset
            return describe(error)

    def _check(self, source: ImageSource, machine: DaliResources) -> str | None:
        """Return why DALI cannot apply the new transforms; None if it can."""
        try:
            why = find_obstacle(source.facts)
            if why is None:
                check_pixels(self._dataset, source, source.facts.steps, machine)
        except Exception as error:
            why = describe(error)
        return None if why is None else f"the transforms were changed: {why}"


_TOO_OFTEN = f"the transforms were changed more than {MOST_CHANGES} times in an epoch"
