"""Watches a fit: warm-up with its probes, the timed window, and then checks that would disturb the timing.

``warm-up (FLOPs, synchronizations) -> window -> extras (hunt, trace) -> an occasional check (drift)``
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from fastloop.bridge.watch.drift_checks import DriftChecks
from fastloop.bridge.watch.phases import Marks
from fastloop.bridge.watch.token_rates import Tokens
from fastloop.config.loading import WatchSettings
from fastloop.evidence.clock.gc_pauses import Garbage
from fastloop.evidence.clock.loss_log import LossLog
from fastloop.evidence.clock.one_time import TRIALS, OneTime
from fastloop.evidence.clock.step_clock import Clock, Window
from fastloop.evidence.sync.call_site import find_site

ENOUGH_STEPS = 200
"""If extras follow and the length of the fit is unknown, the window ends after this many steps, once ten times the
queued batches have passed."""
FEWEST_STEPS = 10
"""With fewer steps in the window, the extras after it are skipped."""
LONGEST_S = 900.0
"""A window with enough batches ends after this time; later steps are only checked occasionally."""


class Probe(Protocol):
    """Observes one step of the warm-up, from the work of its first batch to that of its last."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def give_up(self) -> None: ...


class Extra(Probe, Protocol):
    """Observes a few whole steps outside the timed ones."""

    @property
    def steps(self) -> int: ...

    def step_ends(self) -> None: ...


class _Sums(NamedTuple):
    """The sums that `Marks` and `Garbage` keep beside the clock, as they were at one moment."""

    hooks_s: Mapping[str, float]
    requested_s: Mapping[str, float]
    validation_loading_s: float
    passes: int


