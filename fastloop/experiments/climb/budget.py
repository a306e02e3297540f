"""The time a command may take. Nothing is begun that cannot end in it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

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

    def describe_left(self) -> str:
        """What is left, for a line of progress."""
        left = max(0.0, self.left_s())
        return f"{left / 60:.0f} min of the budget left" if left >= 90 else f"{left:.0f} s of the budget left"


# -- how long the trainings of a climb are. A naive step can take a second, and a start ten: steps are not free --------

FEWEST_STEPS = 10
"""In a window."""
WINDOW_S = 4.0
"""What a window lasts for the faster of two stacks."""
LONGEST_S = 40.0
"""And for the slower one at most, unless it takes that for the fewest steps."""
SCREEN_S = 12.0
"""For the slower one of a screen: where two are far apart, a short window tells them apart."""
WARMUP_S = 3.0
"""After so long a device has its clocks; a compile takes longer, but only steps count."""
FILL_S = 10.0
"""Longer than that queues are not waited for to fill, where they can be read."""
LEAST_WARMUP = 3
"""Steps: shapes, autotuning and compilation show in the first two."""
QUEUES = 10
"""Times that the queued batches must have passed, see `Measurement.window_too_short`."""
FILLS = 2
"""And in a screen whose queues can be looked into: a rate leaves out what lay ready in them, so what is left of their
error is the batches that workers are in the middle of, half of what the queues hold at most."""
GRADIENT_STEPS = 10
"""As long as a trial of a gradient takes besides its start: it makes its step several times, in slower kernels."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """Optimizer steps of one training."""

    warmup: int
    window: int

    @property
    def steps(self) -> int:
        return self.warmup + self.window + 1  # the step in which a window begins is not one of it

    def seconds(self, step_ms: float, start_s: float) -> float:
        """What a training of this length takes, start and end included."""
        return start_s + self.steps * step_ms / 1e3

    def up_to(self, ends_at: int | None) -> Length:
        """The same of a training that ends by itself after so many steps, of which a third at most are warm-up; never
        fewer than `LEAST_WARMUP` and `FEWEST_STEPS` in a window."""
        if ends_at is None or self.steps <= ends_at:
            return self
        warm = min(self.warmup, max(LEAST_WARMUP, ends_at // 3))
        return Length(warmup=warm, window=max(FEWEST_STEPS, ends_at - warm - 1))


PILOT = Length(warmup=5, window=10)
"""The first training of all, whose steps may take a millisecond or three seconds."""


def estimate_gradient_s(step_ms: float, start_s: float) -> float:
    """What a trial of the gradient of such a step takes."""
    return start_s + GRADIENT_STEPS * step_ms / 1e3


def choose_length(
    fast_ms: float,
    slow_ms: float,
    *,
    queued: int,
    batches_per_step: float,
    warmup: int,
    screen: bool = False,
    fill_read: bool = False,
) -> Length:
    """Of trainings that are to be compared, all alike: the number of steps can decide over learning rates.

    Args:
        fast_ms: a step of the fastest of them, as far as known; ``slow_ms`` of the slowest.
        queued: batches that workers and device feeds hold ready, the most of them.
        warmup: optimizer steps as configured: more is not done, unless the queues need it.
        screen: it decides what is worth a proof, and is none itself.
        fill_read: what lies ready in the queues can be read, so it is left out of the rates.
    """
    to_fill = math.ceil(queued / batches_per_step)
    if fill_read:
        to_fill = min(to_fill, math.ceil(1e3 * FILL_S / slow_ms))
    warm = max(LEAST_WARMUP, to_fill, min(warmup, math.ceil(1e3 * WARMUP_S / slow_ms)))
    by_time = min(math.ceil(1e3 * WINDOW_S / fast_ms), int(1e3 * (SCREEN_S if screen else LONGEST_S) / slow_ms))
    fills = FILLS if screen and fill_read else QUEUES
    by_queue = min(math.ceil(fills * queued / batches_per_step), int(1e3 * LONGEST_S / slow_ms))
    return Length(warmup=warm, window=max(FEWEST_STEPS, by_time, by_queue))
