"""The account of a window: assigns every interval of the device's timeline to a phase.

An interval lies between two marks. Outside the loop's batch work (`body`) the host has launched nothing, so the device
starves during an interval there; host times give its length, without an event. Inside, every step gives the sum of its
phases, and only steps marked in detail separate them, see `Sampled`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import Any

from fastloop.evidence.clock.sampling import Sampled

KEPT_STEPS = 10_000
"""Number of latest step times kept for the quantiles."""
RARE = ("validation", "checkpoint", "epoch_gap")
"""Phases that do not occur in every step: always marked with events, and never sampled."""
COMPUTE = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Window:
    """The clock's measurements between the first and the last boundary, in seconds."""

    steps: int
    detailed_steps: int
    batches: int
    samples: int
    wall_s: float
    parts_s: dict[str, float]
    """Per step, by phase, on the device's timeline; phases that need steps in detail are missing without any."""
    host_s: dict[str, float]
    """Per step, by phase, on the host's timeline."""
    blocked_s: float | None
    """Per step: host time of forward, backward and optimizer off the CPU."""
    step_s: tuple[float, ...]
    step_samples: tuple[int, ...]
    batch_samples: tuple[int, ...]
    lead_s: float | None
    trail_s: float | None
    forward_blocked_s: float | None = None
    """The forward's part of ``blocked_s``."""
    of_detailed: float = 1.0
    """Host time of an average step's work relative to a step in detail, whose marks add some cost."""
    garbage_s: float = 0.0
    """Per step: device time lost to garbage collector passes, in any phase; a part of ``host_other``."""
    once_s: tuple[float, ...] = ()
    """Seconds of one-time costs that were removed from each step of ``step_s``, and from all other figures."""
    once_total_s: float = 0.0
    """The sum over all steps."""
    recurring_s: tuple[float, ...] = ()
    """The part of `once_s` that is no one-time cost if more than a few steps have it."""
    recurring_total_s: float = 0.0

    @property
    def steps_with_once(self) -> int:
        """Steps that had a one-time cost."""
        return sum(seconds > 0 for seconds in self.once_s)

    @property
    def steps_with_recurring(self) -> int:
        return sum(seconds > 0 for seconds in self.recurring_s)

    def put_back(self) -> Window:
        """Return the window with the recurring seconds put back into its steps, as host work."""
        each_s = self.recurring_total_s / self.steps
        pairs = list(zip(self.once_s, self.recurring_s, strict=True))
        return replace(
            self,
            wall_s=self.wall_s + self.recurring_total_s,
            once_s=tuple(once - recurring for once, recurring in pairs),
            once_total_s=self.once_total_s - self.recurring_total_s,
            recurring_s=(),
            recurring_total_s=0.0,
            step_s=tuple(step + recurring for step, recurring in zip(self.step_s, self.recurring_s, strict=True)),
            parts_s={**self.parts_s, "host_other": self.parts_s.get("host_other", 0.0) + each_s},
            host_s={**self.host_s, "host_other": self.host_s.get("host_other", 0.0) + each_s},
        )


class Mark:
    """One call of the loop. Not a dataclass: most marks need five of the fields; setting all takes a microsecond."""

    off_cpu: float | None = None
    kind = ""
    """got: the loop has its batch. issued: a batch's work has been issued."""
    ended: tuple[int, int, bool] | None = None
    """For the step that ends here: batches, samples, and whether it was in detail."""
    samples: int | None = None
    asked = 0.0
    """For a `got`: when the loop requested the batch, if that has no separate mark. For others: when hooks without
    their own marks were over."""
    seen_at = 0.0
    """When the host observed that the device had passed it."""
    hooks_s = 0.0
    """For a `got`: host time in hooks since the last mark."""
    collected_s = collected_before = 0.0
    """Host time of the garbage collector since the last mark, and the part of it before `asked`."""

    def __init__(self, at: float, event: Any, phase: str, body: bool, detailed: bool) -> None:
        self.at, self.event, self.body, self.detailed = at, event, body, detailed
        self.phase = phase
        """The phase that begins here."""


