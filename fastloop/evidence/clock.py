"""The step on one clock: host marks and a chain of device events, without a synchronisation inside the window.

At each mark `p` the host notes `h_p`; the device reaches it at `d_p`. A step runs from the moment its predecessor's
work was issued to the moment its own is, `T = (d_N - d_0) / N`. A stretch in which the host launches nothing, from `a`
to `b`, starves the device for `max(0, h_b - d_a)`; a phase that launches takes `d_b - d_a`. Device times are brought to
the host's clock by one synchronisation before the window. After it two truths keep the clocks together: the device
reaches no mark before the host made it, nor after the host has seen it reached. On the CPU both clocks are one.

One event a batch is always recorded, where its work is issued; the phases between only in some steps, drawn by a
generator of our own, because an event costs microseconds. In the others the host's time in hooks is summed up.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import torch

from fastloop.evidence.parts import COMPUTE, KEPT_STEPS, RARE, Account, Window
from fastloop.evidence.processor import off_cpu_s
from fastloop.evidence.stream import current_stream

__all__ = ["COMPUTE", "KEPT_STEPS", "RARE", "Clock", "Window"]

now = time.perf_counter
IDLE = "host_other"
FIRST_IN_DETAIL = 8
"""Steps of the window's beginning that are all marked in detail, so that a short window has some."""
EVERY = {"cuda": 32, "cpu": 8}
"""After those, one step in so many on average."""


class _Mark:
    """One call of the loop. No dataclass: most marks need five of the fields, and setting all takes a microsecond."""

    off_cpu: float | None = None
    kind = ""
    """got: the loop has its batch. issued: a batch's work is."""
    ended: tuple[int, int, bool] | None = None
    """Batches, samples, and whether in detail, of the step that ends here."""
    samples: int | None = None
    asked = 0.0
    """Of a `got`: when the loop asked for the batch, where that has no mark of its own. Of others: when hooks without
    marks of their own were over."""
    seen_at = 0.0
    """When the host saw that the device had passed it."""
    hooks_s = 0.0
    """Of a `got`: host time in hooks since the last mark."""
    collected_s = collected_before = 0.0
    """Host time of the garbage collector's since the last mark, and what of it passed before the loop `asked`."""

    def __init__(self, at: float, event: Any, phase: str, body: bool, detailed: bool) -> None:
        self.at, self.event, self.body, self.detailed = at, event, body, detailed
        self.phase = phase
        """The phase that begins here."""


