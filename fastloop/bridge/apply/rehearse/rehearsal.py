"""Tries, in the user's process, rungs that change the device's work, before training uses them.

The first step runs as the user wrote it, and its calls of the model's modules are recorded. Before the second step
these calls are played again, without a trace: unchanged, then with the rungs added one at a time. A rung is removed if
it raises, deviates, recompiles for the same shapes, takes too long or cannot pay back; training goes on without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastloop.bridge.apply.read_training import find_precision
from fastloop.bridge.apply.rehearse import memory
from fastloop.bridge.apply.rehearse.budget import COSTLY_LIMIT_S, LIMIT_S, Terms, TrialBudget, find_cheapest, is_costly
from fastloop.bridge.apply.rehearse.compared import draw, measure_rounding
from fastloop.bridge.apply.rehearse.optimizer_twins import try_optimizers
from fastloop.bridge.apply.rehearse.played import RunResults, compare_results
from fastloop.bridge.apply.rehearse.ranks import gather, gather_first, refuse_exchange
from fastloop.bridge.apply.rehearse.recorded_calls import CallRecorder, CallReplayer
from fastloop.bridge.apply.rehearse.remembered import Remembered
from fastloop.bridge.apply.rehearse.surroundings import check_device
from fastloop.bridge.apply.rehearse.time_limit import announced, explain, find_limit, limited
from fastloop.bridge.apply.site import LiveSite
from fastloop.errors import NotApplicable, describe, is_out_of_memory, walk_causes
from fastloop.evidence.model import dynamo_graphs
from fastloop.judge import rehearsal as judge
from fastloop.judge.rehearsal import Deviation, RungOutcome
from fastloop.records.plan import Rehearsed, Step

UNCOUNTED_BATCHES = 8
MOST_PLAYS = 10
BASE_SHARE, CHANGED_SHARE = 0.25, 0.6
"""Shares of a rehearsal's time up to which unchanged modules, and then changed ones, are timed more precisely."""
ENOUGH_MS = 300.0
"""Play time that suffices for one timing."""


@dataclass(frozen=True)
class ApplierHandle:
    """The applier's functions that a rehearsal may use on the run."""

    apply: Callable[[Step], None]
    unapply: Callable[[Step], None]
    settings: Callable[[str], Any]
    """Returns a rung's settings by its name."""


