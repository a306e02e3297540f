"""The step on one clock: host marks and a chain of device events, without synchronization inside the window.

At each mark `p` the host records `h_p`; the device reaches it at `d_p`. A step lasts from the moment its predecessor's
work was issued to the moment its own is, `T = (d_N - d_0) / N`. An interval from `a` to `b` in which the host launches
nothing starves the device for `max(0, h_b - d_a)`; a phase that launches takes `d_b - d_a`. One synchronization before
the window maps device times to the host's clock. After it, two constraints keep the clocks aligned: the device reaches
no mark before the host made it, nor after the host has observed that it was reached. On the CPU both clocks are the
same.

One event per batch is always recorded, when its work is issued. Events for the phases in between are recorded only in
some steps, drawn with a private random generator, because an event costs microseconds. In the other steps the host time
in hooks is summed.
"""

from __future__ import annotations

import functools
import random
import time
from collections import deque
from typing import Any

import torch

from fastloop.evidence.clock.off_cpu import read_off_cpu_s
from fastloop.evidence.clock.one_time import OneTime, Reader
from fastloop.evidence.clock.step_account import COMPUTE, KEPT_STEPS, RARE, Account, Mark, Window

__all__ = ["COMPUTE", "KEPT_STEPS", "RARE", "Clock", "Window"]

now = time.perf_counter
IDLE = "host_other"
FIRST_IN_DETAIL = 8
"""The first steps of the window are all marked in detail, so that a short window has some."""
EVERY = {"cuda": 32, "cpu": 8}
"""After those, one step in this many on average."""
LOT = 64
"""Number of marks that are settled together if there is no device to query: the code is then in the CPU caches."""


