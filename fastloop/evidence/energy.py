"""Joules from a counter that steps: the difference of two readings, and how far off that may be."""

from __future__ import annotations

from statistics import median

LEAST_S = 10.0
"""Over a shorter window the counter's steps are too coarse a ruler."""
ENOUGH_STEPS = 5


class EnergyCounter:
    """Readings of a total in millijoules. It is renewed every so often, so each reading is old by up to one period."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None
        self._step_at: float | None = None
        self._gaps: list[float] = []
        self._broken = False

    def add(self, at_s: float, millijoule: int | None) -> None:
        """Take a reading; None where the driver gave none, and then there is no sum."""
        if millijoule is None:
            self._broken = True
            return
        if self._first is None or self._last is None:
            self._first = self._last = (at_s, millijoule)
            return
        if millijoule < self._last[1]:  # a reloaded driver begins at 0 again
            self._broken = True
        if millijoule != self._last[1]:
            if self._step_at is not None and not self.period_known:
                self._gaps.append(at_s - self._step_at)
            self._step_at = at_s
        self._last = (at_s, millijoule)

    @property
    def period_known(self) -> bool:
        """Enough steps were seen to say how often the counter is renewed."""
        return len(self._gaps) >= ENOUGH_STEPS

    @property
    def readable(self) -> bool:
        return not self._broken

    @property
    def seconds(self) -> float:
        """From the first reading to the last."""
        return 0.0 if self._first is None or self._last is None else self._last[0] - self._first[0]

    def joule(self) -> float | None:
        """Energy between the first and the last reading; None under ten seconds, and where the counter stood still,
        ran backwards or could not be read."""
        if self._broken or self._first is None or self._last is None or self.seconds < LEAST_S:
            return None
        used = self._last[1] - self._first[1]
        return used / 1e3 if used > 0 else None

    def error_pct(self) -> float | None:
        """Error of ``joule`` from the counter's period alone, in percent: one period in the whole window.

        The sensor's own accuracy comes on top. None where no two steps were seen.
        """
        if not self._gaps or not self.seconds:
            return None
        return 100 * median(self._gaps) / self.seconds
