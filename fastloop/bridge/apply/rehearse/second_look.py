"""A second look, in real steps, at rungs that the rehearsal kept.

A rehearsal plays only one batch, and misses effects of later ones, such as other lengths. So the first batches after it
are timed. If they take clearly longer than the rehearsal promised, blocks of batches run alternately without and with
the rungs, to find a rung that makes them slower.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fastloop.bridge.apply.rehearse import memory
from fastloop.bridge.apply.rehearse.budget import Terms
from fastloop.bridge.apply.rehearse.played import synchronize
from fastloop.bridge.apply.rehearse.ranks import gather
from fastloop.bridge.apply.rehearse.rehearsal import ApplierHandle, Rehearsal
from fastloop.bridge.apply.site import LiveSite
from fastloop.feeds.call_shapes import Sizes, read_sizes
from fastloop.judge import second_look as judge
from fastloop.judge.rehearsal import RungOutcome
from fastloop.judge.second_look import Timed, TimedComparison
from fastloop.records.plan import Rehearsed, Step

SETTLING, WATCHED = 2, 8
"""Batches after the rehearsal that are ignored, and then those that are compared with it."""
BLOCK, ROUNDS = 4, 2
"""Batches in a block, and rounds of one block without rungs and one with them. One untimed batch comes before each
block, because switching has its own cost."""
COMPILED = "_compiled_call_impl"
"""The attribute of torch's modules with the compiled call that replaces their own."""
FEWEST_STEPS_LEFT = 40
"""Optimizer steps per rung that the run must have left for a second look."""
ROOM = 1.2
"""Factor on the peak memory that must be available before rungs that may save memory are switched off."""

Batches = Generator[None, None, None]
"""Resumed at the start of each batch."""