class Clock:
    """Marks the loop's calls, device or not. Not thread-safe; one per fit and rank.

    Args:
        device: the device that runs the steps.
        warmup_steps: optimizer steps before the window.
        queued_batches: batches that loader and device queues can hold; the window opens only after that many batches.
        one_time: ledger of one-time costs, which belong to no step; entries must arrive before the next batch does.
    """

    def __init__(self, device: torch.device, warmup_steps: int, queued_batches: int = 0, *, one_time: OneTime) -> None:
        self.device, self.warmup_steps, self.queued_batches = device, warmup_steps, queued_batches
        self.on_device = device.type == "cuda"
        self.total_steps = 0
        self.open = self.closed = False
        """Whether the window has begun (``open``), and whether it is over (``closed``)."""
        self.detailed = True
        """Whether the phases of the current step are marked."""
        self.phase = self._base = IDLE
        self.in_body = self._working = False
        """``in_body``: the loop has a batch and its work is not issued yet; ``_working``: that work has begun."""
        self.hooks_s = 0.0
        """Host time in hooks without their own marks; the code that runs them adds to it."""
        self.collected_s = self._collected_before = 0.0
        """The same for garbage collector passes, in any phase; and the part before the loop requested its batch."""
        self._account, self._one_time = Account(), Reader(one_time)
        self._batches_seen = self._step_batches = self._step_samples = 0
        self._asked = 0.0
        self._stack: list[str] = []
        self._draw, self.until_detail, self.opened_at = random.Random(0), 0, 0
        """``until_detail``: steps until one is in detail; ``opened_at``: steps done when the window began."""
        self._waiting: deque[Mark] = deque()
        """Marks that the device is not known to have passed."""
        self._marks: deque[Mark] = deque()
        """Marks that it has passed, of a step whose end it has not passed yet."""
        self._issued: Mark | None = None
        self._ends = 0
        """Step ends among ``_marks``; marks after the last end belong to a step that may never complete."""
        self._spare: list[Any] = []
        # The state after the settled marks, in seconds on the host's clock.
        self._last = Mark(0.0, None, IDLE, False, True)
        self._position = self._event_at = 0.0
        self._last_event: Any = None
        self._computes_from: float | None = None
        """Off-CPU time when the current work of `COMPUTE` began; also None if a one-time cost fell into it, because
        such a cost sleeps and waits on its own."""

    # -- the host's side ------------------------------------------------------------------------------------------

    def note_batch_requested(self) -> None:
        """The loop requests a batch."""
        if not self.open:
            if self.closed or not self._warm():
                return
            self._begin()
        if self.in_body and not self._working:
            self.in_body = False  # the loop prefetches one more batch
        self._asked, self._collected_before = now(), self.collected_s
        if (not self.detailed or self.hooks_s) and self.phase == IDLE and not self.in_body and not self._stack:
            return  # one mark is enough, and it separates hooks without marks
        self.enter("epoch_gap" if self._base == "epoch_gap" else "data_wait")
        self._asked = -1.0

    def note_batch_received(self) -> None:
        """The loop has its batch."""
        asked, self._asked = self._asked, 0.0
        if not asked:
            return
        if self._stack and self._stack[-1] != self._base:  # training_step fetches its own batch
            self.leave()
        else:
            self._stack.clear()
            self._base, self.in_body = IDLE, True
            self._switch(IDLE, kind="got")
            if asked > 0:
                mark = self._waiting[-1]
                mark.asked, mark.hooks_s = asked, self.hooks_s
                mark.collected_before = min(self._collected_before, mark.collected_s)
            self.hooks_s = 0.0
        if self.on_device or len(self._waiting) >= LOT:
            self._harvest()

    def enter(self, phase: str) -> None:
        """A phase begins inside the current one."""
        self._stack.append(self.phase)
        self._switch(phase)

    def leave(self) -> None:
        """The current phase ends."""
        self._switch(self._stack.pop() if self._stack else self._base)

    def rest(self, phase: str) -> None:
        """Unmarked time counts as `phase` until the next batch arrives."""
        self._base = phase
        self._stack.clear()
        self._switch(phase)

    def body(self) -> None:
        """A batch's work begins."""
        self._working = True
        if not self.open:
            self._stack.clear()
            self._base = self.phase = IDLE
        elif not self.in_body:
            self._stack.clear()
            self._base, self.in_body = IDLE, True  # no batch was fetched before it: the gap between epochs ends here
            self._switch(IDLE)

    def issued(self) -> None:
        """A batch's work is issued."""
        self._working = False
        if self.open:
            self._stack.clear()
            self.in_body = False
            self._switch(IDLE, kind="issued")
            self._issued = self._waiting[-1]

    def batch_done(self, samples: int | None, step_ends: bool) -> None:
        """The loop has finished a batch, and an optimizer step if `step_ends`."""
        self._batches_seen += 1
        self._step_batches += 1
        self._step_samples += samples or 0
        if self._issued is not None:
            self._issued.samples = samples
        if not step_ends:
            return
        self.total_steps += 1
        if self._issued is not None:
            self._issued.ended = (self._step_batches, self._step_samples, self.detailed)
            self.detailed = self._in_detail()
        self._step_batches = self._step_samples = 0

    def close(self) -> Window | None:
        """End the window (one synchronization) and return the measurements; None if there was no step."""
        if not self.open:
            return None
        if self.on_device:
            torch.cuda.synchronize(self.device)
        self._harvest()
        self.stop()
        return self._account.window(self.on_device)

    def stop(self) -> None:
        """Stop marking."""
        self.open, self.closed, self._issued = False, True, None
        self._marks.clear()
        self._waiting.clear()

    def _warm(self) -> bool:
        enough = self.total_steps >= self.warmup_steps and self._batches_seen >= self.queued_batches
        return enough and not self._step_batches

    def _begin(self) -> None:
        self.open, self.opened_at = True, self.total_steps
        self._one_time.skip()
        if self.on_device:
            torch.cuda.synchronize(self.device)
            self._last_event = self._record_event()
        self._position = self._event_at = now()
        self._last = Mark(self._position, None, self.phase, self.in_body, True)

    def _in_detail(self) -> bool:
        if self.total_steps - self.opened_at <= FIRST_IN_DETAIL:
            return True
        if self.until_detail <= 0:
            self.until_detail = 1 + int(self._draw.random() * (2 * EVERY.get(self.device.type, 4) - 1))
        self.until_detail -= 1
        return not self.until_detail

    def _switch(self, phase: str, kind: str = "") -> None:
        before, self.phase = self.phase, phase
        if not self.open:
            return
        detailed, event = self.detailed, None
        if self.on_device and (detailed or kind == "issued" or phase in RARE or before in RARE):
            event = self._record_event()
        mark = Mark(now(), event, phase, self.in_body, detailed)
        if detailed and phase != before and (phase in COMPUTE or before in COMPUTE):
            mark.off_cpu = read_off_cpu_s()
        if kind:
            mark.kind = kind
        if self.collected_s:
            mark.collected_s, self.collected_s = self.collected_s, 0.0
        if self.hooks_s and before == IDLE and kind != "got":
            mark.asked, mark.hooks_s, self.hooks_s = mark.at, self.hooks_s, 0.0
            mark.collected_before = mark.collected_s
        self._waiting.append(mark)

    def _record_event(self) -> Any:
        event: Any = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(find_current_stream(self.device))
        return event

    # -- the device's side ----------------------------------------------------------------------------------------

    @property
    def account(self) -> Account:
        """The account of all marks that the device is known to have passed."""
        self._harvest()
        return self._account

    def _harvest(self) -> None:
        """Settle only the marks that the device has passed; the others would require waiting for it."""
        waiting, seen_at = self._waiting, now()
        while waiting and ((event := waiting[0].event) is None or event.query()):
            mark = waiting.popleft()
            mark.seen_at = seen_at
            if mark.ended is not None:
                self._ends += 1
            self._marks.append(mark)
        while self._ends and self._marks:
            self._flush(self._marks.popleft())

    def _flush(self, mark: Mark) -> None:
        if mark.asked:
            self._flush_unmarked(mark)
        account, before, at, was_at = self._account, self._last, mark.at, self._position
        starved, position = (at - was_at, at) if at > was_at else (0.0, was_at)
        if mark.event is not None:
            position = self._read_reached(mark, position)
        if account.start is not None:
            if self.on_device and mark.kind == "got":
                account.lead(max(0.0, was_at - at))
            host, lost = at - before.at, 0.0
            once, recurring = self._one_time.take(before.at, at)
            if once:  # garbage collector passes inside it are part of it
                host, self._computes_from = host - once, None
                lost = account.once(once, was_at - before.at, recurring)
            elif mark.collected_s and before.phase not in RARE:
                collected = mark.collected_s - mark.collected_before
                host, lost = host - collected, account.garbage(collected, was_at - before.at)
            account.stretch(
                before.phase, before.body, before.detailed, position - was_at - lost, max(0.0, starved - lost), host
            )
            if mark.kind == "issued":
                account.issued(position - at, mark.samples or 0)
        if mark.off_cpu is not None:
            self._flush_off_cpu(mark.off_cpu, before.phase, mark.phase)
        if mark.ended is not None:
            self._ends -= 1
            account.step_ends(position, *mark.ended)
        self._position, self._last = position, mark

    def _read_reached(self, mark: Mark, soonest: float) -> float:
        """When the device reached a mark that has an event."""
        # Chained from mark to mark: elapsed_time is a 32-bit float of milliseconds and coarse over long spans.
        reached = self._event_at + self._last_event.elapsed_time(mark.event) / 1e3
        self._spare.append(self._last_event)
        self._last_event, self._event_at = mark.event, max(soonest, min(reached, mark.seen_at))
        return self._event_at

    def _flush_off_cpu(self, off_cpu_s: float, ended: str, begun: str) -> None:
        """Forward, backward or optimizer has begun or ended."""
        if ended in COMPUTE and self._computes_from is not None and self._account.start is not None:
            self._account.blocked(off_cpu_s - self._computes_from, ended)
        self._computes_from = off_cpu_s if begun in COMPUTE else None

    def _flush_unmarked(self, mark: Mark) -> None:
        """Split the interval that ends with hooks without their own marks in the same proportion as the host's time."""
        account, before, asked, was_at = self._account, self._last, mark.asked, self._position
        if account.start is not None:
            host, lost, starved = asked - before.at, 0.0, max(0.0, asked - was_at)
            once, recurring = self._one_time.take(before.at, asked)
            if once:
                host, lost = host - once, account.once(once, was_at - before.at, recurring)
            elif mark.collected_before:
                host -= mark.collected_before
                lost = account.garbage(mark.collected_before, was_at - before.at)
            share = min(1.0, mark.hooks_s / host) if host > 0 else 0.0
            account.between(host, max(0.0, starved - lost), share)
        phase = "data_wait" if mark.kind == "got" else IDLE
        self._position, self._last = max(was_at, asked), Mark(asked, None, phase, False, mark.detailed)


def find_current_stream(device: torch.device) -> Any:
    """A faster ``torch.cuda.current_stream``, which makes an object at each call: 4 us on an H200's host, more than the
    rest of a mark."""
    ask = getattr(torch._C, "_cuda_getCurrentStream", None)  # private
    if ask is None or device.index is None:
        return torch.cuda.current_stream(device)
    return _open_stream(*ask(device.index))


@functools.cache
def _open_stream(stream_id: int, device_index: int, device_type: int) -> Any:
    stream: Any = torch.cuda.Stream
    return stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
