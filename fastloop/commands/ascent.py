"""The climb: measure, take the family with the largest ceiling, try its next rung, keep it or not, and begin again.

Every decision follows from what was tried before (the rows of ``climb.json``) and from finished trainings, which are
found again by their folders. So a climb that was stopped goes on where it stood, and repeats nothing that finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastloop.commands.arms import Ask
from fastloop.commands.attempt import BaseFailed, attempt
from fastloop.commands.candidates import Candidate, Known, Start, choose, height
from fastloop.commands.lab import Lab, Seen
from fastloop.commands.lengths import PILOT, WINDOW_S, Length, length
from fastloop.commands.look import Scene, batches_per_step, queued
from fastloop.commands.stack import Stack, plus
from fastloop.measurement import CEILINGS
from fastloop.predict import Costs
from fastloop.stats import Pool

CONFIRM_RUNS = 3
"""Of each arm: the fewest that a verdict is given on."""
CONFIRM_STEPS = 30
"""In a window at least: the loss gate looks at the last fifth of them."""
PILOT_ENOUGH = 0.75
"""Of a window's seconds: a pilot that lasted so long need not be done again."""

Row = dict[str, Any]


class Ascent:
    """One climb.

    Args:
        start: what of it the configuration says; the rest is seen in the first training.
        rows: what was tried in earlier calls, each with its ``costs`` where it was kept.
        ceilings: of the start, as an earlier call has measured them.
        save: called after each decision.
    """

    def __init__(self, lab: Lab, start: Start, *, warmup: int, rows: Sequence[Mapping[str, Any]] = (),
                 ceilings: Mapping[str, float | None] | None = None,
                 save: Callable[[], None] = lambda: None) -> None:  # fmt: skip
        self.lab, self.start, self.warmup, self._save = lab, start, warmup, save
        self.rows: list[Row] = [dict(row) for row in rows]
        self.naive: Seen | None = None
        self.costs: Costs | None = None
        self.ceilings: dict[str, float | None] = {**dict.fromkeys(CEILINGS), **(ceilings or {})}
        """Samples per second of the start with costs taken away."""
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
        costs = None if result.costs is None else asdict(result.costs)
        self.rows.append({**result.row, "costs": costs})
        self.costs = result.costs or self.costs
        self._save()

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The training as it is, and what earlier calls know of the stack they have reached."""
        self.naive = naive = self._naive()
        rank_batch = None if naive.global_batch is None else naive.global_batch // naive.world_size
        self.start = Start(enabled=self.start.enabled, devices=self.start.devices, allow=self.start.allow,
                           on_cuda=naive.device == "cuda", loader_workers=naive.workers, micro_batch=naive.micro_batch,
                           rank_batch=rank_batch)  # fmt: skip
        assert naive.step_ms is not None
        kept = [row["costs"] for row in self.rows if row["kept"]]
        self.costs = Costs(**kept[-1]) if kept else Costs(
            now_ms=naive.step_ms, outside_ms=naive.outside_ms, gap_ms=naive.gap_ms, workers=naive.workers)  # fmt: skip
        self._save()

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
            self.costs = self.costs.but(replayed_ms=seen.core_ms, mfu=seen.mfu, launch_bound=seen.launch_bound)
        # Without a device and without workers nothing overlaps: loading is what the step has beyond the rest.
        overlaps = self.start.on_cuda or self.costs.beside
        if self.costs.loader_ms is None and overlaps and (seen := self._component("loader")) is not None:
            self.costs = self.costs.but(loader_ms=seen.loader_ms)
        copies = self.costs.resident_ms is None and self._copies_count()
        if copies and (seen := self._component("resident")) is not None:
            self.costs = self.costs.but(resident_ms=seen.core_ms)
        if self.costs.alone_ms is None and self.start.devices > 1 \
                and (seen := self._component("no_exchange")) is not None:  # fmt: skip
            self.costs = self.costs.but(alone_ms=seen.core_ms)

    def _copies_count(self) -> bool:
        """Whether a rung may still hide them; of the start it is always told."""
        on = {*self.stack, *self.start.enabled}
        return not self.stack or (self.start.on_cuda and not {"pin", "prefetch"} <= on)

    def _component(self, variation: Any) -> Seen | None:
        """A trial of the present stack; None where it cannot be had."""
        assert self.costs is not None
        last = max((number for number, row in enumerate(self.rows, 1) if row["kept"]), default=0)
        at = f"{last:02d}-{self.rows[last - 1]['try'] if last else 'naive'}/{variation}"
        if at in self._without:
            return None
        expected = self.costs.replayed_ms or self.costs.now_ms
        took = length(expected, expected, queued=0, batches_per_step=1, warmup=self.warmup)
        seen = self.lab.run(at, self.stack, Ask(variation=variation, steps=took.steps, warmup=took.warmup),
                            what=f"ceiling {variation}", need_s=took.seconds(expected, self._start_s))  # fmt: skip
        if seen.ok and (seen.loader_ms if variation == "loader" else seen.core_ms):
            if variation in CEILINGS and not last:
                self.ceilings[variation] = seen.samples_per_s
            return seen
        self._without.add(at)
        return None

    # -- confirming ---------------------------------------------------------------------------------------------------

    def confirm(self) -> Mapping[str, Any] | None:
        """The top against the start by a fresh A/B; None where nothing was kept. Raises Spent."""
        if not self.stack:
            return None
        return self.lab.confirm(f"confirm-{height(self.rows)}", self.stack, self._confirm_length(),
                                need_s=self._to_confirm_s() / (2 * CONFIRM_RUNS))  # fmt: skip

    def _confirm_length(self) -> Length:
        assert self.naive is not None and self.naive.step_ms is not None and self.costs is not None
        slow = max(self.naive.step_ms, self.costs.now_ms)
        took = length(self.costs.now_ms, slow, queued=queued(self.stack, self.costs.workers), warmup=self.warmup,
                      batches_per_step=batches_per_step(self.known, self.stack))  # fmt: skip
        return Length(warmup=took.warmup, window=max(took.window, CONFIRM_STEPS))

    def _to_confirm_s(self) -> float:
        """What the confirmation takes: a run that does not count, those that do, and two of a step for the gradient."""
        assert self.naive is not None and self.naive.step_ms is not None and self.costs is not None
        took = self._confirm_length()
        naive, top = (took.seconds(ms, self._start_s) for ms in (self.naive.step_ms, self.costs.now_ms))
        return (CONFIRM_RUNS + 1) * naive + CONFIRM_RUNS * top + 2 * self._start_s


def pool(rows: Sequence[Mapping[str, Any]]) -> Pool:
    """The spread that all screens so far have shown."""
    found = Pool()
    for row in rows:
        pairs = [pair for pair in zip(row["rates"]["base"], row["rates"]["arm"], strict=False) if all(pair)]
        found = found.plus(pairs)
    return found
