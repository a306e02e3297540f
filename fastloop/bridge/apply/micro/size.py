"""How many samples a piece has: a number that was given, or one that a search finds on the first window."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastloop.bridge.apply.micro.gradient_check import TakeLoss
from fastloop.bridge.apply.micro.search import SizeSearch, measure_length
from fastloop.bridge.apply.micro.search_run import SizeTrial
from fastloop.bridge.apply.micro.windows import Merged, MergedWindows
from fastloop.evidence.clock.one_time import OneTime
from fastloop.feeds.batch_norm.groups import BatchGroups
from fastloop.feeds.batch_tree import CannotRegroup, count_rows
from fastloop.feeds.splitting import cut, get_loss
from fastloop.judge.micro_batch import FoundSize, list_sizes


class PieceSize:
    """The size of one run's pieces. For the arguments see `PieceChoice`."""

    def __init__(
        self,
        micro: int | SizeSearch,
        windows: MergedWindows,
        groups: BatchGroups | None,
        one_time: OneTime,
        list_held: Callable[[], Collection[str]],
        is_planned: Callable[[str], bool],
    ) -> None:
        self._search = micro if isinstance(micro, SizeSearch) else None
        self.samples = 0 if isinstance(micro, SizeSearch) else micro
        """Samples per piece; 0 until the search has found it."""
        self.kept: str | None = None
        """Why the user's own batches stay as they are; None if they do not."""
        self._windows, self._groups, self._one_time = windows, groups, one_time
        self._list_held, self._is_planned = list_held, is_planned
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

    def update(self, strategy: Any, batch: Any, window: Merged | None, rest: Sequence[Any]) -> None:
        """Search on the first window; later, choose another size if rungs were kept with which a larger one fits, if
        the compile was refused, or if samples are longer."""
        if self._search is None:
            return
        own = (count_rows(batch) if window is None else window.sizes[0]) or 1
        trial = self.make_trial(strategy, batch, window, rest, own)
        if self._found is None:
            self._find(self._search, strategy, batch, window, trial)
        elif self._windows.find_apart(batch) is None:
            self._use_uncompiled_size(self._search, window)
            self._grow(self._search, strategy, window, trial)
            self._shrink_for_longer_samples(self._search, strategy, batch, trial)

    def make_trial(self, strategy: Any, batch: Any, window: Merged | None, rest: Sequence[Any], own: int) -> SizeTrial:
        """Return what a search needs to run pieces of this batch.

        Args:
            own: samples in one of the user's own batches.
        """
        take = partial(cut, batch, window=window, whole_batches=self._groups is not None)
        return SizeTrial(own, lambda size: take(size)[0], self.make_take_loss(strategy, rest), self._groups)

    def make_take_loss(self, strategy: Any, rest: Sequence[Any]) -> TakeLoss:
        """Return a function that runs training_step and returns its loss."""
        step = strategy.lightning_module.training_step
        return lambda batch, number: get_loss(step(batch, *self._windows.renumber(rest, number)))

    def _find(self, search: SizeSearch, strategy: Any, batch: Any, window: Merged | None, trial: SizeTrial) -> None:
        batches = 1 if window is None else len(window.sizes)
        try:
            if (apart := self._windows.find_apart(batch)) is not None:
                raise CannotRegroup(apart[1])
            if window is not None and len(set(window.sizes)) > 1:
                raise CannotRegroup("the first batches differ in size")
            trial.take(trial.own)
        except CannotRegroup as reason:
            # The exchange in `find` needs all ranks, so this rank goes on with one size.
            sizes, search.skip = [trial.own], f"no search: {reason}"
        else:
            sizes, search.longest = list_sizes(trial.own, batches), measure_length(batch)
        with self._one_time.span("rehearsal"):
            self._found = search.find(strategy, sizes, trial)
        self._use(self._found, trial.own)

    def _use(self, found: FoundSize, own: int) -> None:
        """Use this size; if it is that of the user's `own` batches for good, these stay as they are."""
        self.samples = found.size
        if found.size == own and found.later is None:
            self.kept = f"keeping your micro-batch size: {found.why}"

    def _use_uncompiled_size(self, search: SizeSearch, window: Merged | None) -> None:
        """Take the size for an uncompiled model if the rung that was to compile it was refused."""
        found = self._found
        if found is None or found.uncompiled is None or search.compiles is None or self._is_planned(search.compiles):
            return
        self.samples = found.uncompiled
        refused = f"{self.samples} because {search.compiles} was refused, and {found.size} was for the compiled model"
        why = f"{found.why}; {refused}"
        self._found = replace(found, size=self.samples, uncompiled=None, why=why)
        if window is not None and self.samples == window.sizes[0]:
            self.kept = f"keeping your micro-batch size: {why}"

    def _grow(self, search: SizeSearch, strategy: Any, window: Merged | None, trial: SizeTrial) -> None:
        """Take the larger size that needs some rungs, if it fits now that these were tried."""
        is_full = window is None or len(window.sizes) == window.full
        if self._found is None or not self.may_grow or not is_full or set(search.waiting) & set(self._list_held()):
            return
        with self._one_time.span("rehearsal"):
            self._found = search.grow(strategy, self._found, trial)
        self._use(self._found, trial.own)

    def _shrink_for_longer_samples(self, search: SizeSearch, strategy: Any, batch: Any, trial: SizeTrial) -> None:
        """Choose a smaller micro-batch if this batch's samples are longer than the search's and need it."""
        if not search.meets_longer(batch, trial.own):
            return
        with self._one_time.span("rehearsal"):
            found = search.fit_longer(strategy, batch, trial)
        if found is not None and self._found is not None:
            self.samples, self._found = found.size, replace(self._found, why=f"{self._found.why}; {found.why}")