class Account:
    """Accumulates the intervals of whole steps, in order, once the first boundary is known."""

    def __init__(self) -> None:
        self.steps = self.detailed = self.after_detailed = self.batches = self.samples = 0
        self._was_detailed = False
        self.start: float | None = None
        self.boundary = 0.0
        """Device time of the latest step's end."""
        self._every, self._host_every = defaultdict[str, float](float), defaultdict[str, float](float)
        """Seconds by phase outside the loop's batch work, of every step: on the device's and on the host's timeline."""
        self._work, self._host_work = Sampled(), Sampled()
        """The same inside the batch work."""
        self._blocked_s = defaultdict[str, float](float)
        self._garbage = self._once_in_step = self._recurring_in_step = self.once_s = self._recurring_s = 0.0
        self._step_s, self._step_once, self._step_recurring, self._leads, self._trails = (
            deque[float](maxlen=KEPT_STEPS) for _ in range(5)
        )
        self._of_step, self._of_batch = (deque[int](maxlen=KEPT_STEPS) for _ in range(2))

    def stretch(self, phase: str, body: bool, detailed: bool, span: float, starved: float, host: float) -> None:
        """Add `span` seconds of the device's timeline; for `starved` of them it had no work because the host was busy
        elsewhere."""
        if phase in RARE:
            self._every[phase] += span
            self._host_every[phase] += host
        elif not body:
            self._every[phase] += starved
            self._host_every[phase] += host
            if detailed and span > starved:  # the rest waited for device work: copies, a callback's kernels
                if phase == "data_wait":
                    self._work.add("h2d", span - starved, detailed)
                else:
                    self._work.between(phase, span - starved)
        else:
            self._work.add(phase, span, detailed)
            self._host_work.add(phase, host, detailed)

    def between(self, host: float, starved: float, hooks_share: float) -> None:
        """Add an interval between two batches' work in which hooks had no marks: they took `hooks_share` of it."""
        every, host_every = self._every, self._host_every
        if hooks_share:
            every["callbacks_logging"] += hooks_share * starved
            host_every["callbacks_logging"] += hooks_share * host
        every["host_other"] += (1 - hooks_share) * starved
        host_every["host_other"] += (1 - hooks_share) * host

    def garbage(self, host: float, lead: float) -> float:
        """Charge a garbage collection while the device had `lead` seconds of work; returns the time it lost."""
        lost = max(0.0, host - max(0.0, lead))
        self._garbage += lost
        self._every["host_other"] += lost
        self._host_every["host_other"] += host
        return lost

    def once(self, host: float, lead: float, recurring: float) -> float:
        """Charge a one-time cost in the same way, of which `recurring` seconds may recur; the time that the device lost
        belongs to neither step nor window."""
        lost = max(0.0, host - max(0.0, lead))
        self._once_in_step += lost
        self._recurring_in_step += lost * recurring / host
        return lost

    def blocked(self, seconds: float, phase: str) -> None:
        """Add seconds off the CPU in a phase; may be negative, because readings lag."""
        self._blocked_s[phase] += seconds

    def lead(self, seconds: float) -> None:
        """Note how many seconds of work the device had left when the host got a batch."""
        self._leads.append(seconds)

    def issued(self, trail: float, samples: int) -> None:
        """Note that a batch's work is issued, and that the device has `trail` seconds of it left."""
        self._trails.append(trail)
        self._of_batch.append(samples)

    def step_ends(self, at: float, batches: int, samples: int, detailed: bool) -> None:
        """Complete a step, whose end the device has reached at `at`."""
        once_s, self._once_in_step = self._once_in_step, 0.0
        recurring_s, self._recurring_in_step = self._recurring_in_step, 0.0
        if self.start is None:  # the step in which the window opened is incomplete
            self.start = at
        else:
            self.steps += 1
            self.detailed += detailed
            self.after_detailed += self._was_detailed
            self.batches += batches
            self.samples += samples
            self._work.step_ends(detailed)
            self._host_work.step_ends(detailed)
            self._step_s.append(at - self.boundary - once_s)
            self._step_once.append(once_s)
            self._step_recurring.append(recurring_s)
            self.once_s += once_s
            self._recurring_s += recurring_s
            self._of_step.append(samples)
        self.boundary, self._was_detailed = at, detailed

    @property
    def wall_s(self) -> float:
        """Time of all whole steps, without one-time costs."""
        return 0.0 if self.start is None else self.boundary - self.start - self.once_s

    @property
    def wait_s(self) -> float:
        """Seconds that the device has starved for data so far."""
        return self._every.get("data_wait", 0.0)

    def window(self, on_device: bool) -> Window | None:
        """The measurements so far; None without a whole step."""
        if not self.steps:
            return None
        split_s, blocked_s, in_forward_s = self._host_work.detailed_s, None, None
        if self._blocked_s and split_s > 0:
            per_step = self._host_work.known_s / split_s / self.steps
            blocked_s = max(0.0, sum(self._blocked_s.values())) * per_step
            in_forward_s = max(0.0, self._blocked_s["forward"]) * per_step
        return Window(
            steps=self.steps,
            detailed_steps=self.detailed,
            batches=self.batches,
            samples=self.samples,
            wall_s=self.wall_s,
            parts_s=self._compute_means(self._every, self._work),
            host_s=self._compute_means(self._host_every, self._host_work),
            blocked_s=blocked_s,
            forward_blocked_s=in_forward_s,
            step_s=tuple(self._step_s),
            step_samples=tuple(self._of_step),
            batch_samples=tuple(self._of_batch),
            lead_s=_compute_median(self._leads) if on_device else None,
            trail_s=_compute_median(self._trails) if on_device else None,
            of_detailed=self._host_work.of_detailed(self.steps),
            garbage_s=self._garbage / self.steps,
            once_s=tuple(self._step_once),
            once_total_s=self.once_s,
            recurring_s=tuple(self._step_recurring),
            recurring_total_s=self._recurring_s,
        )

    def _compute_means(self, every: dict[str, float], work: Sampled) -> dict[str, float]:
        """Return seconds per step by phase: times recorded in every step as they are, the rest split as in the steps in
        detail."""
        means = {phase: seconds / self.steps for phase, seconds in every.items()}
        for phase, seconds in work.means(self.steps, self.after_detailed).items():
            means[phase] = means.get(phase, 0.0) + seconds
        return means


def _compute_median(values: deque[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None
