"""How many samples a piece has: a number that was given, or one that a search finds on the first window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.micro.gradient_check import TakeLoss
from fastloop.bridge.apply.micro.search import SizeSearch, measure_length
from fastloop.bridge.apply.micro.search_run import SizeTrial
from fastloop.bridge.apply.micro.windows import Merged, MergedWindows, StepCall
from fastloop.bridge.apply.site import LiveSite
from fastloop.feeds.batch_norm.groups import BatchGroups
from fastloop.feeds.batch_tree import CannotRegroup
from fastloop.feeds.splitting import cut, get_loss
from fastloop.judge.micro_batch import FoundSize, list_sizes


class PieceSize:
    """The size of one run's pieces. For the arguments see `PieceChoice`."""

    def __init__(
        self,
        micro: int | SizeSearch,
        windows: MergedWindows,
        groups: BatchGroups | None,
        site: LiveSite,
        live: LivePlan,
    ) -> None:
        self._search = micro if isinstance(micro, SizeSearch) else None
        self.samples = 0 if isinstance(micro, SizeSearch) else micro
        """Samples per piece; 0 until the search has found it."""
        self.kept: str | None = None
        """Why the user's own batches stay as they are; None if they do not."""
        self._windows, self._groups, self._site, self._live = windows, groups, site, live
        self._found: FoundSize | None = None

    @property
    def is_searched(self) -> bool:
        return self._search is not None

    @property
    def is_open(self) -> bool:
        """Whether the search has yet to find it."""
        return self._search is not None and self._found is None

    @property
    def may_grow(self) -> bool:
        """Whether a larger size will be tried once rungs that wait have been tried."""
        return self._found is not None and self._found.later is not None

    def evidence(self) -> Mapping[str, Any]:
        """The size, and how the search found it: the reason, and samples per second of each size that was tried."""
        found = self._found
        return {
            "micro_batch": self.samples,
            "searched": None if found is None else found.why,
            "room_gib": None if found is None or not found.room_bytes else found.room_bytes / 2**30,
            "rates": None if found is None else {str(size): rate for size, rate in found.rates.items()},
        }

    def update(self, call: StepCall) -> None:
        """Search on the first window; later, choose another size if rungs were kept with which a larger one fits, if
        the compile was refused, or if samples are longer."""
        if self._search is None:
            return
        if self._found is None:
            self._find(self._search, call)
        elif self._windows.find_apart(call.batch) is None:
            self._use_uncompiled_size(self._search, call.window)
            self._grow(self._search, call)
            self._shrink_for_longer_samples(self._search, call)

    def make_trial(self, call: StepCall) -> SizeTrial:
        """Return what a search needs to run pieces of this batch."""
        take = partial(cut, call.batch, window=call.window, whole_batches=self._groups is not None)
        return SizeTrial(call.own_samples, lambda size: take(size)[0], self.make_take_loss(call.rest), self._groups)

    def make_take_loss(self, rest: Sequence[Any]) -> TakeLoss:
        """Return a function that runs training_step and returns its loss. `rest` are the arguments after the batch."""
        step = self._site.module.training_step
        return lambda batch, number: get_loss(step(batch, *self._windows.renumber(rest, number)))

    def _find(self, search: SizeSearch, call: StepCall) -> None:
        trial, sizes = self.make_trial(call), () if call.window is None else call.window.sizes
        try:
            if (apart := self._windows.find_apart(call.batch)) is not None:
                raise CannotRegroup(apart[1])
            if len(set(sizes)) > 1:
                raise CannotRegroup("the first batches differ in size")
            trial.take(trial.own)
        except CannotRegroup as reason:
            # The exchange in `find` needs all ranks, so this rank goes on with one size.
            candidates, search.skip = [trial.own], f"no search: {reason}"
        else:
            candidates, search.longest = list_sizes(trial.own, len(sizes) or 1), measure_length(call.batch)
        with self._site.one_time.span("rehearsal"):
            self._found = search.find(self._site.strategy, candidates, trial)
        self._use(self._found, trial.own)

    def _use(self, found: FoundSize, own: int) -> None:
        """Use this size; if it is that of the user's `own` batches for good, these stay as they are."""
        self.samples = found.size
        if found.size == own and found.later is None:
            self.kept = f"keeping your micro-batch size: {found.why}"

    def _use_uncompiled_size(self, search: SizeSearch, window: Merged | None) -> None:
        """Take the size for an uncompiled model if the rung that was to compile it was refused."""
        found = self._found
        if found is None or found.uncompiled is None or search.compiles is None:
            return
        if any(step.rung == search.compiles for step in self._live.plan.planned):
            return
        self.samples = found.uncompiled
        refused = f"{self.samples} because {search.compiles} was refused, and {found.size} was for the compiled model"
        why = f"{found.why}; {refused}"
        self._found = replace(found, size=self.samples, uncompiled=None, why=why)
        if window is not None and self.samples == window.sizes[0]:
            self.kept = f"keeping your micro-batch size: {why}"

    def _grow(self, search: SizeSearch, call: StepCall) -> None:
        """Take the larger size that needs some rungs, if it fits now that these were tried."""
        is_full = call.window is None or len(call.window.sizes) == call.window.full
        if self._found is None or not self.may_grow or not is_full or not self._live.held.isdisjoint(search.waiting):
            return
        with self._site.one_time.span("rehearsal"):
            self._found = search.grow(self._site.strategy, self._found, self.make_trial(call))
        self._use(self._found, call.own_samples)

    def _shrink_for_longer_samples(self, search: SizeSearch, call: StepCall) -> None:
        """Choose a smaller micro-batch if this batch's samples are longer than the search's and need it."""
        if not search.meets_longer(call.batch, call.own_samples):
            return
        with self._site.one_time.span("rehearsal"):
            found = search.fit_longer(self._site.strategy, call.batch, self.make_trial(call))
        if found is not None and self._found is not None:
            self.samples, self._found = found.size, replace(self._found, why=f"{self._found.why}; {found.why}")
