"""What rungs have changed in a run: how to undo it, what shows it, and what to keep out of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastloop.errors import describe
from fastloop.records.plan import Applied

Probe = Callable[[], Mapping[str, Any]]


class Changes:
    """Every change with the rung that made it, in the order in which they were made.

    Args:
        warn: receives a line that the user must not miss.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._made: list[tuple[str, Applied]] = []
        self.evidence: dict[str, dict[str, Any]] = {}
        """What the probes have shown so far, by rung."""

    def __len__(self) -> int:
        return len(self._made)

    def add(self, rung: str, applied: Applied) -> None:
        """Record what a rung's action did."""
        self._made.append((rung, applied))

    def holds(self, rung: str) -> bool:
        """Whether the rung has made changes that are not undone."""
        return any(each == rung for each, _ in self._made)

    def read(self, more: Iterable[tuple[str, Probe]] = ()) -> dict[str, dict[str, Any]]:
        """Read every probe now; later readings are merged into earlier ones."""
        for rung, probe in (*((rung, applied.probe) for rung, applied in self._made), *more):
            try:
                found = {key: value for key, value in probe().items() if value is not None}
            except Exception as error:  # evidence must never stop a training
                found = {"unreadable": describe(error)}
            if found:  # a change with only an undo shows nothing
                self.evidence.setdefault(rung, {}).update(found)
        return self.evidence

    def clean(self, checkpoint: dict[str, Any]) -> None:
        """Remove from a checkpoint what a run without the rungs would not have written."""
        for _, applied in self._made:
            applied.clean(checkpoint)

    def undo(self, rung: str) -> None:
        """Undo all changes of a rung, the last one first; does nothing if it made none."""
        mine = [each for each in self._made if each[0] == rung]
        self._made = [each for each in self._made if each[0] != rung]
        self.evidence.pop(rung, None)
        for each in reversed(mine):
            self._undo_one(*each)

    def undo_down_to(self, count: int) -> None:
        """Undo all but the first `count` changes, the last one first. A failing undo is reported; the others go on."""
        while len(self._made) > count:
            self._undo_one(*self._made.pop())

    def _undo_one(self, rung: str, applied: Applied) -> None:
        try:
            applied.undo()
        except Exception as error:
            self._warn(f"{rung} could not be undone: {type(error).__name__}: {error}")
