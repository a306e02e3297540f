"""A climb's knowledge of its training, and the trials that measure the start and the costs of the current stack."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb.attempt import APART, BaseFailed
from fastloop.experiments.climb.budget import PILOT, WINDOW_S, Length, choose_length
from fastloop.experiments.climb.candidates import (
    Position,
    Start,
    count_queued,
    estimate_first_start_s,
    list_ladders,
    read_stack,
)
from fastloop.experiments.climb.interface import Result, Runner
from fastloop.experiments.climb.prediction import Context
from fastloop.judge.prediction import ABOVE, WORTH_PCT
from fastloop.judge.statistics import Pool
from fastloop.ladder import collect_cards
from fastloop.numbers import format_short
from fastloop.records.card import Stack
from fastloop.records.climb import TOP, Attempt, ClimbFile, Costs
from fastloop.records.measurement import CEILINGS
from fastloop.records.trial import Variation

COPIES_SHOW = 0.01
"""Share of the step without loading: if copies take less, a trial without them is not worthwhile."""
PILOT_ENOUGH = 0.75
"""Share of a window's seconds: a pilot that lasted this long also serves as the measurement."""
PILOT_SHORTEST_S = 1.0
"""In a hurry a pilot serves if it lasted this long; a shorter one says too little about the rate."""
RUNS, COMPILES = 16, 2
"""About as many runs, and slow compiles, are between the start of a climb and the end of its first proof."""
MEASURES: Mapping[Variation, str] = {
    "replayed": "the step without loading",
    "resident": "the step without loading and copies",
    "no_exchange": "the step without loading and gradient exchange",
    "loader": "the loader alone",
}
"""What a trial with some costs removed measures, for progress lines."""
REPEATED = "00-naive/as_it_is-again"
"""Folder of the start's second measurement; noted, so that a later call finds it."""


