"""What rungs have changed in a run: how to take it back, what shows it, and what is not to stand in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastloop.errors import NotApplicable, let_through
from fastloop.records.plan import Applied, Undo

Probe = Callable[[], Mapping[str, Any]]


class Changes:
    """Every change with the rung that made it, in the order in which they were made.

    Args:
        warn: takes one line for the user that must not be missed.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._undos: list[tuple[str, Undo]] = []
        self._probes: list[tuple[str, Probe]] = []
        self._cleans: list[tuple[str, Callable[[dict[str, Any]], None]]] = []
        self.evidence: dict[str, dict[str, Any]] = {}
        """By rung, what its probes have shown so far."""

    def __len__(self) -> int:
        return len(self._undos)

    def add(self, rung: str, applied: Applied) -> None:
        """What a rung's action did."""
        self._undos.append((rung, applied.undo))
        self._probes.append((rung, applied.probe))
        self._cleans.append((rung, applied.clean))

    def add_undo(self, rung: str, undo: Undo) -> None:
        """One more thing to take back, with nothing to show for it."""
        self._undos.append((rung, undo))

    def add_probe(self, rung: str, probe: Probe) -> None:
        """One more thing that shows a rung at work."""
        self._probes.append((rung, probe))

    def read(self, more: Iterable[tuple[str, Probe]] = ()) -> dict[str, dict[str, Any]]:
        """Ask every probe now; later answers are added to earlier ones."""
        for rung, probe in (*self._probes, *more):
            try:
                found = {key: value for key, value in probe().items() if value is not None}
            except Exception as error:  # evidence must never stop a training
                let_through(error)
                found = {"unreadable": describe(error)}
            self.evidence.setdefault(rung, {}).update(found)
        return self.evidence

    def clean(self, checkpoint: dict[str, Any]) -> None:
        """Take out of a checkpoint what a run without the rungs would not have written."""
        for _, clean in self._cleans:
            clean(checkpoint)

    def undo(self, rung: str) -> None:
        """Take back all that a rung has done, the last first; nothing where it did nothing."""
        mine = [undo for owner, undo in self._undos if owner == rung]
        self._undos = [each for each in self._undos if each[0] != rung]
        self._probes = [each for each in self._probes if each[0] != rung]
        self._cleans = [each for each in self._cleans if each[0] != rung]
        self.evidence.pop(rung, None)
        for undo in reversed(mine):
            self._undo_one(rung, undo)

    def undo_down_to(self, count: int) -> None:
        """Take back all but the first changes, the last first. A failing undo is named and the others go on."""
        while len(self._undos) > count:
            self._undo_one(*self._undos.pop())

    def undo_all(self) -> None:
        """Take everything back. Idempotent; the evidence stays."""
        self.undo_down_to(0)
        self._probes.clear()
        self._cleans.clear()

    def _undo_one(self, rung: str, undo: Undo) -> None:
        try:
            undo()
        except Exception as error:
            self._warn(f"{rung} could not be undone: {describe(error)}")


def describe(error: Exception) -> str:
    """One line: the reason itself where a rung gave one."""
    return str(error) if isinstance(error, NotApplicable) else f"{type(error).__name__}: {error}"
