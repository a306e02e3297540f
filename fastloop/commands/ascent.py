"""The climb: measure, take the family with the largest ceiling, try its next rung, keep it or not, and begin again.

Every decision follows from what was tried before (the rows of ``climb.json``) and from finished trainings, which are
found again by their folders. So a climb that was stopped goes on where it stood, and repeats nothing that finished.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastloop.commands.arms import Ask
from fastloop.commands.attempt import BaseFailed, attempt
from fastloop.commands.budget import Spent
from fastloop.commands.candidates import Candidate, Known, Start, choose, height
from fastloop.commands.lab import Lab, Needs, Seen
from fastloop.commands.lengths import PILOT, WINDOW_S, Length, gradient_s, length
from fastloop.commands.look import Scene, batches_per_step, queued
from fastloop.commands.stack import Stack, plus
from fastloop.measurement import CEILINGS
from fastloop.predict import ABOVE, Costs
from fastloop.report.climbed import ODD, TOP
from fastloop.stats import Pool

CONFIRM_RUNS = 3
"""Of each arm: the fewest that a verdict is given on."""
CONFIRM_STEPS = 30
"""In a window at least: the loss gate looks at the last fifth of them."""
COPIES_SHOW = 0.01
"""Of the step without loading: copies that take less are not worth a trial without them."""
PILOT_ENOUGH = 0.75
"""Of a window's seconds: a pilot that lasted so long need not be done again."""
BESIDE = "from its runs, less their wait for data: workers load beside"
"""How the top's ceiling without loading came about; noted."""
REPEATED = "00-naive/as_it_is-again"
"""Where the start was measured again; noted, so that a later call finds it."""

Row = dict[str, Any]


