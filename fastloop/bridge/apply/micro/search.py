"""Finds the fastest micro-batch for all ranks on the first step, and another one when the run changes.

One that only fits with rungs that are not on yet is used once these have been kept; a smaller one, when longer samples
come. Either is tried before it is trained on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastloop.bridge.apply.micro.search_run import BY_MEMORY, SearchRules, SearchRun, SizeTrial
from fastloop.bridge.apply.rehearse.ranks import gather
from fastloop.bridge.apply.rehearse.remembered import KeptSize
from fastloop.bridge.apply.state.untouched import preserve_parameters
from fastloop.errors import NotApplicable
from fastloop.feeds.batch_tree import count_rows, iterate_tensors
from fastloop.feeds.call_shapes import Resized
from fastloop.judge.micro_batch import FoundSize


@dataclass(kw_only=True)
class SizeSearch(SearchRules):
    """Finds the micro-batch of a run on its first step, and a smaller one if longer samples come later."""

    longest: float = 0.0
    """The longest samples tried, as measured by `measure_length`."""
    sizes: Sequence[int] = ()
    """Candidate sizes, from the smallest to the one found."""
    _sizes: Sequence[int] = ()
    """All of them."""

    def find(self, strategy: Any, sizes: Sequence[int], trial: SizeTrial) -> FoundSize:
        """Return the size for all ranks: the smallest that any rank finds. Ranks communicate once, at the end.

        Args:
            sizes: to choose from, ascending.

        Raises:
            Exception: the user's own error, if it lost the device.
        """
        trainer = strategy.lightning_module.trainer
        run = SearchRun(self, strategy, sizes, trial)
        mine = run.search()
        every, owns = zip(*gather(trainer, (mine, trial.own)), strict=True)
        if len(set(owns)) > 1:
            return FoundSize(
                size=trial.own, why=f"ranks start with batches of different sizes: {min(owns)} to {max(owns)}"
            )
        agreed: FoundSize = min(every, key=lambda each: each.size)
        if agreed.later is not None:
            later = min(each.later or each.size for each in every)
            agreed = replace(agreed, later=later if later > agreed.size else None)
        if any(each.uncompiled is not None for each in every):
            agreed = replace(agreed, uncompiled=min(each.uncompiled or each.size for each in every))
        if agreed.size != mine.size:
            with contextlib.suppress(Exception):
                run.play_plain([agreed.size])
        if trainer.is_global_zero and agreed.rates:
            kept = KeptSize(size=agreed.size, uncompiled=agreed.uncompiled, later=agreed.later)
            run.memory.keep_size(run.key, kept)
        self._sizes = run.sizes
        self._keep_up_to(agreed.size)
        return agreed

    def grow(self, strategy: Any, found: FoundSize, trial: SizeTrial) -> FoundSize:
        """Return what to use now that the rungs were tried with which a larger size may fit. All ranks call this."""
        assert found.later is not None
        if not strategy.reduce_boolean_decision(fits_in_memory(strategy, found.later, trial), all=True):
            return replace(found, later=None, why=f"{found.why}; {found.later} did not fit after all")
        self._keep_up_to(found.later)
        return replace(found, size=found.later, later=None)

    def _keep_up_to(self, size: int) -> None:
        self.sizes = [each for each in self._sizes if each <= size] or [size]

    def meets_longer(self, batch: Any, own: int) -> bool:
        """Whether the batch's samples are longer than all before, and would run in pieces of another size than the
        user's `own`."""
        return measure_length(batch) > self.longest and min(self.sizes[-1], count_rows(batch) or 0) != own

    def fit_longer(self, strategy: Any, batch: Any, trial: SizeTrial) -> FoundSize | None:
        """The size for this batch and later ones, if its longer samples need a smaller one.

        The size is tried before the batch is trained on, as in the first step, and on this rank only: ranks may differ
        in their pieces.
        """
        length, most = measure_length(batch), self.sizes[-1]
        if (count_rows(batch) or 0) >= most:
            self.longest = length
        run = SearchRun(self, strategy, self.sizes, trial)
        fits = run.find_fitting()
        if fits == most or (fits is None and not run.limit.startswith(BY_MEMORY)):
            return None  # no size would fix the step: its own error shows why, or it skips this batch
        said = f"a later batch has {length:g} values per sample, and micro-batches of {most} do not fit"
        if fits is None:
            fits, do = self.sizes[0], "shorten your longest samples"
            said += ", nor do smaller ones"
        else:
            do = f"write micro_batch: {fits} to start with it"
        self.warn(f"{said}; using micro-batches of {fits} from now on (limited {run.limit}); {do}")
        self.sizes = [size for size in self.sizes if size <= fits]
        return FoundSize(size=fits, why=f"{most} did not fit longer samples that came later")


def fits_in_memory(strategy: Any, size: int, trial: SizeTrial) -> bool:
    """Whether a piece of this size, which would be a new one, fits now, with room for the optimizer's future state.
    Leaves no trace but graphs for this size."""
    Resized.count += 1
    run, fits = SearchRun(SearchRules(target=1.0, runs_graphs=True), strategy, [size], trial), None
    with contextlib.suppress(NotApplicable), preserve_parameters(run.module.parameters()):
        fits = run.find_fitting()
    return fits is not None or not run.limit.startswith(BY_MEMORY)


def measure_length(batch: Any) -> float:
    """Tensor elements in a batch per sample: its padded number of tokens, or pixels."""
    return sum(each.numel() for each in iterate_tensors(batch) if each.dim()) / (count_rows(batch) or 1)