class Rehearsal:
    """The rehearsal of one fit on one rank. All ranks take part at the same time and reach the same result."""

    def __init__(self, site: LiveSite, steps: Sequence[Step], terms: Terms, handle: ApplierHandle) -> None:
        self.site, self.steps, self.terms, self.handle = site, list(steps), terms, handle
        self._recorder = CallRecorder(site.module, site.facts.compile_targets, site.groups)
        self._began_at = site.trainer.global_step
        self.first_calls: list[tuple[str, float, float]] = []
        """For each rung that does not compile: its name, when its first call began, and by how many seconds it exceeded
        the second. That is the time to load and plan kernels, spent once: here or in the first step that uses them."""
        self._unchanged: dict[bool, RunResults] = {}
        """The unchanged modules' results, with dropout (True) and without."""
        self._dropout_ms = 0.0
        """What to add to times taken without dropout, to compare them with times taken with it."""
        self._first_began_s, self._first_ms = 0.0, math.inf
        self._captured = 0
        """Graphs of the user's code that Dynamo captured in the first step."""
        self._count_captured: Callable[[], int] = int
        self._batches = 0

    def note_batch(self, args: tuple[Any, ...]) -> None:
        """The first batch is about to be trained on. `args` are the arguments of training_step."""
        if self._recorder.is_recording:
            self._recorder.note_batch(args)
            memory.forget_peak(self.site.device)
            self._count_captured = dynamo_graphs.follow_users_graphs()
            self._first_began_s = time.perf_counter()

    def stop_recording(self) -> None:
        """The first batch is done, and all calls to replay later are recorded. Idempotent."""
        if self._recorder.is_recording:
            self._first_ms = 1e3 * (time.perf_counter() - self._first_began_s) / self._recorder.repeats
            self._captured = self._count_captured()
        self._recorder.stop()

    def is_due(self) -> bool:
        """Whether the first optimizer step is done; must be called once per batch. Lightning does not count steps that
        a module makes with the bare optimizers; in that case a number of batches decides."""
        self._batches += 1
        uncounted = not self.site.module.automatic_optimization and self._batches > UNCOUNTED_BATCHES
        return bool(self.site.trainer.global_step > self._began_at) or uncounted

    # -- the rehearsal itself -------------------------------------------------------------------------------------

    def run(self, estimate_recording_s: Callable[[float], float] | None = None) -> list[RungOutcome]:
        """Try all rungs; those that stay are applied when this returns. See `GraphedSteps.estimate_trial_s`."""
        outcomes: list[RungOutcome] = []
        self.stop_recording()
        self.site.step_bytes = memory.read_peak(self.site.device)
        made = self.site.trainer.global_step - self._began_at
        if made and not self.site.module.automatic_optimization:
            self.terms = self.terms.of_manual_steps(self.site.trainer, made, self._batches - 1)
        self.terms = replace(self.terms, batches_per_step=self.terms.batches_per_step * self._recorder.repeats)
        calls = self._recorder.calls
        names = dict.fromkeys(call.name for call in calls)
        self.site.recorded = {name: [(call.args, call.kwargs) for call in calls if call.name == name] for name in names}
        self._replayer = CallReplayer(self.site, calls)
        modules = self._replayer.modules
        known = Remembered(modules, self.site.device, self.site.optimizers)
        self._budget = TrialBudget(self.terms, self.site.module, modules, known, self.handle.settings, self._first_ms)
        try:
            refused = self._budget.refuse_all(self.steps)
            if all(gather(self.site.trainer, bool(refused))):
                return refused
            problem = self._play_unchanged()
            self.terms = self._budget.cap_steps_by_max_time(self.site.trainer)
            if estimate_recording_s is not None:
                self._budget.reserve_recording_time(estimate_recording_s)
            problem = problem or self._play_with_dropout()
            for step in self.steps:
                outcomes.append(self._try_step(step, problem, outcomes))
            return self._drop_slow(outcomes)
        finally:
            self.site.recorded = {}
            self._unchanged.clear()
            self._recorder.calls.clear()

    def _play_unchanged(self) -> str | None:
        """Record the unchanged modules' results and time; returns why they cannot be replayed, or None."""
        problem = self._recorder.problem
        if not self.site.facts.plain_gradients:
            problem = f"under {self.site.facts.strategy} ranks exchange data inside a module's call"
        elif problem is None and not self._recorder.calls:
            problem = "no module with parameters was called in the first step"
        wanted = {self._keeps_dropout(step) for step in self.steps if step.change.rehearse == "modules"}
        if wanted:
            problem = problem or self._play_base(dropout=False not in wanted)
        return self._agree_on_base(problem)

    def _agree_on_base(self, problem: str | None) -> str | None:
        """Return the first problem that any rank has, or None; use the slowest rank's time on all."""
        problems, times_ms = zip(*gather(self.site.trainer, (problem, self._budget.base_ms)), strict=True)
        self._budget.base_ms = max(times_ms)
        return next((each for each in problems if each is not None), None)

    def _play_with_dropout(self) -> str | None:
        """Record the unchanged modules' results also with dropout, if a rung that will be tried needs them."""
        if not any(gather(self.site.trainer, self._unchanged.keys() == {False})):  # ranks may call different modules
            return None
        costly = [step for step in self.steps if is_costly(step)]
        if all(self._refuse(each) is not None for step in costly for each in (step, find_cheapest(step))):
            return None
        without_ms = self._budget.base_ms
        problem = self._agree_on_base(self._play_base(dropout=True))
        self._budget.base_ms = max(without_ms, self._budget.base_ms)
        self._dropout_ms = self._budget.base_ms - without_ms
        return problem

    def _play_base(self, *, dropout: bool) -> str | None:
        """Play the unchanged modules and take their time. Returns why it failed, or None."""
        try:
            with (
                announced("replaying the calls of the first step", self.site.say),
                limited(LIMIT_S, cause="the rehearsal of your own model", do="write rehearsal: off"),
            ):
                if self.site.trainer.world_size > 1 and not self.site.facts.compiled_by_user and not self._unchanged:
                    with refuse_exchange(self.site.trainer):  # ranks play different numbers of times
                        self._replayer.replay()
                began = time.perf_counter()
                self._unchanged[dropout] = base = self._replayer.replay(dropout=dropout)
                self._budget.play_s = time.perf_counter() - began
                self._budget.launch_share = max(self._budget.launch_share, base.launch_ms / base.ms)
                self._budget.base_ms = self._read_ms(base.ms, dropout=dropout, share=BASE_SHARE)
        except Exception as error:
            return f"its calls cannot be replayed: {explain(error)}"
        return None

    def _keeps_dropout(self, step: Step) -> bool:
        """Whether a rung is tried with dropout: a compiled module would recompile without it."""
        return is_costly(step) or not self._replayer.has_dropout()

    def _try_step(self, step: Step, problem: str | None, before: list[RungOutcome]) -> RungOutcome:
        """Try one rung on top of those kept before it. All ranks return the same result."""
        if problem is not None and step.change.rehearse == "modules":
            if step.rung in self.terms.by_ladder:
                return RungOutcome(rung=step.rung, fault=f"it could not be rehearsed: {problem}", is_lasting=False)
            return self._apply_untried(step)
        self._budget.changed_ms = judge.find_last_ms(before, self._budget.base_ms)
        fault = self._refuse(step)
        if fault is not None and step.change.cheaper is not None:
            step = find_cheapest(step)
            fault = self._refuse(step)
        if fault is not None:
            return RungOutcome(rung=step.rung, fault=fault, is_lasting=False)
        outcome = self._agree(step, self._try_here(step, before))
        if outcome.fault is not None and outcome.is_lasting and step.change.rehearse == "modules":
            outcome = self._try_without_others(step, outcome, before)
        if outcome.fault is not None and outcome.is_lasting:
            self._budget.keep_failure(step, outcome.fault)
            if step.change.cheaper is not None:
                second = self._try_step(find_cheapest(step), problem, before)
                both = f"{outcome.fault}; with fewer modules: {second.fault}"
                return second if second.fault is None else replace(second, fault=both, is_lasting=True)
        return outcome

    def _refuse(self, step: Step) -> str | None:
        """Why a rung is not even tried, if any rank refuses it, or None."""
        return gather_first(self.site.trainer, self._budget.refuse(step, self._captured))

    def _try_here(self, step: Step, before: Sequence[RungOutcome]) -> RungOutcome:
        """Apply a rung and replay what it changes; undo it if that fails. No collectives."""
        limit_s, do = self._budget.limit_s(step), f"write rungs.{step.rung}.enabled: false"
        try:
            with (
                announced(f"trying {step.rung} on the calls of the first step", self.site.say),
                limited(limit_s, cause=f"the rehearsal of {step.rung}", do=do),
            ):
                if step.change.rehearse == "optimizers":
                    outcome = try_optimizers(step, self.site, apply=self.handle.apply, unapply=self.handle.unapply)
                else:
                    outcome = self._try_modules(step, before)
        except NotApplicable as error:
            fault, is_lasting = describe(error), False
        except Exception as error:
            # Limits and memory may be this run's own, and an optimizer's twin may fail for unrelated reasons.
            # No name is kept for one of the causes: it would keep the failed call's frames, and what they hold, alive.
            host_lacks_memory = any(isinstance(each, MemoryError) for each in walk_causes(error))
            fault, is_lasting = explain(error), step.change.rehearse == "modules" and not host_lacks_memory
            if any(map(is_out_of_memory, walk_causes(error))):
                fault, is_lasting = "there was not enough memory to try it", False
            elif find_limit(error) is not None:
                self._budget.note_limit(step, limit_s)
                is_lasting = is_lasting and limit_s == COSTLY_LIMIT_S
        else:
            if outcome.fault is not None:
                self.handle.unapply(step)
            return outcome
        self.handle.unapply(step)
        check_device(self.site.device, step.rung)
        return RungOutcome(rung=step.rung, fault=fault, is_lasting=is_lasting)

    def _try_modules(self, step: Step, before: Sequence[RungOutcome]) -> RungOutcome:
        dropout = self._keeps_dropout(step)
        usual = self._unchanged[dropout]
        # Drawn before the rung is applied: switched off for it later, the rung would compile again.
        drawn = draw(self._replayer, usual, dropout=dropout) if usual.is_random and is_costly(step) else []
        self.handle.apply(step)
        began = time.perf_counter()
        first = self._replayer.replay(dropout=dropout)
        deviation = compare_results(usual, first)
        more_ms = 0.0 if dropout else self._dropout_ms
        if self._budget.shares_time(step):
            one_time_s, ms = step.change.first_call_s, first.ms + more_ms
            fault = judge.explain_far_slower(ms, self._budget.base_ms, one_time_s)
            if fault is not None and not self._budget.may_repeat_slow_first_call(step, ms):
                return self._give_up(step, fault, deviation, ms)
        captured = dynamo_graphs.count_captured() if is_costly(step) else 0
        second = self._replayer.replay(dropout=dropout)
        if is_costly(step) and dynamo_graphs.count_captured() > captured:
            return RungOutcome(rung=step.rung, fault="it compiled again for calls of the same shapes")
        first_s = max(0.0, first.ms - second.ms) / 1e3
        if is_costly(step) or second.ms + more_ms <= judge.SLOWER * self._budget.base_ms:  # else it will hardly stay
            self._note_first_call(step, began, first_s)
        fault, largest = self._find_fault(step, first, deviation, drawn, dropout=dropout)
        no_room = memory.explain_no_room(self.site, usual, second) if step.rung in self.terms.by_ladder else None
        changed_ms = more_ms + self._read_ms(second.ms, dropout=dropout, share=CHANGED_SHARE)
        saved_ms = (judge.find_last_ms(before, self._budget.base_ms) - changed_ms) * self.terms.batches_per_step
        return RungOutcome(
            rung=step.rung,
            fault=fault or no_room,
            is_lasting=fault is not None,
            on_modules=True,
            is_costly=is_costly(step),
            first_call_s=first_s,
            is_cheaper=step not in self.steps,
            rehearsed=self._describe(largest, changed_ms),
            pays_back_after_steps=judge.count_pay_back_steps(first_s, saved_ms) if is_costly(step) else None,
        )

    def _give_up(self, step: Step, fault: str, seen: Deviation, ms: float) -> RungOutcome:
        """Return the outcome of a slow rung that was played only once. Replays may still show it to be fast, if its
        results are right."""
        return RungOutcome(
            rung=step.rung,
            fault=fault,
            is_lasting=False,
            on_modules=True,
            is_slower=judge.is_close(seen, find_precision(self.site.trainer, self.site.module)),
            rehearsed=self._describe(seen.largest, ms),
        )

    def _describe(self, deviation: float | None, changed_ms: float) -> Rehearsed:
        base_ms, is_whole = self._budget.base_ms, self._recorder.is_whole
        return Rehearsed(deviation=deviation, eager_ms=base_ms, changed_ms=changed_ms, of_batch=is_whole)

    def _try_without_others(self, step: Step, failed: RungOutcome, before: list[RungOutcome]) -> RungOutcome:
        """Retry a failed rung without each kept one in turn: two may fail only together; then the faster one stays."""
        others = {each.rung: each for each in self.steps if each.change.rehearse == "modules"}
        for place in reversed(range(len(before))):
            kept = before[place]
            if kept.fault is not None or kept.rung not in others or kept.rehearsed is None:
                continue
            self.handle.unapply(others[kept.rung])
            rest = [each for each in before if each is not kept]
            alone = self._agree(step, self._try_here(step, rest))
            if (
                alone.rehearsed
                and alone.fault is None
                and not judge.is_slower(alone.rehearsed, kept.rehearsed.changed_ms)
            ):
                why = f"it breaks {step.rung}, which is faster alone: {failed.fault}"
                before[place] = replace(kept, fault=why, is_lasting=False)
                return alone
            if alone.fault is None:
                self.handle.unapply(step)
            self.handle.apply(others[kept.rung])
            if alone.fault is None:
                why = f"{failed.fault}; it works without {kept.rung}, which is faster alone"
                return replace(failed, fault=why, is_lasting=False)
        return failed

    def _drop_slow(self, outcomes: list[RungOutcome]) -> list[RungOutcome]:
        """Remove rungs that a shipped ladder switched on if they make the first step's calls slower."""
        judged = judge.drop_slow(outcomes, self._budget.base_ms, self.terms.by_ladder)
        steps = {each.rung: each for each in self.steps}
        for before, after in zip(outcomes, judged, strict=True):
            if before.fault is None and after.fault is not None:
                self.handle.unapply(steps[after.rung])
        return judged

    # -- readings -------------------------------------------------------------------------------------------------

    def _read_ms(self, first_ms: float, *, dropout: bool, share: float) -> float:
        """The shortest of a few replays, as many as fit into this share of the rehearsal's time."""
        shortest, plays, spent_ms = first_ms, 1, first_ms
        while plays < MOST_PLAYS and spent_ms < ENOUGH_MS and self._budget.may_play(first_ms, share):
            played_ms = self._replayer.replay(dropout=dropout).ms
            shortest, plays, spent_ms = min(shortest, played_ms), plays + 1, spent_ms + played_ms
        return shortest

    def _find_fault(
        self, step: Step, first: RunResults, seen: Deviation, drawn: Sequence[Deviation], *, dropout: bool
    ) -> tuple[str | None, float | None]:
        """What is wrong with a rung's first replay, and its deviation, see `judge.find_fault`.

        Args:
            drawn: deviations of the modules without the rung under other random numbers; empty if not measured yet.
        """
        precision, usual = find_precision(self.site.trainer, self.site.module), self._unchanged[dropout]
        if judge.is_close(seen, precision):
            return None, seen.largest
        rounding = measure_rounding(self._replayer, first, precision, dropout=dropout)
        fault, largest = judge.find_fault(seen, rounding, precision)
        if fault is None or not usual.is_random:
            return fault, largest
        if not drawn:
            self.handle.unapply(step)
            drawn = draw(self._replayer, usual, dropout=dropout)
            self.handle.apply(step)
        changed = draw(self._replayer, usual, dropout=dropout, count=len(drawn))
        return judge.find_fault(seen, rounding, precision, judge.Draws(usual=drawn, changed=changed))

    def _note_first_call(self, step: Step, began: float, seconds: float) -> None:
        """Note by how much a rung's first call exceeded its second: training would spend that without a rehearsal."""
        self._budget.add_one_time(step, seconds)
        if not is_costly(step):  # compiles are noted where they happen
            self.first_calls.append((step.rung, began, seconds))

    # -- the run around it ----------------------------------------------------------------------------------------

    def _apply_untried(self, step: Step) -> RungOutcome:
        try:
            self.handle.apply(step)
        except Exception as error:
            self.handle.unapply(step)
            return RungOutcome(rung=step.rung, fault=explain(error), is_lasting=False)
        return RungOutcome(rung=step.rung)

    def _agree(self, step: Step, mine: RungOutcome) -> RungOutcome:
        """The outcome for all ranks: a rung that fails on one is removed on all; times are those of the slowest."""
        every = gather(self.site.trainer, mine)
        failed = next((rank for rank, each in enumerate(every) if each.fault is not None), None)
        if failed is None:
            others = [each.rehearsed for each in every if each.rehearsed]
            return replace(mine, rehearsed=mine.rehearsed and judge.take_slowest_times(mine.rehearsed, others))
        if mine.fault is None:
            self.handle.unapply(step)
        theirs = every[failed]
        where = f"on rank {failed}: " if len(every) > 1 else ""
        return replace(mine, fault=f"{where}{theirs.fault}", is_lasting=theirs.is_lasting)