class Watch:
    """Measures one fit on one rank in stages: probes in warm-up, the window, then extras. Issues no collective.

    Args:
        owed: returns the number of batches requested from the loader's workers and not finished; None if unreadable.
        board: reads the GPU's counters over the window: ``start()``, ``stop()``.
        probes: probes that each run once during warm-up, by the optimizer step that they observe.
        extras: run after the window, in order.
        one_time: collects one-time costs, which belong to no step.
        note_costs: brings `one_time` up to date; called whenever the loop has a batch.
    """

    def __init__(
        self,
        device: torch.device,
        settings: WatchSettings,
        *,
        one_time: OneTime,
        owed: Callable[[], int | None] = lambda: None,
        board: Any = None,
        probes: Mapping[int, Probe] | None = None,
        extras: Sequence[Extra] = (),
        note_costs: Callable[[], None] = lambda: None,
    ) -> None:
        self.device, self.settings, self._owed, self.board = device, settings, owed, board
        self.clock = Clock(device, settings.warmup_steps, one_time=one_time)
        self._note_costs = note_costs
        self.marks, self.garbage = Marks(self.clock), Garbage(self.clock, _name_caller)
        self.losses, self.tokens = LossLog(), Tokens()
        self.ends_at: int | None = None
        """Optimizer steps that this fit will make; None if the Trainer does not know."""
        self.window: Window | None = None
        self.board_seen: Any = None
        self.owed: tuple[int | None, int | None] = (None, None)
        self._owed_after: int | None = None
        """The step after which `owed` was read last."""
        self._probes = {step: probe for step, probe in (probes or {}).items() if step < settings.warmup_steps}
        self._probe: Probe | None = None
        self._count_trials, self._trials = partial(one_time.count, TRIALS), 0
        self._extras = deque(extras)
        self._extra: Extra | None = None
        self._extra_steps = 0
        self._boundary, self._opened_at = True, 0.0
        self._sums: _Sums | None = None
        """The sums when the latest batch's work had been issued."""
        self._first_sums: _Sums | None = None
        self._last_sums: _Sums | None = None
        """The same at the end of the step in which the window opened, and at the end of the latest step."""
        self.marks.after_work = self._note_sums
        self._fetched_inside = False
        """Whether training_step fetches its batches itself, so that the loop requests none between two steps."""
        self.drift_checks: DriftChecks | None = None
        """Checks the step occasionally after the window."""

    # -- the loop's calls -----------------------------------------------------------------------------------------

    def note_batch_requested(self) -> None:
        """Note that the loop requests a batch."""
        self._fetched_inside = self.marks.in_work
        if self._boundary and not self.marks.in_work:
            self._advance_stage()
        was_open = self.clock.open
        self.marks.clock.note_batch_requested()
        self.marks.in_window = self.clock.open
        if self.clock.open and not was_open:
            self._open_window()
        if self.marks.ranges is not None:
            self.marks.ranges.push("data_wait")

    def note_batch_received(self) -> None:
        """Note that the loop has its batch."""
        if self.marks.ranges is not None:
            self.marks.ranges.pop()
        self._note_costs()
        self.marks.clock.note_batch_received()
        if self._boundary and not self.marks.in_work:
            self._begin_probe()
        self._boundary = False

    def batch_end(
        self, loss: torch.Tensor | None, batch: Any, size: int | None, step_ends: bool, batches_per_step: float
    ) -> None:
        """Record a finished batch of `size` samples. `loss` is divided by `batches_per_step`, as in Lightning, in a
        step of fewer batches too."""
        self.losses.add(loss, step_ends, batches_per_step)
        if self.clock.detailed or self._probe is not None:
            self.tokens.add(batch)
        self.clock.batch_done(size, step_ends)
        if self.marks.clock is not self.clock:
            self.marks.clock.batch_done(size, step_ends)
        if step_ends:
            self._boundary = True
            if self.clock.open:
                self._last_sums = self._sums
                self._first_sums = self._first_sums or self._sums
                if self.board is not None:
                    self.board.note_step()
                if self.clock.total_steps == self.ends_at:
                    self.note_end()
            if self._extra is not None:
                self._extra.step_ends()
                self._extra_steps += 1
            if self._fetched_inside:
                self._advance_stage()
                self._begin_probe()

    def note_end(self) -> None:
        """Note that the latest step may be the fit's last: read now what workers owe, because they go on meanwhile."""
        if self.clock.open and self._owed_after != self.clock.total_steps:
            self.owed, self._owed_after = (self.owed[0], self._owed()), self.clock.total_steps

    def close(self) -> None:
        """End whatever is still running, because the fit is over. A probe needs its whole step."""
        if self._probe is not None and not self._boundary:
            self._probe.give_up()
            self._probe = None
        self._end_probe()
        if self._extra is not None:
            self._extra.end()
            self._extra = None
        if self.drift_checks is not None:
            self.drift_checks.end(self.clock.total_steps)
        self._close_window()

    def stop(self) -> None:
        """Give up: stop everything that we started, and measure no more. Harmless after ``close``."""
        running = [probe for probe in (self._probe, self._extra) if probe is not None]
        self._probe = self._extra = None
        self._probes.clear()
        self._extras.clear()
        for probe in running:
            with suppress(Exception):  # a failing probe may be the reason for giving up
                probe.give_up()
        self.marks.around_work = self.marks.around_forward = self.marks.ranges = None
        self.garbage.stop()
        for clock in (self.clock, self.marks.clock):
            clock.stop()
        if self.board is not None:
            self.board.stop()

    # -- stages ---------------------------------------------------------------------------------------------------

    def _advance_stage(self) -> None:
        """Between two steps: move on to the next stage if it is time."""
        self._end_probe()
        if self.clock.open and self._is_over():
            self._close_window()
            self._begin_next_extra()
        elif self._extra is not None:
            if self._extra_steps >= self._extra.steps:
                self._extra.end()
                self._begin_next_extra()
        elif self.drift_checks is not None and self.clock.closed:
            self.drift_checks.between_steps(self.clock.total_steps)

    def _begin_probe(self) -> None:
        if self._probes and (probe := self._probes.pop(self.clock.total_steps, None)) is not None:
            self._probe, self._trials = probe, self._count_trials()
            probe.begin()

    def begin_probe_again(self) -> None:
        """Restart the probe of a step that has begun but not run, if rungs have been tried since: that may have
        compiled modules."""
        if self._probe is not None and self._count_trials() > self._trials:
            self._probe.give_up()
            self._trials = self._count_trials()
            self._probe.begin()

    def _end_probe(self) -> None:
        if self._probe is None:
            return
        probe, self._probe = self._probe, None
        if self._count_trials() == self._trials:
            probe.end()
        else:  # it saw what trials of ours did, too
            probe.give_up()
            steps = range(self.clock.total_steps, self.settings.warmup_steps)
            if (free := next((step for step in steps if step not in self._probes), None)) is not None:
                self._probes[free] = probe

    def _begin_next_extra(self) -> None:
        self._extra, self._extra_steps = self._extras.popleft() if self._extras else None, 0
        if self._extra is not None:
            self._extra.begin()

    def _open_window(self) -> None:
        self._opened_at = time.monotonic()
        self.owed = (self._owed(), None)
        self.garbage.start()
        if self.board is not None:
            self.board.start()

    def _is_over(self) -> bool:
        long = time.monotonic() - self._opened_at > LONGEST_S
        if not long and not self._extras:
            return False  # the common case, at every step of most fits
        done, passed = self.clock.total_steps, self.clock.account
        long_enough = passed.batches >= 10 * self.clock.queued_batches
        if long and long_enough:
            return True
        if not self._extras or passed.steps < FEWEST_STEPS:
            return False
        if self.ends_at is not None and done >= self.ends_at - sum(extra.steps for extra in self._extras) - 1:
            return True
        return passed.steps >= ENOUGH_STEPS and long_enough and self.ends_at is None

    def _note_sums(self) -> None:
        if self.clock.open:
            marks, garbage = self.marks, self.garbage
            hooks_s, requested_s = dict(marks.hooks_s), dict(garbage.requested_s)
            self._sums = _Sums(hooks_s, requested_s, marks.validation_loading_s, garbage.passes)

    def _keep_sums_of_whole_steps(self) -> None:
        """Take out what was summed before the first whole step of the window and after the last: a step ends where the
        work of its last batch has been issued, and the last one may be followed by a validation, hooks or an error."""
        first, last = self._first_sums, self._last_sums
        if first is None or last is None:
            return
        for sums, before, until in (
            (self.marks.hooks_s, first.hooks_s, last.hooks_s),
            (self.garbage.requested_s, first.requested_s, last.requested_s),
        ):
            sums.clear()
            sums.update({name: more for name, s in until.items() if (more := s - before.get(name, 0.0)) > 0})
        self.marks.validation_loading_s = last.validation_loading_s - first.validation_loading_s
        self.garbage.passes = last.passes - first.passes

    def _close_window(self) -> None:
        if not self.clock.open:
            return
        self.marks.in_window = False
        self.garbage.stop()
        self._keep_sums_of_whole_steps()
        self.note_end()
        self.window = self.clock.close()
        if self.board is not None:
            self.board_seen = self.board.stop()
        if self.drift_checks is not None:
            self.drift_checks.reference(self.window, self.clock.total_steps)


def _name_caller(frame: FrameType | None) -> str | None:
    """Return the line of other code that called from here; None if it was fastloop."""
    site = find_site(frame)
    return None if site.ours else site.where
