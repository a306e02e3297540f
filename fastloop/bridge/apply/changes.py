"""What rungs have changed in a run: how to take it back, what shows it, and what is not to stand in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastloop.errors import describe
from fastloop.records.plan import Applied

Probe = Callable[[], Mapping[str, Any]]


class Changes:
    """Every change with the rung that made it, in the order in which they were made.

    Args:
        warn: takes one line for the user that must not be missed.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._made: list[tuple[str, Applied]] = []
        self.evidence: dict[str, dict[str, Any]] = {}
        """By rung, what its probes have shown so far."""

    def __len__(self) -> int:
        return len(self._made)

    def add(self, rung: str, applied: Applied) -> None:
        """What a rung's action did."""
        self._made.append((rung, applied))

    def read(self, more: Iterable[tuple[str, Probe]] = ()) -> dict[str, dict[str, Any]]:
        """Ask every probe now; later answers are added to earlier ones."""
        for rung, probe in (*((rung, applied.probe) for rung, applied in self._made), *more):
            try:
                found = {key: value for key, value in probe().items() if value is not None}
            except Exception as error:  # evidence must never stop a training
                found = {"unreadable": describe(error)}
            if found:  # what only takes something back shows nothing
                self.evidence.setdefault(rung, {}).update(found)
        return self.evidence

    def clean(self, checkpoint: dict[str, Any]) -> None:
        """Take out of a checkpoint what a run without the rungs would not have written."""
        for _, applied in self._made:
            applied.clean(checkpoint)

    def undo(self, rung: str) -> None:
        """Take back all that a rung has done, the last first; nothing where it did nothing."""
        mine = [each for each in self._made if each[0] == rung]
        self._made = [each for each in self._made if each[0] != rung]
        self.evidence.pop(rung, None)
        for each in reversed(mine):
            self._undo_one(*each)

    def undo_down_to(self, count: int) -> None:
        """Take back all but the first changes, the last first. A failing undo is named and the others go on."""
        while len(self._made) > count:
            self._undo_one(*self._made.pop())

    def _undo_one(self, rung: str, applied: Applied) -> None:
        try:
            applied.undo()
        except Exception as error:
            self._warn(f"{rung} could not be undone: {type(error).__name__}: {error}")
