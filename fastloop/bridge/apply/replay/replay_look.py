"""Looks again, in replayed steps, at the rungs that made eager steps slower.

Where launching kernels takes longer than running them, an eager step shows what a rung costs the host, and not what it
saves on the device; in a replay, only the device's work counts. So once a step is recorded, each such rung is switched
on again between two steps, the step is recorded anew, and the times of the two recordings are compared.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from fastloop.bridge.apply.rehearse.budget import Terms
from fastloop.bridge.apply.rehearse.rehearsal import ApplierHandle
from fastloop.bridge.apply.replay.graphed_steps import GraphedSteps
from fastloop.bridge.apply.site import LiveSite
from fastloop.errors import describe
from fastloop.judge import rehearsal as judge
from fastloop.judge.rehearsal import RungOutcome
from fastloop.numbers import format_short
from fastloop.records.plan import Rehearsed, Step

Batches = Generator[None, None, None]
"""Resumed at the start of each batch."""


class ReplayTimingCheck:
    """Times replayed steps with each rung that made eager steps slower. Steps are recorded only in runs on one device.

    Args:
        slower: the rungs to try, in the ladder's order, with the outcomes that removed them.

    Attributes:
        outcomes: outcomes of the rungs that were switched on again, whether they stay on or not.
    """

    def __init__(
        self,
        site: LiveSite,
        slower: Sequence[tuple[Step, RungOutcome]],
        graphs: GraphedSteps,
        terms: Terms,
        handle: ApplierHandle,
    ) -> None:
        self.outcomes: list[RungOutcome] = []
        self._site, self._slower, self._graphs, self._terms, self._handle = site, slower, graphs, terms, handle
        self._global_step, self._is_between_steps = site.trainer.global_step, True
        self._batches = self._run()

    def batch_starts(self) -> bool:
        """A batch is about to be trained on; returns whether the look is over. May switch rungs, between two steps."""
        step = self._site.trainer.global_step
        self._is_between_steps, self._global_step = step != self._global_step, step
        return next(self._batches, self) is self

    def _run(self) -> Batches:
        yield from self._wait_for_recording()
        for step, outcome in self._slower:
            without_ms = self._graphs.replay_ms
            if without_ms is None:
                return
            if not self._may_pay(outcome, without_ms) or self._graphs.explain_no_time(trials=2) is not None:
                continue
            try:
                self._handle.apply(step)
            except Exception as error:
                self._handle.unapply(step)
                self._site.say(f"{step.rung} stays off: {describe(error)}")
                continue
            self.outcomes.append(outcome)
            yield from self._record()
            with_ms = self._graphs.replay_ms
            if with_ms is not None and with_ms < judge.REPLAY_GAIN * without_ms:
                self.outcomes[-1] = self._keep(outcome, with_ms, without_ms)
            else:
                self._handle.unapply(step)
                yield from self._record()

    def _may_pay(self, outcome: RungOutcome, replay_ms: float) -> bool:
        """Whether the rung's one-time cost, which is spent again, may pay back."""
        terms = self._terms
        if not terms.weighs_costs or not outcome.first_call_s:
            return True
        step_ms = replay_ms * terms.batches_per_step
        return terms.explain_no_pay_back(outcome.first_call_s, step_ms) is None

    def _keep(self, outcome: RungOutcome, with_ms: float, without_ms: float) -> RungOutcome:
        saved_ms = (without_ms - with_ms) * self._terms.batches_per_step
        pays_back = judge.count_pay_back_steps(outcome.first_call_s, saved_ms) if outcome.is_costly else None
        seen = Rehearsed(eager_ms=without_ms, changed_ms=with_ms)
        if outcome.rehearsed is not None:
            seen = replace(seen, deviation=outcome.rehearsed.deviation)
        times = f"{format_short(with_ms, 'ms')} with it, {format_short(without_ms, 'ms')} without it"
        self._site.say(f"{outcome.rung} is on after all: a replayed step takes {times}")
        return replace(outcome, fault=None, is_slower=False, rehearsed=seen, pays_back_after_steps=pays_back)

    def _record(self) -> Batches:
        self._graphs.record_anew()
        yield from self._wait_for_recording()

    def _wait_for_recording(self) -> Batches:
        """Wait until a step is recorded or none can be, and then for the end of a step."""
        while (self._graphs.replay_ms is None and self._graphs.refused is None) or not self._is_between_steps:
            yield