class Measured:
    """The measured state of a climb.

    Args:
        start: the facts that the configuration shows; the first training shows the rest.
        before: the results of earlier calls; kept attempts have their ``costs``.
        save: called after each decision.
    """

    def __init__(
        self, runner: Runner, start: Start, *, warmup: int, before: ClimbFile, save: Callable[[], Any] = lambda: None
    ) -> None:
        self.runner, self.start, self.warmup, self.save = runner, start, warmup, save
        self.rows = list(before.rungs)
        self.naive: Result | None = None
        self.costs: Costs | None = None
        self.ceilings: dict[str, float | None] = {**dict.fromkeys(CEILINGS), **before.ceilings_samples_per_s}
        """Samples per second of the start with some costs removed."""
        self.notes: dict[str, str] = dict(before.ceilings_notes)
        """How a ceiling was obtained if no trial measured it, or why the start was measured again."""
        self.ladders: dict[str, float | None] = dict(before.ladders_samples_per_s)
        """Samples per second of the start with a shipped ladder; None if it failed."""
        self.start_s, self._known_start_s = 0.0, before.start_s or math.inf
        self.ends_at = before.ends_at
        """Optimizer steps after which a script ends by itself; None if it trained all requested steps."""
        self.hurries = False
        """Whether the budget is too short for a longer measurement, and for ceilings before the first ladder."""
        self.put_off: list[str] = []
        """Shipped ladders that the budget had no time to run and prove."""
        self.proofs_s: dict[str, float] = {}
        """Seconds that the screen and the proof of a shipped ladder take, known once it was faster in its first run."""
        self._without: set[str] = set()
        """Folders of trials that failed and are not repeated."""

    @property
    def stack(self) -> Stack:
        """All kept rungs."""
        return read_stack(self.rows)

    @property
    def known(self) -> Position:
        assert self.costs is not None
        least_gain = 1 + WORTH_PCT / 100 if self.hurries else 1 / APART  # below it no second look is worth its time
        least = least_gain * ((self.naive and self.naive.samples_per_s) or 0.0)
        if self.stack:  # one for whose proof there was no time may still be far ahead
            least = max(least, APART * (self.compute_top_rates().get("now") or math.inf))
        rates = {name: rate for name, rate in self.ladders.items() if rate is not None and rate >= least}
        return Position(start=self.start, costs=self.costs, stack=self.stack, rows=self.rows, ladder_rates=rates)

    @property
    def context(self) -> Context:
        return Context(
            runner=self.runner,
            known=self.known,
            warmup=self.warmup,
            start_s=self.start_s,
            pool=pool_spreads(self.rows),
            ends_at=self.ends_at,
        )

    def compute_top_rates(self) -> dict[str, float | None]:
        """Return the samples per second of the current stack, unchanged and with each of its costs removed."""
        costs, batch = self.costs, self.naive.global_batch if self.naive is not None else None
        if costs is None:
            return {}
        found = {
            "now": costs.core_ms,
            "replayed": costs.replayed_ms,
            "resident": costs.resident_ms,
            "no_exchange": costs.alone_ms,
        }
        return {name: 1e3 * batch / (ms + costs.outside_ms) if batch and ms else None for name, ms in found.items()}

    def begin(self) -> None:
        """Measure the unchanged training, and restore the costs of the stack that earlier calls have reached."""
        self.naive = naive = self._measure_naive()
        rank_batch = None if naive.global_batch is None else naive.global_batch // naive.world_size
        self.start = dataclasses.replace(
            self.start,
            on_cuda=naive.device == "cuda",
            refused=naive.refused,
            image_files=naive.image_files,
            may_keep_workers=naive.may_keep_workers,
            may_have_more_workers=naive.may_have_more_workers,
            micro_batch=naive.micro_batch,
            rank_batch=rank_batch,
            devices=max(self.start.devices, naive.world_size),  # a script shows it only by running
        )
        kept = [row.costs for row in self.rows if row.kept and row.costs is not None]
        self.costs = kept[-1] if kept else Costs(**self._read_costs(naive))
        if kept and REPEATED in self.notes:
            self.naive = self._run_naive(REPEATED, PILOT, "measuring the baseline, again", 0.0)
        self.save()

    def _read_costs(self, result: Result) -> dict[str, Any]:
        """Return the costs that a training without removed costs shows."""
        # If the training thread loads the data itself, its wait for the loader is the whole cost of loading.
        on: Stack = {rung: {} for rung in (*self.start.enabled, *self.stack)}
        alone = self.start.on_cuda and result.workers == 0 and not count_queued(on, 0)
        return {
            "now_ms": result.step_ms,
            "outside_ms": result.outside_ms,
            "gap_ms": result.gap_ms,
            "workers": result.workers,
            "copies_ms": result.copies_ms,
            **({"loader_ms": result.waits_ms} if alone else {}),
        }

    def _measure_naive(self) -> Result:
        """Measure the start for as long as needed, which a short pilot shows, and for which there is time."""
        pilot = self._run_naive("00-naive/pilot", PILOT, "measuring the baseline", 0.0)
        step_ms = pilot.step_ms or 0.0
        self.start_s = min(pilot.start_s, self._known_start_s)
        batches = (pilot.global_batch or 1) / pilot.world_size / (pilot.micro_batch or 1)
        choose = partial(
            choose_length, step_ms, step_ms, queued=pilot.queued, batches_per_step=max(1.0, batches), warmup=self.warmup
        )
        took = choose().up_to(self.ends_at)
        compile_s = max(map(estimate_first_start_s, list_ladders(self.start).values()), default=0.0)
        proof_s = RUNS * took.seconds(step_ms, self.start_s) + COMPILES * compile_s
        self.hurries = proof_s > self.runner.left_with_grace_s()
        if pilot.queued == 0 and PILOT.window * step_ms / 1e3 >= PILOT_ENOUGH * WINDOW_S:
            return pilot
        if self.hurries:
            is_long = PILOT.window * step_ms / 1e3 >= PILOT_SHORTEST_S
            if is_long and (pilot.steps or 0) > pilot.queued + PILOT.window:  # else most batches were ready beforehand
                return pilot
            took = choose(screen=True, fill_read=True).up_to(self.ends_at)
        naive = self._run_naive(
            "00-naive/as-it-is", took, "measuring the baseline", took.seconds(step_ms, self.start_s)
        )
        self.start_s = min(naive.start_s, self._known_start_s)
        return naive

    def _run_naive(self, at: str, took: Length, what: str, need_s: float) -> Result:
        """Run the training without any rung. If a script ends sooner by itself, all later runs are limited to that."""
        result = self.runner.run(at, {}, Ask(steps=took.steps, warmup=took.warmup), what=what, need_s=need_s)
        if result.ended_at and result.ended_at < took.steps:
            self.ends_at, shorter = result.ended_at, took.up_to(result.ended_at)
            if shorter.steps > result.ended_at:
                why = f"it ends after {result.ended_at} steps, but a climb needs {shorter.steps}"
                raise BaseFailed(dataclasses.replace(result, cause=why))
            if not result.step_ms and shorter != took:  # it ended in its warm-up
                return self._run_naive(f"{at}-shorter", shorter, what, need_s)
        elif result.ok and not result.step_ms and result.queued > took.warmup:
            # All its batches were ready before the first step. In steps of several batches this is more than enough.
            longer = dataclasses.replace(took, warmup=result.queued).up_to(self.ends_at)
            if longer != took:
                return self._run_naive(f"{at}-longer", longer, what, need_s)
        if result.ok and not result.step_ms and result.ended_at and result.queued >= result.ended_at:
            kept = f"{result.queued} batches ready, so no rate could be measured"
            why = f"it trained {result.ended_at} steps, but its loader already had {kept}"
            raise BaseFailed(dataclasses.replace(result, cause=why))
        if not result.ok or not result.step_ms:
            raise BaseFailed(result)
        return result

    def _add_rare_parts(self, result: Result) -> None:
        """Give the start, whose window is short in a hurry, the validation, checkpoints and gaps between epochs that a
        longer run with a ladder shows: without them every ladder would look slower than it is."""
        naive, outside_ms = self.naive, result.outside_ms
        if naive is None or not (naive.step_ms and naive.samples_per_s and self.costs and result.is_measured):
            return
        if (result.steps or 0) <= (naive.steps or 0) or outside_ms <= naive.outside_ms:
            return
        step_ms = naive.step_ms + outside_ms - naive.outside_ms
        rate, gap_ms = naive.samples_per_s * naive.step_ms / step_ms, max(naive.gap_ms, result.gap_ms)
        self.naive = dataclasses.replace(
            naive, step_ms=step_ms, samples_per_s=rate, outside_ms=outside_ms, gap_ms=gap_ms
        )
        self.costs = self.costs.but(now_ms=step_ms, outside_ms=outside_ms, gap_ms=gap_ms)

    def measure_missing(self) -> None:
        """Measure the costs of the current stack that no attempt has measured yet."""
        assert self.costs is not None
        if self.costs.replayed_ms is None and (result := self._measure_without("replayed")) is not None:
            own = self.naive.rest_ms if self.naive is not None and self.costs.beside and not self.stack else None
            self.costs = self.costs.but(
                replayed_ms=own or result.core_ms, mfu=result.mfu, launch_bound=result.launch_bound
            )
        # Without a device and without workers nothing overlaps: the step minus the rest is the loading.
        overlaps = self.start.times_loader and (self.start.on_cuda or self.costs.beside)
        if self.costs.loader_ms is None and overlaps and (result := self._measure_without("loader")) is not None:
            self.costs = self.costs.but(loader_ms=result.loader_ms, fill_read=result.fill_read)
        if self.costs.resident_ms is None and self._do_copies_matter():
            self._measure_without_copies()
        several = self.start.devices > 1
        if self.costs.alone_ms is None and several and (result := self._measure_without("no_exchange")) is not None:
            self.costs = self.costs.but(alone_ms=result.core_ms)

    def _measure_without_copies(self) -> None:
        """Measure the step without loading and copies; if copies are negligible, reuse the step without loading."""
        assert self.costs is not None
        copies_ms, rest_ms = self.costs.copies_ms, self.costs.replayed_ms
        key = f"resident{TOP}" if self.stack else "resident"
        self.notes.pop(key, None)
        if self.start.on_cuda and rest_ms and copies_ms is not None and copies_ms < COPIES_SHOW * rest_ms:
            self.costs = self.costs.but(resident_ms=rest_ms)
            copies, rest = format_short(copies_ms, "ms", digits=2), format_short(rest_ms, "ms")
            self.notes[key] = f"same as replayed: copies take {copies} of {rest}"
            if not self.stack:
                self.ceilings["resident"] = self.ceilings["replayed"]
        elif (result := self._measure_without("resident")) is not None:
            self.costs = self.costs.but(resident_ms=result.core_ms)

    def _do_copies_matter(self) -> bool:
        """Whether a rung may still hide copies; for the start, copies are always measured."""
        hiding = {rung for rung, card in collect_cards().items() if "h2d" in card.answers}
        return not self.stack or (self.start.on_cuda and not hiding <= {*self.stack, *self.start.enabled})

    def _measure_without(self, variation: Variation) -> Result | None:
        """Run a trial of the current stack with some costs removed; returns None if that fails."""
        result = self._run_trial(variation)
        if result is None or variation == "loader":
            return result
        if variation == "replayed" and not self.stack:
            self._doubt_start(result)
        result = self._remeasure(variation, result)
        if not self.stack:
            self.ceilings[variation] = result.samples_per_s
        return result

    def _doubt_start(self, replayed: Result) -> None:
        """Measure the start again if its steps, apart from their wait for data, took much longer than replayed ones:
        something else ran at that time, and the wrong step time would set the lengths of all later trainings."""
        assert self.naive is not None and self.costs is not None
        own_ms, least_ms = self.naive.rest_ms, replayed.core_ms
        if self.costs.beside or not own_ms or not least_ms or own_ms <= APART * least_ms:
            return
        self.costs = self.costs.but(now_ms=self.costs.now_ms - own_ms + least_ms)  # for the length
        if (again := self._run_trial("as_it_is", again=True)) is not None:
            self.costs = self.costs.but(**self._read_costs(again))
            self.naive, self.notes[REPEATED] = again, "measured again: its steps were slower than replayed ones"
        else:
            self.costs = self.costs.but(now_ms=self.naive.step_ms)

    def _remeasure(self, variation: Variation, result: Result) -> Result:
        """Repeat a trial that is slower than the whole step it is a part of: one of the two was disturbed. If the whole
        step is in doubt, measure that again first. If the trial stays slower, count it as equally fast and note
        that."""
        key = variation + (TOP if self.stack else "")
        self.notes.pop(key, None)
        if self._compare_with_whole(result, variation) > ABOVE:
            doubtful = self._compare_with_whole(result, "replayed") > ABOVE
            if doubtful and (again := self._run_trial("as_it_is", again=True)) is not None:
                self.costs = self.known.costs.but(**self._read_costs(again))
                if not self.stack:
                    self.naive, self.notes[REPEATED] = again, "measured again: a trial with a cost removed was slower"
            result = self._run_trial(variation, again=True) or result
        above, rate = self._compare_with_whole(result, variation), result.samples_per_s or 0.0
        if above > ABOVE:
            figure = f"{rate:,.{0 if rate >= 100 else 1}f}"
            self.notes[key] = (
                f"no ceiling: two trials without these costs were slower ({figure} samples/s), so something else"
                " disturbed this machine; they count as equally fast"
            )
        if above <= 1:
            return result
        least_ms = (result.core_ms or 0.0) / above + result.outside_ms
        return dataclasses.replace(result, step_ms=least_ms, samples_per_s=rate * (result.step_ms or 0.0) / least_ms)

    def _compare_with_whole(self, result: Result, variation: str) -> float:
        """Return the trial's time divided by that of the whole it is a part of."""
        costs = self.known.costs
        rest = None if variation == "replayed" else costs.replayed_ms
        return (result.core_ms or 0.0) / min(costs.core_ms or math.inf, rest or math.inf)

    def _run_trial(self, variation: Variation, *, again: bool = False) -> Result | None:
        """Run a training of the current stack; returns None if it fails."""
        costs = self.known.costs
        last = max((number for number, row in enumerate(self.rows, 1) if row.kept), default=0)
        whole, folder = variation == "as_it_is", f"{last:02d}-{self.rows[last - 1].name if last else 'naive'}"
        at = f"{folder}/{variation}{'-again' if again else ''}"
        if at in self._without:
            return None
        expected = costs.now_ms if whole else costs.replayed_ms or costs.now_ms
        queues: tuple[Stack, int] = (self.stack, costs.workers) if whole else ({}, 0)
        took = self.context.choose_length(expected, expected, *queues, screen=False)
        what = f"measuring {MEASURES.get(variation, 'the baseline')}{', again' if again else ''}"
        result = self.runner.run(
            at,
            self.stack,
            Ask(variation=variation, steps=took.steps, warmup=took.warmup),
            what=what,
            need_s=took.seconds(expected, self.context.top_start_s),
        )
        if result.ok and (result.loader_ms if variation == "loader" else result.core_ms):
            if result.step_ms:  # the first training of all has more to do at its start
                self.start_s = min(self.start_s, result.start_s)
            return result
        self._without.add(at)
        return None


def pool_spreads(rows: Sequence[Attempt]) -> Pool:
    """Pool the spread of all screens so far, without the disturbed ones, which would hide every later difference."""
    found = Pool()
    for row in rows:
        if row.ended != "odd":
            found = found.plus([pair for pair in zip(row.rates.base, row.rates.arm, strict=False) if all(pair)])
    return found
