"""Step times on one clock: host marks and a chain of device events, without a synchronisation inside the window.

A step runs from the moment the loop asks for its first batch to the moment it asks for the next step's. At each
such boundary `p` the host notes `h_p` and the device will reach `d_p`. The device waits for data only where the host
got the batch after the device had nothing left to do: `max(0, h_b - d_a)` for a fetch from `a` to `b`. Device times
are brought to the host's clock by one synchronisation before the window. On the CPU both clocks are one.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch

KEPT_STEPS = 10_000
"""Step times kept for the quantiles: the latest ones."""

now = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class Window:
    """What the clock measured between the first and the last boundary, in seconds."""

    steps: int
    batches: int
    samples: int
    wall_s: float
    data_wait_s: float
    """Time in which the device had nothing to do because a batch was not there."""
    step_s: tuple[float, ...]
    lead_s: float | None
    step_samples: tuple[int, ...]


class _Ring:
    """The latest values, in fixed memory."""

    def __init__(self, typecode: Literal["d", "q"]) -> None:
        self.values: array[Any] = array(typecode)
        self._next = 0

    def add(self, value: float) -> None:
        if len(self.values) < KEPT_STEPS:
            self.values.append(value)
        else:
            self.values[self._next] = value
            self._next = (self._next + 1) % KEPT_STEPS


@dataclass
class _Fetch:
    asked: float
    event: Any
    ended: tuple[int, int] | None
    """Batches and samples of the step that ends here; None inside a step."""
    got: float = 0.0


class Clock:
    """Marks the loop calls, device or not. Not thread-safe; one per fit and rank.

    The step that the synchronisation before the window falls into is left out, for it drained the device; so is the
    last one, whose end is no call for a next batch but the end of the training.

    Args:
        device: where the steps run.
        warmup_steps: optimizer steps before the window.
        queued_batches: batches that loader and device queues can hold; as many pass before the window too.
    """

    def __init__(self, device: torch.device, warmup_steps: int, queued_batches: int = 0) -> None:
        self.device, self.warmup_steps, self.queued_batches = device, warmup_steps, queued_batches
        self.total_steps = 0
        self.open = False
        """Whether the window has begun."""
        self._batches_seen = 0
        self._at_boundary = True
        self._step_batches = self._step_samples = 0
        self._pending: deque[_Fetch] = deque()
        self._spare: list[Any] = []
        self._fetch: _Fetch | None = None
        # What the settled marks say, in seconds on the host's clock.
        self._to_skip = 1 if device.type == "cuda" else 0
        self._start: float | None = None
        self._last_boundary = self._device_now = 0.0
        self._last_event: Any = None
        self._steps = self._batches = self._samples = 0
        self._wait = self._step_wait = 0.0
        self._step_s, self._leads, self._samples_of = _Ring("d"), _Ring("d"), _Ring("q")

    def ask(self) -> None:
        """The loop asks for a batch."""
        boundary, self._at_boundary = self._at_boundary, False
        if not self.open:
            if not boundary or not self._warm():
                return
            self._begin()
        ended = None
        if boundary:
            ended = (self._step_batches, self._step_samples)
            self._step_batches = self._step_samples = 0
        self._fetch = _Fetch(now(), self._event(), ended)

    def got(self) -> None:
        """The loop has its batch."""
        if self._fetch is not None:
            self._fetch.got = now()
            self._pending.append(self._fetch)
            self._fetch = None
            self._harvest(wait=False)

    def batch_done(self, samples: int | None, step_ends: bool) -> None:
        """The loop is done with a batch, and with an optimizer step if `step_ends`."""
        self._batches_seen += 1
        self._step_batches += 1
        self._step_samples += samples or 0
        if step_ends:
            self._at_boundary = True
            self.total_steps += 1

    def close(self) -> Window | None:
        """End the window (one synchronisation) and say what was measured; None where no step was measured."""
        if not self.open:
            return None
        self._fetch = None
        self._harvest(wait=True)
        self.open = False
        if self._start is None or not self._steps:
            return None
        leads = self._leads.values
        return Window(
            steps=self._steps, batches=self._batches, samples=self._samples, wall_s=self._last_boundary - self._start,
            data_wait_s=self._wait, step_s=tuple(self._step_s.values), step_samples=tuple(self._samples_of.values),
            lead_s=median(leads) if leads and self.device.type == "cuda" else None,
        )  # fmt: skip

    def _warm(self) -> bool:
        return self.total_steps >= self.warmup_steps and self._batches_seen >= self.queued_batches

    def _begin(self) -> None:
        self.open = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._last_event = self._event()
        self._device_now = now()

    def _event(self) -> Any:
        if self.device.type != "cuda":
            return None
        event: Any = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _harvest(self, wait: bool) -> None:
        """Settle the marks the device has passed. Without `wait`, only those that cost no waiting."""
        if wait and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        while self._pending and (self._pending[0].event is None or self._pending[0].event.query()):
            self._settle(self._pending.popleft())

    def _settle(self, fetch: _Fetch) -> None:
        if fetch.event is None:
            self._device_now = fetch.asked
        else:
            # Chained from mark to mark: elapsed_time is a 32-bit float of milliseconds and coarse over long spans.
            self._device_now += self._last_event.elapsed_time(fetch.event) / 1e3
            self._spare.append(self._last_event)
            self._last_event = fetch.event
        if fetch.ended is not None:
            self._cross(*fetch.ended)
        if self._start is not None:
            self._leads.add(self._device_now - fetch.asked)
            self._step_wait += max(0.0, fetch.got - self._device_now)

    def _cross(self, batches: int, samples: int) -> None:
        """The device passes from one step to the next."""
        if self._start is not None:
            self._steps += 1
            self._batches += batches
            self._samples += samples
            self._wait += self._step_wait
            self._step_s.add(self._device_now - self._last_boundary)
            self._samples_of.add(samples)
        elif self._to_skip:
            self._to_skip -= 1
            return
        else:
            self._start = self._device_now
        self._step_wait, self._last_boundary = 0.0, self._device_now
