"""How long the trainings of a climb are. A naive step can take a second, and a start ten: steps are not free."""

from __future__ import annotations

import math
from dataclasses import dataclass

FEWEST_STEPS = 10
"""In a window."""
WINDOW_S = 4.0
"""What a window lasts for the faster of two stacks."""
LONGEST_S = 40.0
"""And for the slower one at most, unless it takes that for the fewest steps."""
WARMUP_S = 3.0
"""After so long a device has its clocks; a compile takes longer, but only steps count."""
LEAST_WARMUP = 3
"""Steps: shapes, autotuning and compilation show in the first two."""
QUEUES = 10
"""Times that the queued batches must have passed, see `Measurement.window_too_short`."""


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


PILOT = Length(warmup=5, window=10)
"""The first training of all, whose steps may take a millisecond or three seconds."""


def length(fast_ms: float, slow_ms: float, *, queued: int, batches_per_step: float, warmup: int) -> Length:
    """Of trainings that are to be compared, all alike: the number of steps can decide over learning rates.

    Args:
        fast_ms: a step of the fastest of them, as far as known; ``slow_ms`` of the slowest.
        queued: batches that workers and device feeds hold ready, the most of them.
        warmup: optimizer steps as configured: more is not done, unless the queues need it.
    """
    to_fill = max(LEAST_WARMUP, math.ceil(queued / batches_per_step))
    warm = max(to_fill, min(warmup, math.ceil(1e3 * WARMUP_S / slow_ms)))
    wanted = max(FEWEST_STEPS, math.ceil(1e3 * WINDOW_S / fast_ms), math.ceil(QUEUES * queued / batches_per_step))
    return Length(warmup=warm, window=min(wanted, max(FEWEST_STEPS, int(1e3 * LONGEST_S / slow_ms))))
