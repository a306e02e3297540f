"""The climb: measure, take the family with the largest ceiling, try its next rung, keep it or not, and repeat.

Every decision follows from earlier attempts (the rows of ``climb.json``) and from finished trainings, which are found
again by their folders. So a climb that was stopped continues where it was and repeats no finished training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import cast

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb.attempt import APART, CLEAR, TURNS, BaseFailed, make_attempt
from fastloop.experiments.climb.budget import Length, Spent, describe_time, estimate_gradient_s
from fastloop.experiments.climb.candidates import (
    WITHOUT,
    Candidate,
    choose,
    estimate_first_start_s,
    list_bundles,
    list_ladders,
    list_removable,
    make_ladder,
    read_stack,
)
from fastloop.experiments.climb.early_end import EndsSooner, HeedingRunner, find_early_end
from fastloop.experiments.climb.interface import HOPELESS, Needs, Result, Runner
from fastloop.experiments.climb.measuring import Measured
from fastloop.experiments.climb.prediction import Context, Top
from fastloop.experiments.climb.removal import try_without
from fastloop.records.card import Stack
from fastloop.records.climb import TOP, Attempt, Confirmation, Costs, count_kept

CONFIRM_RUNS = 3
"""Runs of each arm: the fewest that allow a verdict."""
SURE = 1.2
"""This many times its estimated seconds are kept for a confirmation: validation and other jobs may slow it."""
COLD_S = 10.0
"""A first run that compiled for this long had no compiled code from earlier ones."""
CONFIRM_STEPS, SHORT_STEPS = 30, 20
"""Fewest steps in a window, and in a short one: the loss gate looks at the last fifth of them."""
BESIDE = "from its runs, minus their wait for data, with the workers running"
"""The note that says how the top's ceiling without loading was computed."""


