"""Tries rungs before they count: a rehearsal after the first step, a second look in later ones, and where steps are
replayed, a look at replays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastloop.bridge.apply.rehearse.budget import find_cheapest, is_quick
from fastloop.bridge.apply.rehearse.rehearsal import Rehearsal
from fastloop.bridge.apply.rehearse.second_look import StepTimingCheck
from fastloop.bridge.apply.rehearse.time_limit import leaves_on_sigterm
from fastloop.bridge.apply.replay.graphed_steps import GraphedSteps
from fastloop.bridge.apply.replay.replay_look import ReplayTimingCheck
from fastloop.errors import FastLoopError, describe
from fastloop.feeds.call_shapes import Sizes, find_changes, read_sizes
from fastloop.judge.rehearsal import RungOutcome
from fastloop.records.measurement import FIRST_CALLS
from fastloop.records.plan import Step

MOST_BATCHES = 16
"""Batches before the rehearsal whose sizes are compared with the first one's."""


class RungTrials:
    """Runs a rehearsal, and the second look that follows it, between the batches of a fit.

    Args:
        rehearsal: the rehearsal to run.
        pause: undoes a rung that may come back.
        record_outcomes: receives the outcomes of some rungs.
        graphs: replays the steps of this run; None: they are not replayed.
        may_grow: whether micro-batches become larger once the rungs that cost nothing to switch are on. The other rungs
            are then rehearsed one step later.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        *,
        pause: Callable[[Step], None],
        record_outcomes: Callable[[Sequence[RungOutcome]], None],
        graphs: GraphedSteps | None,
        may_grow: Callable[[], bool],
    ) -> None:
        self._graphs, self._terms, self._may_grow = graphs, rehearsal.terms, may_grow
        self._tried: tuple[list[Step], list[RungOutcome]] = [], []
        """Rungs of an earlier rehearsal, and what came of them."""
        self._slower: list[tuple[Step, RungOutcome]] = []
        """Rungs that eager steps were slower with."""
        self._replay_check: ReplayTimingCheck | None = None
        self._site, self._handle = rehearsal.site, rehearsal.handle
        self._pause, self._record_outcomes = pause, record_outcomes
        self._rehearsal: Rehearsal | None = rehearsal
        self._second_look: StepTimingCheck | None = None
        """The second look at the rungs that the rehearsal kept; None before and after it."""
        self._first_sizes: Sizes = {}
        self._late: list[Callable[[Any], Any]] = []
        """New conversions, still to be applied to the batch that reached the device before their rung was on."""
        self.seen: Mapping[str, Any] = {}
        """The comparison of batches with and without rungs, if a second look was needed."""

    @property
    def eager_trials_are_over(self) -> bool:
        """Whether no trial of eager steps is left; a check of replayed ones may be."""
        return self._rehearsal is None and self._second_look is None

    @property
    def has_trials_left(self) -> bool:
        """Whether something is left to do between batches."""
        return not self.eager_trials_are_over or self._replay_check is not None

    def note_batch(self, batch: Any) -> None:
        """A training step begins with this batch."""
        if self._rehearsal is not None:
            self._rehearsal.note_batch(batch)
        if self._second_look is not None:
            self._second_look.forward_starts()

    def take_late_conversions(self) -> list[Callable[[Any], Any]]:
        """Return and clear the conversions still to be applied to the batch of the step that is beginning."""
        late, self._late = self._late, []
        return late

    def first_batch_done(self, batch: Any) -> None:
        """The first batch was trained on without changes."""
        if self._rehearsal is not None:
            self._rehearsal.stop_recording()
            self._first_sizes = read_sizes([batch], {})

    def backward_ends(self) -> None:
        """A backward pass has run."""
        if self._second_look is not None:
            self._second_look.backward_ends()

    def run_due(self, batch: Any) -> None:
        """Before this batch, between two steps: rehearse the waiting rungs once the first step is done. Later, take a
        second look at those that stay, then a look at replays."""
        before = list(self._site.staging.conversions)
        try:
            if self._second_look is not None:
                self._look_again(self._second_look, batch)
            elif self._rehearsal is not None:
                self._rehearse(self._rehearsal, batch)
            elif self._replay_check is not None:
                self._look_at_replays(self._replay_check)
        finally:
            self._late += [each for each in self._site.staging.conversions if each not in before]

    def _rehearse(self, rehearsal: Rehearsal, batch: Any) -> None:
        if len(self._site.changed_sizes) < MOST_BATCHES:
            self._site.changed_sizes.append(find_changes(self._first_sizes, read_sizes([batch], {})))
        if not rehearsal.is_due():
            return
        self._rehearsal, terms, later = None, rehearsal.terms, self._take_later(rehearsal)
        try:
            with self._site.one_time.span("rehearsal"), leaves_on_sigterm(self._site.trainer):
                outcomes = rehearsal.run(self._graphs.estimate_trial_s if self._graphs is not None else None)
        except FastLoopError:
            raise
        except Exception as error:  # our own error: the rehearsal catches all errors of user code
            why = f"the rehearsal failed: {describe(error)}"
            self._site.warn(f"the rehearsed rungs are off: {why}")
            outcomes = self._drop(rehearsal.steps, why, is_lasting=True)
        except BaseException:  # an interrupt: no step has run with any of them, and a report follows
            for step in rehearsal.steps:
                self._handle.unapply(step)
            raise
        kept = {outcome.rung for outcome in outcomes if outcome.fault is None}
        for rung, began, seconds in rehearsal.first_calls:
            if rung in kept:
                self._site.one_time.add_span(FIRST_CALLS, began, began + seconds)
        self._record_outcomes(outcomes)
        self._tried = self._tried[0] + rehearsal.steps, self._tried[1] + outcomes
        if later:
            self._rehearsal = Rehearsal(self._site, later, terms, self._handle)
            return
        rehearsal.steps, outcomes = self._tried
        self._terms = rehearsal.terms
        handle = dataclasses.replace(self._handle, unapply=self._pause)
        self._second_look = StepTimingCheck.after(rehearsal, outcomes, handle, self._first_sizes)
        self._note_slower(rehearsal.steps, outcomes)

    def _take_later(self, rehearsal: Rehearsal) -> list[Step]:
        """Take from a rehearsal the rungs to be rehearsed on the calls of the next step, because micro-batches become
        larger with the others."""
        quick = [step for step in rehearsal.steps if is_quick(step)]
        if not quick or not self._may_grow():
            return []
        later = [step for step in rehearsal.steps if step not in quick]
        rehearsal.steps = quick
        return later

    def _look_again(self, look: StepTimingCheck, batch: Any) -> None:
        try:
            if not look.batch_starts(batch):
                return
            outcomes = look.dropped
        except Exception as error:  # our own error, as above
            outcomes = self._drop(look.steps, f"switching it in training failed: {describe(error)}", is_lasting=False)
        self._second_look, self.seen = None, look.seen
        self._record_outcomes(outcomes)
        for outcome in outcomes:
            self._site.warn(f"{outcome.rung} is now off: {outcome.fault}")
        self._note_slower(look.steps, outcomes)

    def _note_slower(self, steps: Sequence[Step], outcomes: Sequence[RungOutcome]) -> None:
        """Note the rungs that eager steps were slower with; once all are known, look at them in replays."""
        slower = {each.rung: each for each in outcomes if each.is_slower}
        for step in steps:
            if (outcome := slower.get(step.rung)) is not None:
                self._slower.append((find_cheapest(step) if outcome.is_cheaper else step, outcome))
        if self.eager_trials_are_over and self._slower and self._graphs is not None:
            self._replay_check = ReplayTimingCheck(self._site, self._slower, self._graphs, self._terms, self._handle)

    def _look_at_replays(self, look: ReplayTimingCheck) -> None:
        try:
            if not look.batch_starts():
                return
            outcomes = look.outcomes
        except Exception as error:  # our own error, as above
            steps = [step for step, _ in self._slower]
            outcomes = self._drop(steps, f"switching it in training failed: {describe(error)}", is_lasting=False)
        self._replay_check = None
        self._record_outcomes(outcomes)

    def _drop(self, steps: Sequence[Step], why: str, *, is_lasting: bool) -> list[RungOutcome]:
        for step in steps:
            self._handle.unapply(step)
        return [RungOutcome(rung=step.rung, fault=why, is_lasting=is_lasting) for step in steps]

    def end(self) -> None:
        """Training is over."""
        if self._rehearsal is not None:
            self._rehearsal.stop_recording()
        replays, self._replay_check = self._replay_check, None
        self._rehearsal = self._second_look = None
        if replays is not None and replays.outcomes:
            self._record_outcomes(replays.outcomes)
