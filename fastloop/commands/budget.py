"""The time a command may take. Nothing is begun that cannot end in it."""

from __future__ import annotations

import time
from collections.abc import Callable

GRACE_S = 30.0
"""An estimate may be wrong by so much: after the end of the budget a training is stopped only then."""


class Spent(Exception):
    """The budget does not hold what was to come next."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(what)


class Budget:
    """Seconds of wall-clock time, counted from now.

    Args:
        reserve_s: kept for what must come last; at most half of the budget, so that a short one gets somewhere too.
    """

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_s, self._clock, self._begun, self.reserve_s = total_s, clock, clock(), 0.0

    def spent_s(self) -> float:
        return self._clock() - self._begun

    def left_s(self) -> float:
        """May be negative: there is a grace."""
        return self.total_s - self.spent_s()

    def check(self, what: str, need_s: float, *, last: bool = False) -> None:
        """Raises Spent where `what` would not end in time; the reserve is there for what comes `last` only."""
        reserve = 0.0 if last else min(self.reserve_s, self.total_s / 2)
        left = self.left_s() - reserve
        if left <= 0 or need_s > left:
            raise Spent(f"{what} (about {need_s:.0f} s)" if need_s else what)

    def over(self) -> bool:
        """The grace has run out too: whatever still runs is to be stopped."""
        return self.left_s() < -GRACE_S

    def said(self) -> str:
        """What is left, for a line of progress."""
        left = max(0.0, self.left_s())
        return f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left"
