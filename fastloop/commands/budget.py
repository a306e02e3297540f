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
        before_s: what earlier calls have spent on the same thing.

    Attributes:
        reserve_s: wanted for what must come last. It is kept where it fits into what is left, and into the second half
            of all the time there was; else there is nothing to keep it for, and the whole budget is there for the way.
    """

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic, *, before_s: float = 0.0) -> None:
        self.total_s, self._before_s, self._clock, self._begun = total_s, before_s, clock, clock()
        self.reserve_s = 0.0

    def spent_s(self) -> float:
        return self._clock() - self._begun

    def left_s(self) -> float:
        """May be negative: there is a grace."""
        return self.total_s - self.spent_s()

    @property
    def kept_s(self) -> float:
        """Of what is left, for the end."""
        half_s = (self._before_s + self.total_s) / 2
        return self.reserve_s if self.reserve_s <= min(half_s, self.left_s() + GRACE_S) else 0.0

    def check(self, what: str, need_s: float, *, last: bool = False) -> None:
        """Raises Spent where `what` would not end in time; what comes `last` has the reserve and the grace too."""
        left = self.left_s() + GRACE_S if last else self.left_s() - self.kept_s
        if need_s > left or (left <= 0 and not last):
            raise Spent(f"{what} (about {need_s:.0f} s)" if need_s else what)

    def over(self) -> bool:
        """The grace has run out too: whatever still runs is to be stopped."""
        return self.left_s() < -GRACE_S

    def said(self) -> str:
        """What is left, for a line of progress."""
        left = max(0.0, self.left_s())
        return f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left"
