"""Rungs that change the device's work are tried in the user's process before they count.

The first step runs as the user wrote it, and its calls of the model's modules are recorded. Before the second step they
are played again, without a trace: unchanged, then with one rung after the other. A rung that raises, that deviates,
that compiles again for the same shapes, that takes too long or that cannot pay back is taken away again, and training
goes on as if nobody had asked for it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fastloop.bridge.apply.read_training import find_precision
from fastloop.bridge.apply.rehearse.budget import COSTLY_LIMIT_S, LIMIT_S, Budget, Terms, find_cheapest, is_costly
from fastloop.bridge.apply.rehearse.optimizer_twins import step_twins
from fastloop.bridge.apply.rehearse.played import Played, measure_deviation
from fastloop.bridge.apply.rehearse.recorded_calls import CallRecorder, Player
from fastloop.bridge.apply.rehearse.remembered import Remembered
from fastloop.bridge.apply.rehearse.time_limit import TimeLimit, announced, limited
from fastloop.bridge.apply.site import LiveSite
from fastloop.errors import FastLoopError, NotApplicable, describe
from fastloop.evidence.model import dynamo_graphs
from fastloop.evidence.model.collectives import RefuseCollectives
from fastloop.judge import rehearsal as judge
from fastloop.judge.parity import RESOLUTION
from fastloop.judge.rehearsal import Deviation, Outcome
from fastloop.records.plan import Rehearsed, Step

UNCOUNTED_BATCHES = 8
OPTIMIZER_LIMIT = 1e-2
"""Deviation of an optimizer's step: rounding, where small differences of large weights are compared."""
MOST_PLAYS = 3
BASE_SHARE = 0.25
"""Of the time for a rehearsal that may go into a better reading of the unchanged modules."""
ENOUGH_MS = 300.0
"""Of playing, for one reading."""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Hands:
    """What a rehearsal may do to the run, given to it by the applier."""

    apply: Callable[[Step], None]
    unapply: Callable[[Step], None]
    settings: Callable[[str], Any]
    """Of a rung, by its name."""
    say: Callable[[str], None]