class StepTimingCheck:
    """Times a fit's steps with and without the rungs that the rehearsal kept, on one rank. All ranks switch at the same
    batches; they communicate once, after the timed batches, and again only if one of them is suspicious.

    Args:
        outcomes: the rehearsal's outcomes of the rungs to look at, in the ladder's order.
        first: the sizes of the batch that was rehearsed.

    Attributes:
        dropped: outcomes of the rungs that were removed.
        seen: the comparison for rungs that stay, as evidence.
    """

    def __init__(
        self,
        site: LiveSite,
        steps: Sequence[Step],
        outcomes: Sequence[RungOutcome],
        terms: Terms,
        handle: ApplierHandle,
        first: Sizes,
    ) -> None:
        self.site, self.steps, self.terms, self.handle = site, list(steps), terms, handle
        self.dropped: list[RungOutcome] = []
        self.seen: dict[str, Any] = {}
        self._outcomes = {each.rung: each for each in outcomes}
        self._promised = outcomes[-1].rehearsed or Rehearsed()
        self._first_size = _count_elements(first)
        self._paused: dict[str, list[tuple[Any, Any]]] = {}
        """Modules and their compiled calls that a comparison has taken off, by rung."""
        self._waits = False
        """Whether to synchronize with the device around each forward and backward."""
        self._began, self._size = 0.0, 0
        self._took_ms: float | None = None
        self._last: Timed | None = None
        """The time of the previous batch; None if it had no backward."""
        self._global_step, self._is_between_steps = site.trainer.global_step, True
        self._batches = self._run()
        next(self._batches)  # created between two batches; the next one is the first to be ignored

    @classmethod
    def after(
        cls, rehearsal: Rehearsal, outcomes: Sequence[RungOutcome], handle: ApplierHandle, first: Sizes
    ) -> StepTimingCheck | None:
        """Return the second look after a rehearsal. None if no rung on modules was kept, one cannot be switched
        repeatedly without its one-time cost, costs are not weighed, or the run is too short. The same on all ranks."""
        kept = [each for each in outcomes if each.fault is None and each.on_modules]
        steps = [step for step in rehearsal.steps if step.rung in {each.rung for each in kept}]
        left = rehearsal.terms.steps_left
        compiled = any(COMPILED in vars(each) for each in rehearsal.site.module.modules())
        if not kept or any(each.is_costly and not compiled for each in kept) or not rehearsal.terms.weighs_costs:
            return None
        if left is not None and left < FEWEST_STEPS_LEFT * len(kept):
            return None
        return cls(rehearsal.site, steps, kept, rehearsal.terms, handle, first)

    def batch_starts(self, batch: Any) -> bool:
        """A batch is about to be trained on; returns whether the second look is over. May switch rungs."""
        self._last = None if self._took_ms is None else Timed(self._took_ms, self._size)
        step, self._took_ms = self.site.trainer.global_step, None
        # If a module steps its optimizers itself, every batch boundary counts as one between steps.
        self._is_between_steps = step != self._global_step or not self.site.module.automatic_optimization
        self._global_step = step
        is_over = next(self._batches, self) is self
        self._size = 0 if is_over else _count_elements(read_sizes([batch], {}))
        return is_over

    def forward_starts(self) -> None:
        """training_step is about to be called."""
        if self._waits:
            synchronize(self.site.device)
        self._began = time.perf_counter()

    def backward_ends(self) -> None:
        """A backward is done; the batch's time ends with its last one."""
        if self._waits:
            synchronize(self.site.device)
        self._took_ms = 1e3 * (time.perf_counter() - self._began)

    # -- the course of a second look, batch by batch --------------------------------------------------------------

    def _run(self) -> Batches:
        yield from self._skip_batches(SETTLING)
        watched = list[Timed]()
        synchronize(self.site.device)
        yield from self._time_batches(watched, WATCHED)
        began = time.perf_counter()
        synchronize(self.site.device)
        waited_ms = 1e3 * (time.perf_counter() - began) / WATCHED
        watched = [each._replace(ms=each.ms + waited_ms) for each in watched]
        suspicious = judge.is_suspicious(watched, self._promised, self._first_size, self.terms.steps_left)
        every = gather(self.site.trainer, (suspicious, self._has_room(watched)))
        if not any(found for found, _ in every) or not all(room for _, room in every):
            return
        rungs = ", ".join(step.rung for step in self.steps)
        self.site.say(f"batches take longer than in the rehearsal: a few now run without {rungs}, to compare")
        while not self._is_between_steps:
            yield
        self._waits = True
        yield from self._find_slow()

    def _find_slow(self) -> Batches:
        whole = yield from self._compare(self.steps)
        if whole is None or not whole.is_slower or len(self.steps) == 1:
            self._record_result(self.steps, whole)
            return
        is_found = False
        for step in reversed(self.steps):
            if not self._is_costly(step) and any(COMPILED in vars(each) for each in self.site.module.modules()):
                break  # the compiled code includes this rung
            alone = yield from self._compare([step])
            if alone is not None and alone.is_slower:
                is_found = True
                self._record_result([step], alone)
        if not is_found:
            self._record_result(self.steps, whole)

    def _compare(self, steps: Sequence[Step]) -> Generator[None, None, TimedComparison | None]:
        """Time batches with and without these rungs, which are on at the end. All ranks agree on what is slower."""
        times: dict[bool, list[Timed]] = {True: [], False: []}
        for is_on in ROUNDS * (False, True):
            self._switch(steps, is_on)
            yield from self._skip_batches(1)
            yield from self._time_batches(times[is_on], BLOCK)
            while not self._is_between_steps:
                yield from self._time_batches(times[is_on], 1)
        mine = judge.compare(times[True], times[False])
        every = gather(self.site.trainer, mine)
        return next((each for each in every if each is not None and each.is_slower), mine)

    def _record_result(self, steps: Sequence[Step], found: TimedComparison | None) -> None:
        """Remove slower rungs that a shipped ladder switched on; keep the comparison as evidence for the others."""
        if found is None:
            return
        off = [step for step in steps if found.is_slower and step.rung in self.terms.by_ladder]
        on = [step.rung for step in steps if step not in off]
        self._switch(off, False)
        for step in off:
            if self._paused.pop(step.rung, None) is not None:
                self.handle.unapply(step)
        beside = f", together with {', '.join(step.rung for step in steps)}" if len(steps) > 1 else ""
        why = f"slower in training{beside}: {found}"
        self.dropped += [
            replace(self._outcomes[step.rung], fault=why, is_lasting=False, is_slower=True) for step in off
        ]
        if on:
            self.seen = self.seen or {"rungs": on, **vars(found), "is_slower": found.is_slower}

    def _switch(self, steps: Sequence[Step], is_on: bool) -> None:
        if is_on:
            for step in steps:
                if not self._is_costly(step):
                    self.handle.apply(step)
                for module, call in self._paused.pop(step.rung, ()):
                    vars(module)[COMPILED] = call
            return
        if scaler := self.site.strategy.precision_plugin.state_dict():
            self.site.scaler_state = scaler  # for the plugin that will replace this one
        for step in reversed(steps):
            if not self._is_costly(step):
                self.handle.unapply(step)
                continue
            modules = [each for each in self.site.module.modules() if COMPILED in vars(each)]
            self._paused[step.rung] = [(each, vars(each).pop(COMPILED)) for each in modules]

    def _is_costly(self, step: Step) -> bool:
        return self._outcomes[step.rung].is_costly

    def _skip_batches(self, count: int) -> Batches:
        for _ in range(count):
            yield

    def _time_batches(self, into: list[Timed], count: int) -> Batches:
        for _ in range(count):
            yield
            if self._last is not None:
                into.append(self._last)

    # -- readings -------------------------------------------------------------------------------------------------

    def _has_room(self, seen: Sequence[Timed]) -> bool:
        """Whether batches would fit without rungs that save memory: the first one did, before the rehearsal."""
        device = self.site.device
        if device.type != "cuda":
            return True
        grown = max([1.0, *(each.size / self._first_size for each in seen if self._first_size)])
        needed = ROOM * grown * max(torch.cuda.max_memory_allocated(device), self.site.step_bytes or 0)
        return needed <= memory.read_available(device)


def _count_elements(sizes: Sizes) -> int:
    """Number of elements in all tensors of these sizes."""
    return sum(torch.Size(shape).numel() for shape in sizes.values())