class Clock:
    """Marks the loop's calls, device or not. Not thread-safe; one per fit and rank.

    Args:
        device: where the steps run.
        warmup_steps: optimizer steps before the window.
        queued_batches: batches that loader and device queues can hold; as many pass before the window too.
    """

    def __init__(self, device: torch.device, warmup_steps: int, queued_batches: int = 0) -> None:
        self.device, self.warmup_steps, self.queued_batches = device, warmup_steps, queued_batches
        self.on_device = device.type == "cuda"
        self.total_steps = 0
        self.open = self.closed = False
        """Whether the window has begun, and whether it is over."""
        self.detailed = True
        """Whether the phases of the present step are marked."""
        self.phase = self._base = IDLE
        self.in_body = self._working = False
        """The loop has a batch and its work is not issued yet; and that work has begun."""
        self.hooks_s = 0.0
        """Host time in hooks that have no marks of their own, to be added to by who runs them."""
        self.collected_s = self._collected_before = 0.0
        """The same of the garbage collector's passes, wherever they come; and those before the loop asked."""
        self.account = Account()
        self._batches_seen = self._step_batches = self._step_samples = 0
        self._asked = 0.0
        self._stack: list[str] = []
        self._draw, self.until_detail, self.opened_at = random.Random(0), 0, 0
        """The last two: steps until one is in detail, and steps that were done when the window began."""
        self._waiting: deque[_Mark] = deque()
        """Marks the device has not been seen to pass."""
        self._marks: deque[_Mark] = deque()
        """Marks it has passed, of a step whose end is not among them yet."""
        self._issued: _Mark | None = None
        self._ends = 0
        """Step ends among the latter; what comes after the last one belongs to a step that may never be whole."""
        self._spare: list[Any] = []
        # What the settled marks say, in seconds on the host's clock.
        self._last = _Mark(0.0, None, IDLE, False, True)
        self._position = self._event_at = 0.0
        self._last_event: Any = None

    # -- the host's side ------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """The loop asks for a batch."""
        if not self.open:
            if self.closed or not self._warm():
                return
            self._begin()
        if self.in_body and not self._working:
            self.in_body = False  # it fetches one more ahead
        self._asked, self._collected_before = now(), self.collected_s
        if (not self.detailed or self.hooks_s) and self.phase == IDLE and not self.in_body and not self._stack:
            return  # one mark will do, and hooks without marks are told apart there
        self.enter("epoch_gap" if self._base == "epoch_gap" else "data_wait")
        self._asked = -1.0

    def got(self) -> None:
        """The loop has its batch."""
        asked, self._asked = self._asked, 0.0
        if not asked:
            return
        if self._stack and self._stack[-1] != self._base:  # training_step fetches for itself
            self.leave()
            self._harvest()
            return
        self._stack.clear()
        self._base, self.in_body = IDLE, True
        self._switch(IDLE, kind="got")
        if asked > 0:
            mark = self._waiting[-1]
            mark.asked, mark.hooks_s = asked, self.hooks_s
            mark.collected_before = min(self._collected_before, mark.collected_s)
        self.hooks_s = 0.0
        self._harvest()

    def enter(self, phase: str) -> None:
        """A phase begins inside the present one."""
        self._stack.append(self.phase)
        self._switch(phase)

    def leave(self) -> None:
        """It ends."""
        self._switch(self._stack.pop() if self._stack else self._base)

    def rest(self, phase: str) -> None:
        """What is not marked otherwise is `phase`, until the next batch is there."""
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
            self._base, self.in_body = IDLE, True  # no batch was fetched before it: an epoch's gap ends here
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
        """The loop is done with a batch, and with an optimizer step if `step_ends`."""
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
        """End the window (one synchronisation) and say what was measured; None where no step was."""
        if not self.open:
            return None
        if self.on_device:
            torch.cuda.synchronize(self.device)
        self._harvest()
        self.stop()
        return self.account.window(self.on_device)

    def stop(self) -> None:
        """Mark nothing more."""
        self.open, self.closed, self._issued = False, True, None
        self._marks.clear()
        self._waiting.clear()

    def _warm(self) -> bool:
        enough = self.total_steps >= self.warmup_steps and self._batches_seen >= self.queued_batches
        return enough and not self._step_batches

    def _begin(self) -> None:
        self.open, self.opened_at = True, self.total_steps
        if self.on_device:
            torch.cuda.synchronize(self.device)
            self._last_event = self._event()
        self._position = self._event_at = now()
        self._last = _Mark(self._position, None, self.phase, self.in_body, True)

    def _in_detail(self) -> bool:
        if self.total_steps - self.opened_at <= FIRST_IN_DETAIL:
            return True
        if self.until_detail <= 0:
            self.until_detail = self._draw.randint(1, 2 * EVERY.get(self.device.type, 4) - 1)
        self.until_detail -= 1
        return not self.until_detail

    def _switch(self, phase: str, kind: str = "") -> None:
        before, self.phase = self.phase, phase
        if not self.open:
            return
        always = kind == "issued" or phase in RARE or before in RARE
        event = self._event() if self.on_device and (self.detailed or always) else None
        mark = _Mark(now(), event, phase, self.in_body, self.detailed)
        if self.detailed and (phase in COMPUTE or before in COMPUTE):
            mark.off_cpu = off_cpu_s()
        if kind:
            mark.kind = kind
        if self.collected_s:
            mark.collected_s, self.collected_s = self.collected_s, 0.0
        if self.hooks_s and before == IDLE and kind != "got":
            mark.asked, mark.hooks_s, self.hooks_s = mark.at, self.hooks_s, 0.0
            mark.collected_before = mark.collected_s
        self._waiting.append(mark)

    def _event(self) -> Any:
        event: Any = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(current_stream(self.device))
        return event

    # -- the device's side ----------------------------------------------------------------------------------------

    def _harvest(self) -> None:
        """Settle the marks the device has passed, and no others: that would wait for it."""
        seen_at = now()
        while self._waiting and (self._waiting[0].event is None or self._waiting[0].event.query()):
            mark = self._waiting.popleft()
            mark.seen_at = seen_at
            self._ends += mark.ended is not None
            self._marks.append(mark)
        while self._ends and self._marks:
            self._settle(self._marks.popleft())

    def _settle(self, mark: _Mark) -> None:
        if mark.asked:
            self._settle_unmarked(mark)
        before = self._last
        starved = max(0.0, mark.at - self._position)
        if mark.kind == "got" and self.account.start is not None:
            self.account.lead(max(0.0, self._position - mark.at))
        if mark.event is None:
            position = max(self._position, mark.at)
        else:
            # Chained from mark to mark: elapsed_time is a 32-bit float of milliseconds and coarse over long spans.
            reached = self._event_at + self._last_event.elapsed_time(mark.event) / 1e3
            position = max(self._position, mark.at, min(reached, mark.seen_at))
            self._spare.append(self._last_event)
            self._last_event, self._event_at = mark.event, position
        if self.account.start is not None:
            collected = mark.collected_s - mark.collected_before if before.phase not in RARE else 0.0
            lost = self.account.garbage(collected, self._position - before.at) if collected else 0.0
            self.account.stretch(before.phase, before.body, before.detailed, position - self._position - lost,
                                 max(0.0, starved - lost), mark.at - before.at - collected)  # fmt: skip
            if before.phase in COMPUTE and before.off_cpu is not None and mark.off_cpu is not None:
                self.account.blocked(mark.off_cpu - before.off_cpu)
        if mark.kind == "issued" and self.account.start is not None:
            self.account.issued(max(0.0, position - mark.at), mark.samples or 0)
        if mark.ended is not None:
            self._ends -= 1
            self.account.step_ends(position, *mark.ended)
        self._position, self._last = position, mark

    def _settle_unmarked(self, mark: _Mark) -> None:
        """The stretch that ends with hooks without marks of their own: split as the host's time was."""
        before, position = self._last, max(self._position, mark.asked)
        if self.account.start is not None:
            collected, starved = mark.collected_before, max(0.0, mark.asked - self._position)
            host = mark.asked - before.at - collected
            share = min(1.0, mark.hooks_s / host) if host > 0 else 0.0
            lost = self.account.garbage(collected, self._position - before.at) if collected else 0.0
            self.account.between(host, max(0.0, starved - lost), share)
        phase = "data_wait" if mark.kind == "got" else IDLE
        self._position, self._last = position, _Mark(mark.asked, None, phase, False, mark.detailed)