class Rehearsal:
    """The rehearsal of one fit on one rank. All ranks take part in it at the same moment, and come to one answer."""

    def __init__(self, site: LiveSite, steps: Sequence[Step], terms: Terms, hands: Hands) -> None:
        self.site, self.steps, self.terms, self.hands = site, list(steps), terms, hands
        self._recorder = CallRecorder(site.module, site.facts.compile_targets, site.groups)
        self._began_at = site.trainer.global_step
        self._base = Played()
        self._without_dropout: Played | None = None
        self._first_began_s, self._first_ms = 0.0, math.inf
        self._batches = 0

    def note_batch(self, args: tuple[Any, ...]) -> None:
        """The first batch is about to be trained on; the arguments of training_step, of which it is the first."""
        if self._recorder.is_recording:
            self._recorder.note_batch(args)
            self._first_began_s = time.perf_counter()

    def stop_recording(self) -> None:
        """The first batch is done, and with it all that is played later. Harmless when called twice."""
        if self._recorder.is_recording:
            self._first_ms = 1e3 * (time.perf_counter() - self._first_began_s)
        self._recorder.stop()

    def is_due(self) -> bool:
        """Whether the first optimizer step is done; asked once a batch. Steps that a module makes behind Lightning's
        back, with the bare optimizers, are not counted: there some batches have to do."""
        self._batches += 1
        uncounted = not self.site.module.automatic_optimization and self._batches > UNCOUNTED_BATCHES
        return bool(self.site.trainer.global_step > self._began_at) or uncounted

    # -- the rehearsal itself -------------------------------------------------------------------------------------

    def run(self) -> list[Outcome]:
        """Try all rungs; those that stay are applied when this returns."""
        outcomes: list[Outcome] = []
        self.stop_recording()
        if (made := self.site.trainer.global_step - self._began_at) > 1:  # Lightning counts each optimizer's steps
            self.terms = replace(self.terms, batches_per_step=1 / made)
        calls = self._recorder.calls
        names = dict.fromkeys(call.name for call in calls)
        self.site.recorded = {name: [(call.args, call.kwargs) for call in calls if call.name == name] for name in names}
        how: Any = {"context": self._surround, "convert": self._convert, "groups": self.site.groups}
        self._player = Player(self.site.module, calls, self.site.device, **how)
        modules = self._player.modules
        memory = Remembered(modules, self.site.device)
        self._budget = Budget(self.terms, self.site.module, modules, memory, self.hands.settings, self._first_ms)
        try:
            refused = self._budget.refuse_all(self.steps)
            if all(gather(self.site.trainer, bool(refused))):
                return refused
            problem = self._play_unchanged()
            self._heed_time_left()
            for step in self.steps:
                outcomes.append(self._try_step(step, problem, outcomes))
            return self._drop_slow(outcomes)
        finally:
            self.site.recorded, self._base, self._without_dropout = {}, Played(), None
            self._recorder.calls.clear()

    def _play_unchanged(self) -> str | None:
        """Read what the modules compute and take as the user wrote them; why they cannot be played again, if so."""
        problem = self._recorder.problem
        if not self.site.facts.plain_gradients:
            problem = f"under {self.site.facts.strategy} ranks exchange data inside a module's call"
        elif problem is None and not self._recorder.calls:
            problem = "no module with parameters was called in the first step"
        if problem is None:
            try:
                with limited(LIMIT_S, cause="the rehearsal of your own model", do="write rehearsal: off"):
                    if self.site.trainer.world_size > 1 and not self.site.facts.compiled_by_user:
                        with RefuseCollectives():  # type: ignore[no-untyped-call]
                            self._player.play()  # ranks do not play equally often
                    began = time.perf_counter()
                    self._base = self._player.play()
                    self._budget.play_s = time.perf_counter() - began
                    self._budget.base_ms = self._read_ms(self._base.ms, BASE_SHARE)
            except Exception as error:
                problem = f"its calls cannot be replayed: {_explain(error)}"
        problems, times_ms = zip(*gather(self.site.trainer, (problem, self._budget.base_ms)), strict=True)
        self._budget.base_ms = max(times_ms)
        return next((each for each in problems if each is not None), None)

    def _heed_time_left(self) -> None:
        """A Trainer with ``max_time`` may make fewer steps than it plans. All ranks take the same number."""
        timers = [each for each in self.site.trainer.callbacks if hasattr(each, "time_remaining")]
        left_s, step_ms = [each.time_remaining() for each in timers], self._budget.step_ms
        steps = [int(1e3 * each / step_ms) for each in left_s if each is not None and step_ms]
        fewest = min([*steps, *([] if self.terms.steps_left is None else [self.terms.steps_left])], default=None)
        every = [each for each in gather(self.site.trainer, fewest) if each is not None]
        self.terms = self._budget.terms = replace(self.terms, steps_left=min(every, default=None))

    def _try_step(self, step: Step, problem: str | None, before: list[Outcome]) -> Outcome:
        """One rung, with those that were kept before it. All ranks say the same in the end."""
        if problem is not None and step.change.rehearse == "modules":
            if step.rung in self.terms.by_ladder:
                return Outcome(rung=step.rung, fault=f"it could not be tried first: {problem}", is_lasting=False)
            return self._apply_untried(step)
        fault = self._refuse(step)
        if fault is not None and step.change.cheaper is not None:
            step = find_cheapest(step)
            fault = self._refuse(step)
        if fault is not None:
            return Outcome(rung=step.rung, fault=fault, is_lasting=False)
        outcome = self._agree(step, self._try_here(step, before))
        if outcome.fault is not None and outcome.is_lasting and step.change.rehearse == "modules":
            outcome = self._try_without_others(step, outcome, before)
        if outcome.fault is not None and outcome.is_lasting:
            self._budget.keep_failure(step, outcome.fault)
        return outcome

    def _refuse(self, step: Step) -> str | None:
        """Why a rung is not even tried, on any rank."""
        return next((each for each in gather(self.site.trainer, self._budget.refuse(step)) if each is not None), None)

    def _try_here(self, step: Step, before: Sequence[Outcome]) -> Outcome:
        """Apply a rung, and play what it changes; it is taken away again where that ends badly. No collectives."""
        limit_s, is_lasting = self._budget.limit_s(step), True
        do = f"write rungs.{step.rung}.enabled: false"
        try:
            with (
                announced(f"trying {step.rung} on the calls of the first step", self.hands.say),
                limited(limit_s, cause=f"the rehearsal of {step.rung}", do=do),
            ):
                try_it = self._try_optimizers if step.change.rehearse == "optimizers" else self._try_modules
                outcome = try_it(step, before)
        except torch.cuda.OutOfMemoryError:
            fault, is_lasting = "there was not enough memory to try it", False
        except NotApplicable as error:
            fault, is_lasting = describe(error), False
        except Exception as error:
            # A limit may be this run's own, memory another's, and an optimizer's twin fails for reasons of its own.
            fault = _explain(error)
            passing = _find_cause(error, (TimeLimit, torch.cuda.OutOfMemoryError)) is not None
            is_lasting = step.change.rehearse == "modules" and (limit_s == COSTLY_LIMIT_S or not passing)
        else:
            if outcome.fault is not None:
                self.hands.unapply(step)
            return outcome
        self.hands.unapply(step)
        self._check_device(step)
        return Outcome(rung=step.rung, fault=fault, is_lasting=is_lasting)

    def _try_modules(self, step: Step, before: Sequence[Outcome]) -> Outcome:
        # A compiled module draws other random numbers, and would be compiled anew without dropout.
        dropout = is_costly(step) or not self._player.has_dropout()
        if not dropout and self._without_dropout is None:  # nothing that changes modules is on yet
            self._without_dropout = self._player.play(dropout=False)
        self.hands.apply(step)
        first = self._player.play(dropout=dropout)
        deviation = measure_deviation(self._base if dropout else self._without_dropout or self._base, first)
        captured = dynamo_graphs.count_captured() if is_costly(step) else 0
        second = self._player.play()
        if is_costly(step) and dynamo_graphs.count_captured() > captured:
            return Outcome(rung=step.rung, fault="it compiled again for calls of the same shapes")
        first_s = self._note_first_call(step, first, second)
        precision = find_precision(self.site.trainer, self.site.module)
        fault: str | None = None
        told: float | None = deviation.largest
        if not judge.is_close(deviation, precision):
            fault, told = judge.find_fault(deviation, self._measure_rounding(first, precision, dropout), precision)
        changed_ms = self._read_ms(second.ms)
        saved_ms = (judge.find_last_ms(before, self._budget.base_ms) - changed_ms) * self.terms.batches_per_step
        return Outcome(
            rung=step.rung,
            fault=fault,
            on_modules=True,
            is_costly=is_costly(step),
            rehearsed=Rehearsed(
                deviation=told, eager_ms=self._budget.base_ms, changed_ms=changed_ms, of_batch=self._recorder.is_whole
            ),
            pays_back_after_steps=judge.count_pay_back_steps(first_s, saved_ms) if first_s is not None else None,
        )

    def _try_optimizers(self, step: Step, _before: Sequence[Outcome]) -> Outcome:
        self.hands.apply(step)  # which refuses what it does not know
        self.hands.unapply(step)
        usual = step_twins(self.site.optimizers, self.site.device)
        self.hands.apply(step)
        changed = step_twins(self.site.optimizers, self.site.device)
        deviation = measure_deviation(usual, changed)
        fault = None
        if not deviation.finite or deviation.largest > OPTIMIZER_LIMIT:
            fault = f"a step of the optimizer deviates by {deviation.largest:.2g}"
        rehearsed = Rehearsed(deviation=deviation.largest, eager_ms=usual.ms, changed_ms=changed.ms)
        return Outcome(rung=step.rung, fault=fault, rehearsed=rehearsed)

    def _try_without_others(self, step: Step, failed: Outcome, before: list[Outcome]) -> Outcome:
        """Two rungs may break together what either leaves whole: then the faster one of both stays."""
        others = {each.rung: each for each in self.steps if each.change.rehearse == "modules"}
        for place in reversed(range(len(before))):
            kept = before[place]
            if kept.fault is not None or kept.rung not in others or kept.rehearsed is None:
                continue
            self.hands.unapply(others[kept.rung])
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
                self.hands.unapply(step)
            self.hands.apply(others[kept.rung])
            if alone.fault is None:
                why = f"{failed.fault}; it works without {kept.rung}, which is faster alone"
                return replace(failed, fault=why, is_lasting=False)
        return failed

    def _drop_slow(self, outcomes: list[Outcome]) -> list[Outcome]:
        """What a shipped ladder switched on and makes the first step's calls slower is taken away again."""
        judged = judge.drop_slow(outcomes, self._budget.base_ms, self.terms.by_ladder)
        steps = {each.rung: each for each in self.steps}
        for before, after in zip(outcomes, judged, strict=True):
            if before.fault is None and after.fault is not None:
                self.hands.unapply(steps[after.rung])
        return judged

    # -- readings -------------------------------------------------------------------------------------------------

    def _read_ms(self, first_ms: float, share: float = 1.0) -> float:
        """The shortest of a few plays, as many as there is time for in this share of what all may take."""
        shortest, plays, spent_ms = first_ms, 1, first_ms
        while plays < MOST_PLAYS and spent_ms < ENOUGH_MS and self._budget.may_play(first_ms, share):
            played_ms = self._player.play().ms
            shortest, plays, spent_ms = min(shortest, played_ms), plays + 1, spent_ms + played_ms
        return shortest

    def _measure_rounding(self, usual: Played, precision: str, dropout: bool) -> Deviation:
        """What rounding, and other random draws, do to the modules as they are now."""
        with self._player.perturbed(RESOLUTION[precision]):
            rounded = measure_deviation(usual, self._player.play(dropout=dropout))
        drawn = measure_deviation(usual, self._player.play(seed=1, dropout=dropout))
        gradients = [each.gradients for each in (rounded, drawn) if each.gradients is not None]
        return Deviation(outputs=max(rounded.outputs, drawn.outputs), gradients=max(gradients, default=None))

    def _note_first_call(self, step: Step, first: Played, second: Played) -> float | None:
        """What the first call took longer than the second, where that is a cost to weigh."""
        if not is_costly(step):
            return None
        seconds = max(0.0, first.ms - second.ms) / 1e3
        self._budget.add_one_time(step, seconds)
        return seconds

    # -- the run around it ----------------------------------------------------------------------------------------

    def _apply_untried(self, step: Step) -> Outcome:
        try:
            self.hands.apply(step)
        except Exception as error:
            self.hands.unapply(step)
            return Outcome(rung=step.rung, fault=_explain(error), is_lasting=False)
        return Outcome(rung=step.rung)

    def _agree(self, step: Step, mine: Outcome) -> Outcome:
        """The answer of all ranks: what fails on one is taken away on all, and times are those of the slowest."""
        every = gather(self.site.trainer, mine)
        failed = next((rank for rank, each in enumerate(every) if each.fault is not None), None)
        if failed is None:
            times = [each.rehearsed.changed_ms for each in every if each.rehearsed and each.rehearsed.changed_ms]
            rehearsed = None if mine.rehearsed is None else replace(mine.rehearsed, changed_ms=max(times, default=None))
            return replace(mine, rehearsed=rehearsed)
        if mine.fault is None:
            self.hands.unapply(step)
        theirs = every[failed]
        where = f"on rank {failed}: " if len(every) > 1 else ""
        return replace(mine, fault=f"{where}{theirs.fault}", is_lasting=theirs.is_lasting)

    @contextlib.contextmanager
    def _surround(self) -> Iterator[None]:
        """What surrounds a training step: the precision, and DDP, which tells Dynamo where its buckets end."""
        inside = getattr(self.site.wrapped, "_inside_ddp_forward", contextlib.nullcontext)
        loop = self.site.trainer.fit_loop.epoch_loop
        logged = loop._results
        loop._results = type(logged)(training=True)  # what a module logs in a play is no value of a step
        try:
            with inside(), self.site.strategy.precision_plugin.train_step_context():
                yield
        finally:
            loop._results = logged

    def _convert(self, value: Any) -> Any:
        for convert in self.site.staging.conversions:
            value = convert(value)
        return value

    def _check_device(self, step: Step) -> None:
        """Go no further on a device that is lost: every later call would fail, and say nothing of the cause."""
        if self.site.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.site.device)
            torch.cuda.empty_cache()
        except Exception as error:
            raise FastLoopError(
                got=f"a GPU that does not answer after the rehearsal of {step.rung}",
                why=_explain(error),
                do=f"write rungs.{step.rung}.enabled: false",
            ) from error


def gather(trainer: Any, mine: Answer) -> list[Answer]:
    """What all ranks say, in their order: a collective, where there are several."""
    if trainer.world_size == 1:
        return [mine]
    every: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(every, mine)
    return every


def _explain(error: Exception) -> str:
    """What went wrong. A limit may have passed inside a compile, which makes an error of its own of it; what a signal's
    handler raised is none of ours."""
    limit = _find_cause(error, (TimeLimit,))
    return describe(error) if limit is None else str(limit)


def _find_cause(error: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException | None:
    """The error itself or one that it came of, if it is of these kinds."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kinds):
        cause = cause.__cause__ or cause.__context__
    return cause