class Ascent:
    """One climb.

    Args:
        start: what of it the configuration says; the rest is seen in the first training.
        rows: what was tried in earlier calls, each with its ``costs`` where it was kept.
        ceilings: of the start, as an earlier call has measured them; ``notes`` what was to be said of them.
        save: called after each decision.
    """

    def __init__(self, lab: Lab, start: Start, *, warmup: int, rows: Sequence[Mapping[str, Any]] = (),
                 ceilings: Mapping[str, float | None] | None = None, notes: Mapping[str, str] | None = None,
                 save: Callable[[], None] = lambda: None) -> None:  # fmt: skip
        self.lab, self.start, self.warmup, self._save = lab, start, warmup, save
        self.rows: list[Row] = [dict(row) for row in rows]
        self.naive: Seen | None = None
        self.costs: Costs | None = None
        self.ceilings: dict[str, float | None] = {**dict.fromkeys(CEILINGS), **(ceilings or {})}
        """Samples per second of the start with costs taken away."""
        self.notes: dict[str, str] = dict(notes or {})
        """How a ceiling came about that no trial has measured, or why the start was measured again."""
        self._start_s = 0.0
        self._without: set[str] = set()
        """Folders of trials that failed, and so are not asked for again."""

    @property
    def stack(self) -> Stack:
        """What was kept."""
        stack: Stack = {}
        for row in self.rows:
            stack = plus(stack, row["patch"]) if row["kept"] else stack
        return stack

    @property
    def known(self) -> Known:
        assert self.costs is not None
        return Known(start=self.start, costs=self.costs, stack=self.stack, rows=self.rows)

    def top(self) -> dict[str, float | None]:
        """Samples per second of the stack there is, and with each of its costs taken away."""
        costs, batch = self.costs, self.naive.global_batch if self.naive is not None else None
        if costs is None:
            return {}
        found = {"now": costs.core_ms, "replayed": costs.replayed_ms, "resident": costs.resident_ms,
                 "no_exchange": costs.alone_ms}  # fmt: skip
        return {name: 1e3 * batch / (ms + costs.outside_ms) if batch and ms else None for name, ms in found.items()}

    def climb(self) -> str:
        """Go on until there is nothing left to try; why there is not.

        Raises:
            Spent: the budget is gone before that.
            BaseFailed: the training as it is fails.
        """
        self._begin()
        while True:
            self._fill_in()
            self.lab.reserve(self._to_confirm_s() if self.stack else 0.0)
            chosen = choose(self.known)
            if isinstance(chosen, str):
                return chosen
            self._try(chosen)

    def _try(self, candidate: Candidate) -> None:
        scene = Scene(lab=self.lab, known=self.known, warmup=self.warmup, start_s=self._start_s, pool=pool(self.rows))
        result = attempt(scene, candidate, f"{len(self.rows) + 1:02d}-{candidate.key}")
        costs = None if result.costs is None else dataclasses.asdict(result.costs)
        self.rows.append({**result.row, "costs": costs})
        self.costs = result.costs or self.costs
        if result.costs is not None and result.costs.beside:
            self.notes[f"replayed{TOP}"] = BESIDE
        self._save()

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The training as it is, and what earlier calls know of the stack they have reached."""
        self.naive = naive = self._naive()
        rank_batch = None if naive.global_batch is None else naive.global_batch // naive.world_size
        self.start = dataclasses.replace(
            self.start, on_cuda=naive.device == "cuda", refused=naive.refused, micro_batch=naive.micro_batch,
            rank_batch=rank_batch)  # fmt: skip
        kept = [row["costs"] for row in self.rows if row["kept"]]
        self.costs = Costs(**kept[-1]) if kept else Costs(**self._whole(naive))
        if kept and REPEATED in self.notes:
            self.naive = self._run_naive(REPEATED, PILOT, "measuring as it is, again", 0.0)
        self._save()

    def _whole(self, seen: Seen) -> dict[str, Any]:
        """The costs that a training as it is shows."""
        # Where the training thread loads, what it waits for its loader is all that loading takes.
        alone = self.start.on_cuda and seen.workers == 0 and "prefetch" not in {*self.start.enabled, *self.stack}
        return {"now_ms": seen.step_ms, "outside_ms": seen.outside_ms, "gap_ms": seen.gap_ms, "workers": seen.workers,
                "copies_ms": seen.copies_ms, **({"loader_ms": seen.waits_ms} if alone else {})}  # fmt: skip

    def _naive(self) -> Seen:
        """As long as it has to be; how long that is, a short one says."""
        pilot = self._run_naive("00-naive/pilot", PILOT, "measuring as it is", 0.0)
        step_ms = pilot.step_ms or 0.0
        self._start_s = max(1.0, pilot.seconds - PILOT.steps * step_ms / 1e3)
        if pilot.queued == 0 and PILOT.window * step_ms / 1e3 >= PILOT_ENOUGH * WINDOW_S:
            return pilot
        batches = (pilot.global_batch or 1) / pilot.world_size / (pilot.micro_batch or 1)
        took = length(step_ms, step_ms, queued=pilot.queued, batches_per_step=max(1.0, batches), warmup=self.warmup)
        naive = self._run_naive("00-naive/as-it-is", took, "measuring as it is", took.seconds(step_ms, self._start_s))
        self._start_s = max(1.0, naive.seconds - took.steps * (naive.step_ms or 0.0) / 1e3)
        return naive

    def _run_naive(self, at: str, took: Length, what: str, need_s: float) -> Seen:
        seen = self.lab.run(at, {}, Ask(steps=took.steps, warmup=took.warmup), what=what, need_s=need_s)
        if not seen.ok or not seen.step_ms:
            raise BaseFailed(seen)
        return seen

    def _fill_in(self) -> None:
        """The costs of the present stack that no attempt has measured on its way."""
        assert self.costs is not None
        if self.costs.replayed_ms is None and (seen := self._component("replayed")) is not None:
            own = self.naive.rest_ms if self.naive is not None and self.costs.beside and not self.stack else None
            self.costs = self.costs.but(replayed_ms=own or seen.core_ms, mfu=seen.mfu, launch_bound=seen.launch_bound)
        # Without a device and without workers nothing overlaps: loading is what the step has beyond the rest.
        overlaps = self.start.on_cuda or self.costs.beside
        if self.costs.loader_ms is None and overlaps and (seen := self._component("loader")) is not None:
            self.costs = self.costs.but(loader_ms=seen.loader_ms, fill_read=seen.fill_read)
        if self.costs.resident_ms is None and self._copies_count():
            self._without_copies()
        if self.costs.alone_ms is None and self.start.devices > 1 \
                and (seen := self._component("no_exchange")) is not None:  # fmt: skip
            self.costs = self.costs.but(alone_ms=seen.core_ms)

    def _without_copies(self) -> None:
        """The step without loading and copies; where those hardly take time, it is the one without loading."""
        assert self.costs is not None
        copies_ms, rest_ms = self.costs.copies_ms, self.costs.replayed_ms
        key = f"resident{TOP}" if self.stack else "resident"
        self.notes.pop(key, None)
        if self.start.on_cuda and rest_ms and copies_ms is not None and copies_ms < COPIES_SHOW * rest_ms:
            self.costs = self.costs.but(resident_ms=rest_ms)
            self.notes[key] = f"as replayed: copies take {copies_ms:.2g} ms of {rest_ms:.3g} ms"
            if not self.stack:
                self.ceilings["resident"] = self.ceilings["replayed"]
        elif (seen := self._component("resident")) is not None:
            self.costs = self.costs.but(resident_ms=seen.core_ms)

    def _copies_count(self) -> bool:
        """Whether a rung may still hide them; of the start it is always told."""
        on = {*self.stack, *self.start.enabled}
        return not self.stack or (self.start.on_cuda and not {"pin", "prefetch"} <= on)

    def _component(self, variation: Any) -> Seen | None:
        """A trial of the present stack with costs taken away; None where it cannot be had."""
        seen = self._trial(variation)
        if seen is None or variation == "loader":
            return seen
        seen = self._settled(variation, seen)
        if not self.stack:
            self.ceilings[variation] = seen.samples_per_s
        return seen

    def _settled(self, variation: Any, seen: Seen) -> Seen:
        """A trial that is slower than what it is a part of was disturbed, or that was not: it is made again, after the
        training as it is. If it stays slower it is taken for as fast, and that is noted."""
        assert self.costs is not None
        key = variation + (TOP if self.stack else "")
        self.notes.pop(key, None)
        if self._above(seen, variation) > ABOVE:
            if self._above(seen, "replayed") > ABOVE and (again := self._trial("as_it_is", again=True)) is not None:
                self.costs = self.costs.but(**self._whole(again))
                if not self.stack:
                    self.naive, self.notes[REPEATED] = again, "measured again: a trial with costs taken away was slower"
            seen = self._trial(variation, again=True) or seen
        above, rate = self._above(seen, variation), seen.samples_per_s or 0.0
        if above > ABOVE:
            self.notes[key] = f"no ceiling: the trial without these costs was slower twice, {rate:.3g} samples/s, and" \
                              " is taken for as fast as what it is a part of"  # fmt: skip
        if above <= 1:
            return seen
        least_ms = (seen.core_ms or 0.0) / above + seen.outside_ms
        return dataclasses.replace(seen, step_ms=least_ms, samples_per_s=rate * (seen.step_ms or 0.0) / least_ms)

    def _above(self, seen: Seen, variation: str) -> float:
        """How many times as long as what it is a part of it takes."""
        assert self.costs is not None
        rest = None if variation == "replayed" else self.costs.replayed_ms
        return (seen.core_ms or 0.0) / min(self.costs.core_ms or math.inf, rest or math.inf)

    def _trial(self, variation: Any, *, again: bool = False) -> Seen | None:
        """A training of the present stack; None where it cannot be had."""
        assert self.costs is not None
        last = max((number for number, row in enumerate(self.rows, 1) if row["kept"]), default=0)
        whole, folder = variation == "as_it_is", f"{last:02d}-{self.rows[last - 1]['try'] if last else 'naive'}"
        at = f"{folder}/{variation}{'-again' if again else ''}"
        if at in self._without:
            return None
        expected = self.costs.now_ms if whole else self.costs.replayed_ms or self.costs.now_ms
        took = length(expected, expected, queued=queued(self.stack, self.costs.workers) if whole else 0,
                      batches_per_step=batches_per_step(self.known, self.stack), warmup=self.warmup)  # fmt: skip
        what = f"{'measuring as it is' if whole else f'ceiling {variation}'}{', again' if again else ''}"
        seen = self.lab.run(at, self.stack, Ask(variation=variation, steps=took.steps, warmup=took.warmup), what=what,
                            need_s=took.seconds(expected, self._start_s))  # fmt: skip
        if seen.ok and (seen.loader_ms if variation == "loader" else seen.core_ms):
            if seen.step_ms:  # the first training of all has more to do at its start
                self._start_s = max(1.0, min(self._start_s, seen.seconds - took.steps * seen.step_ms / 1e3))
            return seen
        self._without.add(at)
        return None

    # -- confirming ---------------------------------------------------------------------------------------------------

    def confirm(self) -> Mapping[str, Any] | None:
        """The top against the start by a fresh A/B; None where nothing was kept.

        Raises:
            Spent: it would not end in the budget, and so has not begun, or it did not; says how long it takes yet.
        """
        if not self.stack:
            return None
        try:
            return self.lab.confirm(self._confirm_at, self.stack, self._confirm_length(), need_s=self._to_confirm_s())
        except Spent:
            left_s = self._to_confirm_s()
            took = f"{math.ceil(left_s / 60)} min" if left_s > 90 else f"{left_s:.0f} s"
            raise Spent(f"the confirmation, about {took}") from None

    @property
    def _confirm_at(self) -> str:
        return f"confirm-{height(self.rows)}"

    def _confirm_length(self) -> Length:
        assert self.naive is not None and self.naive.step_ms is not None and self.costs is not None
        slow = max(self.naive.step_ms, self.costs.now_ms)
        took = length(self.costs.now_ms, slow, queued=queued(self.stack, self.costs.workers), warmup=self.warmup,
                      batches_per_step=batches_per_step(self.known, self.stack),
                      fill_read=self.costs.fill_read)  # fmt: skip
        return Length(warmup=took.warmup, window=max(took.window, CONFIRM_STEPS))

    def _to_confirm_s(self) -> float:
        """What is left of the confirmation takes."""
        assert self.naive is not None and self.naive.step_ms is not None and self.costs is not None
        took, both = self._confirm_length(), (self.naive.step_ms, self.costs.now_ms)
        base_s, arm_s = (took.seconds(ms, self._start_s) for ms in both)
        gradients_s = sum(gradient_s(ms, self._start_s) for ms in both) / 2
        return self.lab.left_to_confirm(self._confirm_at, Needs(start_s=self._start_s, base_s=base_s, arm_s=arm_s,
                                                                gradients_s=gradients_s))  # fmt: skip


def pool(rows: Sequence[Mapping[str, Any]]) -> Pool:
    """The spread that all screens so far have shown, but for those that something else has disturbed: with them no
    later one would see anything."""
    found = Pool()
    for row in rows:
        if row.get("ended") == ODD:
            continue
        pairs = [pair for pair in zip(row["rates"]["base"], row["rates"]["arm"], strict=False) if all(pair)]
        found = found.plus(pairs)
    return found