class Climb(Measured):
    """One climb: chooses what to try next, decides whether it stays, and proves the result at the end."""

    def climb(self) -> str:
        """Climb until nothing is left to try, and return why nothing is left.

        Raises:
            Spent: the budget ran out first.
            BaseFailed: the unchanged training fails.
        """
        self.begin()
        self.runner = cast("Runner", HeedingRunner(self.runner, self._is_news))
        while True:
            try:
                if (reason := self._step()) is not None:
                    return reason
            except EndsSooner as end:  # what has finished is found again, the rest is made shorter
                self.ends_at = end.steps
                self.save()

    def _is_news(self, end: int) -> bool:
        """Whether the script itself may end after `end` steps: not if its end is already known, or if the start ran
        longer."""
        return self.ends_at is None and end >= ((self.naive and self.naive.ended_at) or 0)

    def _step(self) -> str | None:
        """Try what is most promising now; returns why nothing is left, or None."""
        self.runner.reserve(*(self._list_proofs_s() if self.stack else ()))
        ladders_first = self.hurries and not self.rows  # a ladder that is faster needs no ceiling to be chosen
        if not ladders_first:
            self.measure_missing()
        self._measure_ladders()
        chosen = self._choose()
        if ladders_first and not (isinstance(chosen, Candidate) and chosen.whole):
            self.measure_missing()
            chosen = self._choose()
        if isinstance(chosen, str):
            self._try_removals()
            return chosen
        self._attempt(chosen)
        return None

    def _choose(self) -> Candidate | str:
        added = [row for row in self.rows if not row.is_removal]  # rungs removed at the end are not tried again
        known = dataclasses.replace(self.known, rows=added, stack=read_stack(added))
        return choose(dataclasses.replace(known, ladder_rates=self._leave_out_unprovable(known.ladder_rates)))

    def _leave_out_unprovable(self, rates: Mapping[str, float]) -> Mapping[str, float]:
        """Leave out ladders that the budget has no time to prove, if it has time to prove another fast one."""
        fits = {
            name: rate
            for name, rate in rates.items()
            if self.proofs_s.get(name, 0.0) <= self.runner.left_with_grace_s()
        }
        least = APART * ((self.naive and self.naive.samples_per_s) or math.inf)
        return fits if max(fits.values(), default=0.0) >= least else rates

    @property
    def context(self) -> Context:
        return dataclasses.replace(
            super().context,
            estimate_proof_s=partial(self._estimate_confirmation_s, short=True),
            hurried_start=self.naive if self.hurries and not self.stack else None,
        )

    def _attempt(self, candidate: Candidate) -> None:
        first = not self.stack and not any(row.name == candidate.key for row in self.rows)
        number = 0 if candidate.whole and first else len(self.rows) + 1  # it ran once before it was chosen
        self._note(make_attempt(self.context, candidate, f"{number:02d}-{candidate.key}"))

    def _try_removals(self) -> None:
        """Remove the rungs without which the top is not slower."""
        top, place = read_stack([row for row in self.rows if not row.is_removal]), f"top-{count_kept(self.rows)}"
        for rung in list_removable(self.rows):
            self.runner.reserve(*self._list_proofs_s(cold=True), self._estimate_confirmation_s(short=True))
            at = f"{len(self.rows) + 1:02d}-{WITHOUT}{rung}"
            self._note(try_without(self.context, rung, at, lambda number: self._run_top(place, top, number)))

    def _run_top(self, place: str, top: Stack, number: int) -> Result:
        costs = self.known.costs
        took = self.context.choose_length(costs.now_ms, costs.now_ms, top, costs.workers, fill_read=costs.fill_read)
        result = self.runner.run(
            f"{place}/run-{number}",
            top,
            Ask(seed=number, steps=took.steps, warmup=took.warmup),
            what=f"the best stack, run {number + 1}",
            need_s=took.seconds(costs.now_ms, self.context.top_start_s),
        )
        if not result.ok or not result.step_ms:
            raise BaseFailed(result)
        return result

    def _note(self, made: Attempt) -> None:
        self.rows.append(made)
        self.costs = made.costs or self.costs
        if made.costs is not None and made.costs.beside:
            self.notes[f"replayed{TOP}"] = BESIDE
        self.save()

    def _measure_ladders(self) -> None:
        """Run the start once with each shipped ladder, to try the fastest first; this run is part of its screen.

        A ladder that does not fit into the budget is left out, and the climb goes on with a faster one whose proof
        fits. Once one was clearly faster, time is kept for its screen and proof if there is enough, and the others are
        expected to be as fast. In a hurry, ladders whose rungs it contains come last: they are rarely faster.
        """
        spent, keeps, fastest, expected_ms = None, False, 0.0, self.known.costs.now_ms
        ladders = {} if self.stack else list_bundles(self.known) | list_ladders(self.start)
        waiting, parts = [*self._defer_slow_compiles(ladders).items()], set[str]()
        while waiting:
            name, stack = waiting.pop(0)
            candidate, (seed, side) = make_ladder(name, stack), TURNS[1]
            if self.ladders.get(name, 0.0) is None or any(row.name == candidate.key for row in self.rows):
                continue
            took, costs = self.context.choose_ladder_length(stack), self.known.costs
            first_start_s = estimate_first_start_s(stack)
            try:
                result = self.runner.run(
                    f"00-{candidate.key}/screen-2-{side}",
                    stack,
                    Ask(seed=seed, steps=took.steps, warmup=took.warmup, ledger=True),
                    what=f"{candidate.key}: first run",
                    need_s=took.seconds(costs.now_ms if name in parts else expected_ms, self.start_s) + first_start_s,
                    slowest_ms=HOPELESS * costs.now_ms,
                    ladder=candidate.ladder,
                )
            except Spent as error:
                spent = spent if keeps else spent or error
                if keeps and name not in (*self.put_off, *parts):
                    self.put_off.append(name)
                continue
            if self.hurries:
                self._add_rare_parts(result)
            self.ladders[name] = result.samples_per_s if result.ok else None
            if (rate := self.ladders[name] or 0.0) > fastest and self._reserve_proof_time(name, stack, result):
                fastest, keeps, expected_ms = rate, True, min(expected_ms, result.step_ms or expected_ms)
                if self.hurries:
                    parts |= {other for other, theirs in waiting if theirs.keys() <= stack.keys()}
                    waiting.sort(key=lambda each: each[0] in parts)
            self.save()
        if keeps:
            self.runner.reserve()
        if spent is not None and not self._has_time_to_prove(self._choose()):
            raise spent

    def _has_time_to_prove(self, chosen: Candidate | str) -> bool:
        """Whether this is a ladder, and there is time for its screen and proof."""
        if not isinstance(chosen, Candidate) or not chosen.whole:
            return False
        return self._estimate_to_proof_s(chosen.patches[0]["rungs"]) <= self.runner.left_with_grace_s()

    def _defer_slow_compiles(self, ladders: Mapping[str, Stack]) -> Mapping[str, Stack]:
        """Put ladders last if they compile for so long that the budget has no time left to prove them, unless that is
        true of all. In a hurry, slow compiles come last in any case: the others may be faster than estimated."""
        now_ms, left_s = self.known.costs.now_ms, self.runner.left_with_grace_s()
        runs_s = {
            name: self.context.choose_ladder_length(ladders[name]).seconds(now_ms, self.start_s) for name in ladders
        }
        compiles_s = {name: estimate_first_start_s(stack) for name, stack in ladders.items()}
        too_long = [
            name
            for name, stack in ladders.items()
            if self._estimate_to_proof_s(stack)
            + sum(runs_s[other] for other in ladders if compiles_s[other] < compiles_s[name])
            > left_s
        ]
        if len(too_long) == len(ladders):
            return dict(sorted(ladders.items(), key=lambda each: compiles_s[each[0]] if self.hurries else 0.0))
        self.put_off = too_long
        return dict(sorted(ladders.items(), key=lambda each: each[0] in too_long))

    def _estimate_to_proof_s(self, stack: Stack) -> float:
        """Return the seconds of a ladder's first run, screen and proof, if its steps took as long as they do now. In a
        hurry it gets no screen."""
        now, first_start_s = self.known.costs, estimate_first_start_s(stack)
        costs = Costs(now_ms=now.now_ms, workers=now.workers, start_s=self.start_s, compile_s=first_start_s)
        run_s = self.context.choose_ladder_length(stack).seconds(now.now_ms, self.start_s)
        runs_s = run_s if self.hurries else 2 * run_s
        return runs_s + first_start_s + self._estimate_confirmation_s((stack, costs), short=True)

    def _reserve_proof_time(self, name: str, stack: Stack, result: Result) -> bool:
        """Keep time for the screen and the proof of a ladder that was faster in its first run, if that much is left.
        Returns whether it is."""
        now_ms = self.known.costs.now_ms
        if not result.ok or not result.step_ms or result.step_ms * APART > now_ms:
            return False
        start_s, compile_s = result.next_start_s, result.compile_s
        costs = Costs(now_ms=result.step_ms, workers=result.workers, start_s=start_s, compile_s=compile_s)
        took = self.context.choose_ladder_length(stack)
        screen_s = 0.0 if self.hurries else took.seconds(now_ms, self.start_s)
        if result.step_ms * CLEAR > now_ms and not self.hurries:  # it will be screened by a second pair
            screen_s += took.seconds(now_ms, self.start_s) + took.seconds(result.step_ms, start_s)
        self.proofs_s[name] = need_s = screen_s + self._estimate_confirmation_s((stack, costs), short=True)
        if need_s > self.runner.left_with_grace_s():
            return False
        self.runner.reserve(SURE * need_s, need_s)
        return True

    def confirm(self) -> Confirmation | None:
        """Compare the top with the start in a fresh A/B; returns None if nothing was kept.

        Raises:
            Spent: it does not fit into the budget or did not finish in time; the message says how long it still needs.
        """
        if not self.stack:
            return None
        short = self._list_proofs_s()[0] > self.runner.left_with_grace_s()
        took, need_s = self._choose_confirm_length(short=short), self._estimate_confirmation_s(short=short)
        try:
            return self.runner.confirm(self._name_confirmation(short), self.stack, took, need_s=need_s)
        except BaseFailed as error:
            end = find_early_end(error.result, took.steps)
            if end is None or not self._is_news(end):
                raise
            self.ends_at = end
            self.save()
            return self.confirm()
        except Spent:
            raise Spent(f"the confirmation, {describe_time(self._estimate_confirmation_s(short=short))}") from None

    def _is_checked(self) -> bool:
        """Whether the top's own gradients have been compared."""
        kept = [row for row in self.rows if row.kept]
        return not kept or (not kept[-1].is_removal and any(gate.name == "gradient" for gate in kept[-1].parity.gates))

    def _list_proofs_s(self, *, cold: bool = False) -> list[float]:
        """Return the seconds to keep for the confirmation: enough for a long one, for a short one, barely for that."""
        long_s, short_s = (self._estimate_confirmation_s(short=short, cold=cold) for short in (False, True))
        return [SURE * long_s, SURE * short_s, short_s]

    def _name_confirmation(self, short: bool, top: Top | None = None) -> str:
        of_steps = "" if self.ends_at is None else f"-{self.ends_at}-steps"  # it may become known in a confirmation
        return f"confirm-{count_kept(self.rows) + (top is not None)}{'-short' if short else ''}{of_steps}"

    def _choose_confirm_length(self, top: Top | None = None, *, short: bool = False) -> Length:
        """Choose the length of the confirmation's runs; `short` windows show only large differences."""
        assert self.naive is not None and self.naive.step_ms is not None and self.costs is not None
        stack, costs = top or (self.stack, self.costs)
        took = self.context.choose_length(
            costs.now_ms,
            max(self.naive.step_ms, costs.now_ms),
            stack,
            costs.workers,
            screen=short,
            fill_read=short or costs.fill_read,
        )
        fewest = SHORT_STEPS if short else CONFIRM_STEPS
        return Length(warmup=took.warmup, window=max(took.window, fewest)).up_to(self.ends_at)

    def _estimate_confirmation_s(self, top: Top | None = None, *, short: bool = False, cold: bool = False) -> float:
        """Return the seconds that the rest of the confirmation takes, for the current top or another one. The gradient
        check of a stack that was not checked before starts `cold`: with deterministic kernels it compiles anew."""
        assert self.naive is not None and self.naive.step_ms is not None and self.costs is not None
        took, costs = self._choose_confirm_length(top, short=short), self.costs if top is None else top[1]
        both = ((self.naive.step_ms, self.start_s), (costs.now_ms, costs.start_s or self.start_s))
        base_s, arm_s = (took.seconds(*each) for each in both)
        first_s = self.start_s + took.first_steps * self.naive.step_ms / 1e3
        gradients_s = sum(estimate_gradient_s(*each) for each in both) / 2
        if cold or top is not None or not self._is_checked():
            stack = self.stack if top is None else top[0]
            known_s = costs.compile_s or 0.0
            gradients_s += (known_s if known_s >= COLD_S else estimate_first_start_s(stack)) / 2
        return self.runner.estimate_confirmation_s(
            self._name_confirmation(short, top),
            Needs(start_s=self.start_s, first_s=first_s, base_s=base_s, arm_s=arm_s, gradients_s=gradients_s),
        )
