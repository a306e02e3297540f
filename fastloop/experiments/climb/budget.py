"""The time budget of a command. Nothing is started that is not expected to finish within it; the last step may overrun
it by GRACE_S."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

GRACE_S = 30.0
"""Allowance for wrong estimates: a training is stopped only this long after the end of the budget."""


class Spent(Exception):
    """The next step does not fit into the budget."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(what)


class ClimbBudget:
    """Seconds of wall-clock time, counted from now.

    Attributes:
        reserves_s: seconds that the last step would take, one figure for each way to do it. The largest that still fits
            is kept for it; if none fits, the whole budget goes to the steps before it.
    """

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_s, self._clock, self._begun = total_s, clock, clock()
        self.reserves_s: tuple[float, ...] = ()
        self._spared_s = 0.0
        """Seconds that the current step may not take from the last one."""

    def spent_s(self) -> float:
        return self._clock() - self._begun

    def reserve(self, *seconds: float) -> None:
        """Keep time for the last step: the largest of these that still fits, or none."""
        self.reserves_s = seconds

    def left_s(self) -> float:
        """Seconds left; negative during the grace period."""
        return self.total_s - self.spent_s()

    def _list_kept_s(self) -> list[float]:
        """List the reserves that still fit into the remaining time."""
        left_s = self.left_s() + GRACE_S
        return [seconds for seconds in self.reserves_s if seconds <= left_s]

    @property
    def kept_s(self) -> float:
        """Seconds of the remaining time that are kept for the last step."""
        return max(self._list_kept_s(), default=0.0)

    def begin(self, what: str, need_s: float, *, last: bool = False) -> float:
        """Begin a step and return its time limit in seconds: it may overrun `need_s` until even the shortest last step
        would no longer fit. The `last` step may also use the reserve and the grace.

        Raises:
            Spent: it would not end in time.
        """
        left = self.left_s() + GRACE_S if last else self.left_s() - self.kept_s
        if need_s > left or (left <= 0 and not last):
            raise Spent(f"{what} (about {need_s:.0f} s)" if need_s else what)
        kept = [] if last else self._list_kept_s()
        self._spared_s = min(kept) + GRACE_S if kept else 0.0  # the grace stays for wrong estimates of the last step
        return self.left_s() + GRACE_S - self._spared_s

    def is_over(self) -> bool:
        """Whether the current step's time limit has passed, so that any running training must be stopped."""
        return self.left_s() + GRACE_S < self._spared_s

    def describe_left(self) -> str:
        """Describe the time left, for a progress line."""
        left = self.left_s()
        if left < 0:
            return f"{-left:.0f} s over the budget"
        return f"{left / 60:.1f} min of the budget left" if left >= 90 else f"{left:.0f} s of the budget left"


def describe_time(seconds: float) -> str:
    """Write an estimated time: seconds up to 90, then minutes."""
    return f"about {math.ceil(seconds / 60)} min" if seconds > 90 else f"about {seconds:.0f} s"


# -- how long the trainings of a climb are. An unoptimized step can take a second, a start ten: steps are not free -----

FEWEST_STEPS = 10
"""Fewest steps in a window."""
WINDOW_S = 4.0
"""Length of a window in seconds for the faster of two stacks."""
LONGEST_S = 40.0
"""Longest window for the slower stack, unless the fewest steps take longer."""
SCREEN_S = 12.0
"""Longest window for the slower stack of a screen: if two stacks differ a lot, a short window shows it."""
WARMUP_S = 3.0
"""After this time a device has reached its clock rates; a compile takes longer, but only steps count."""
FILL_S = 10.0
"""Longest wait for queues to fill, if their fill level can be read."""
LEAST_WARMUP = 3
"""Fewest warm-up steps: shapes, autotuning and compilation show in the first two."""
QUEUES = 10
"""How many times the window must drain the queued batches, see `Measurement.window_too_short`."""
FILLS = 2
"""The same for a screen if its queues can be read. Its rate leaves out the batches that were ready, so the only error
left is the batches that workers are still making, at most half of the queues' capacity."""
GRADIENT_STEPS = 10
"""A gradient trial takes as long as this many steps, besides its start: it repeats its step, with slower kernels."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """Optimizer steps of one training."""

    warmup: int
    window: int

    @property
    def steps(self) -> int:
        return self.warmup + self.window + 1  # the step in which a window begins is not part of it

    @property
    def first_steps(self) -> int:
        """Steps of a training that only has to reach a window."""
        return min(self.steps, self.warmup + FEWEST_STEPS)

    def seconds(self, step_ms: float, start_s: float) -> float:
        """Return how long a training of this length takes, start and end included."""
        return start_s + self.steps * step_ms / 1e3

    def up_to(self, ends_at: int | None) -> Length:
        """Shorten this for a training that ends by itself after `ends_at` steps. At most a third of them are warm-up,
        but never fewer than `LEAST_WARMUP`, and the window keeps at least `FEWEST_STEPS`."""
        if ends_at is None or self.steps <= ends_at:
            return self
        warm = min(self.warmup, max(LEAST_WARMUP, ends_at // 3))
        return Length(warmup=warm, window=max(FEWEST_STEPS, ends_at - warm - 1))


PILOT = Length(warmup=5, window=10)
"""Length of the very first training, whose steps may take a millisecond or three seconds."""


def estimate_gradient_s(step_ms: float, start_s: float) -> float:
    """Return the seconds that a gradient trial takes with such a step."""
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
    """Choose one length for all trainings of a comparison: the number of steps can change the learning rates.

    Args:
        fast_ms: the estimated step time of the fastest of them; ``slow_ms`` that of the slowest.
        queued: the largest number of batches that workers and device feeds keep ready.
        warmup: the configured optimizer steps, exceeded only if the queues need it.
        screen: the comparison only decides what is worth a proof.
        fill_read: the batches ready in the queues can be counted, so they are left out of the rates.
    """
    to_fill = math.ceil(queued / batches_per_step)
    if fill_read:
        to_fill = min(to_fill, math.ceil(1e3 * FILL_S / slow_ms))
    warm = max(LEAST_WARMUP, to_fill, min(warmup, math.ceil(1e3 * WARMUP_S / slow_ms)))
    by_time = min(math.ceil(1e3 * WINDOW_S / fast_ms), int(1e3 * (SCREEN_S if screen else LONGEST_S) / slow_ms))
    fills = FILLS if screen and fill_read else QUEUES
    by_queue = min(math.ceil(fills * queued / batches_per_step), int(1e3 * LONGEST_S / slow_ms))
    return Length(warmup=warm, window=max(FEWEST_STEPS, by_time, by_queue))
