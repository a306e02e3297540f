"""Readings over time in fixed memory: rows that merge two by two when there are too many, and the mean of them all."""

from __future__ import annotations

from collections.abc import Mapping

MOST_ROWS = 600


class Mean:
    """Means weighted by the time each reading stands for. A reading that is None has no weight."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def add(self, values: Mapping[str, float | None], seconds: float) -> None:
        for name, value in values.items():
            weight = 0.0 if value is None else seconds
            self._sums[name] = self._sums.get(name, 0.0) + (value or 0.0) * weight
            self._seconds[name] = self._seconds.get(name, 0.0) + weight

    def absorb(self, other: Mean) -> None:
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._seconds[name] = self._seconds.get(name, 0.0) + other._seconds[name]

    def values(self) -> dict[str, float | None]:
        return {name: round(total / self._seconds[name], 4) if self._seconds[name] > 0 else None
                for name, total in self._sums.items()}  # fmt: skip


class Timeline:
    """At most 600 rows, evenly spaced: at the 600th every two become one, and later rows cover twice the time."""

    def __init__(self) -> None:
        self.mean = Mean()
        """Of everything that was added."""
        self.readings_per_row = 1
        self._rows: list[tuple[float, Mean]] = []
        self._open = Mean()
        self._in_open = 0

    def add(self, t_s: float, seconds: float, values: Mapping[str, float | None]) -> None:
        """Add what was read at ``t_s``, standing for the ``seconds`` before it."""
        self.mean.add(values, seconds)
        self._open.add(values, seconds)
        self._in_open += 1
        self._t_s = t_s
        if self._in_open == self.readings_per_row:
            self._rows.append((t_s, self._open))
            self._open, self._in_open = Mean(), 0
            if len(self._rows) == MOST_ROWS:
                self._halve()

    def rows(self) -> tuple[dict[str, float | None], ...]:
        """``t_s``, the end of the row's time, and its means."""
        rows = self._rows + ([(self._t_s, self._open)] if self._in_open else [])
        return tuple({"t_s": round(t_s, 3), **mean.values()} for t_s, mean in rows)

    def _halve(self) -> None:
        merged = []
        for (_, first), (t_s, second) in zip(self._rows[::2], self._rows[1::2], strict=True):
            first.absorb(second)
            merged.append((t_s, first))
        self._rows = merged
        self.readings_per_row *= 2
