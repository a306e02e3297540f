"""Readings over time in fixed memory: rows that merge in pairs if there are too many, the mean of all readings, and the
joules between two readings of an energy counter."""

from __future__ import annotations

from collections.abc import Mapping

MOST_ROWS = 600


class Mean:
    """Means weighted by the time that each reading covers. A None reading has no weight."""

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
        return {
            name: round(total / self._seconds[name], 4) if self._seconds[name] > 0 else None
            for name, total in self._sums.items()
        }


class Timeline:
    """At most 600 rows, evenly spaced: at the 600th, neighbors merge in pairs, and later rows cover twice the time."""

    def __init__(self) -> None:
        self.mean = Mean()
        """The mean of all readings."""
        self.readings_per_row = 1
        self._rows: list[tuple[float, Mean]] = []
        self._open = Mean()
        self._in_open = 0

    def add(self, t_s: float, seconds: float, values: Mapping[str, float | None]) -> None:
        """Add a reading at ``t_s`` that covers the ``seconds`` before it."""
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


# Joules from a counter that advances in steps: the difference of two readings.

LEAST_S = 10.0
"""In a shorter window the counter's steps are too coarse."""


class EnergyCounter:
    """Readings of a total in millijoules, which is updated periodically, so each may be one period old."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None
        self._readable = True
        """False once a reading was missing or decreased."""

    def add(self, at_s: float, millijoule: int | None) -> None:
        """Add a reading; None if the driver gave none, which makes the sum unavailable."""
        if millijoule is None:
            self._readable = False
            return
        if self._first is None or self._last is None:
            self._first = self._last = (at_s, millijoule)
            return
        if millijoule < self._last[1]:  # a reloaded driver starts at 0 again
            self._readable = False
        self._last = (at_s, millijoule)

    def joule(self) -> float | None:
        """Energy between the first and the last reading; None under ten seconds, and if the counter did not change,
        decreased or could not be read."""
        if not self._readable or self._first is None or self._last is None or self._last[0] - self._first[0] < LEAST_S:
            return None
        used = self._last[1] - self._first[1]
        return used / 1e3 if used > 0 else None
