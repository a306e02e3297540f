"""Which pieces a batch runs in: micro-batches of one size, or the user's own batches of its window.

A merged window may turn out not to be one batch: the user's batches cannot be concatenated, or the loss is no mean over
samples. Its pieces are then the user's own batches, which is the user's own accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastloop.bridge.apply.micro.gradient_check import TakeLoss, Weighing, explain_difference, weigh_pieces
from fastloop.bridge.apply.micro.search import SizeSearch, Trial, measure_length
from fastloop.bridge.apply.micro.windows import Merged, MergedWindows
from fastloop.bridge.apply.rehearse.rehearsal import gather
from fastloop.errors import FastLoopError
from fastloop.evidence.clock.one_time import OneTime
from fastloop.feeds.batch_norm.groups import BatchGroups
from fastloop.feeds.batch_tree import samples
from fastloop.feeds.splitting import CannotSplit, Piece, cut, cut_at, get_loss
from fastloop.judge.micro_batch import FoundSize, list_sizes


class Chosen(NamedTuple):
    """The pieces of one batch."""

    pieces: list[Piece]
    apart: bool = False
    """They are the user's own batches of a window: each has its own batch_idx, and may be skipped by itself."""


class PieceChoice:
    """Decides what a run's micro-batches are, on its first batch that shows it, and cuts each batch accordingly.

    Args:
        micro: samples per piece; or what finds that, on the first window.
        rung: whose setting that is.
        strict: a batch that cannot be cut or merged is an error, raised before anything is computed from it.
        compares: the first window's gradient decides whether windows are merged, or batches cut; False: they are.
        warn: takes one line for the user.
        one_time: the ledger of costs that are none of a step's.
        groups: told how many of the user's batches a piece holds; pieces then hold whole ones. None: nobody asks.
    """

    def __init__(
        self,
        micro: int | SizeSearch,
        *,
        rung: str,
        strict: bool = False,
        compares: bool = True,
        warn: Callable[[str], None] = lambda _line: None,
        one_time: OneTime | None = None,
        groups: BatchGroups | None = None,
    ) -> None:
        self._search = micro if isinstance(micro, SizeSearch) else None
        self.micro = 0 if isinstance(micro, SizeSearch) else micro
        """Samples per piece; 0 until it is found."""
        self._rung, self._strict, self._warn = rung, strict, warn
        self._compares, self._undecided = compares, compares or groups is not None
        self._one_time = one_time or OneTime()
        self.groups = groups
        self.windows = MergedWindows()
        self.whole: tuple[int, int] | None = None
        """Samples of every batch but an epoch's last one, and of a short last one; None where that is not known."""
        self.refused: str | None = None
        """Why no window is merged, or no batch cut, in this run."""
        self.weighing: Weighing | None = None
        self._found: FoundSize | None = None
        self._misfit = False
        self._problem: str | None = None
        self._steps = self._changed = self._apart_steps = 0
        self.uncut = 0
        """Batches that could not be cut."""
        self._apart_why = ""
        self._most: tuple[int, ...] = ()

    def evidence(self) -> Mapping[str, Any]:
        """Batches, how many of them ran in other pieces than the loader's own and how many could not be cut, and why;
        the sizes of the most pieces one of them ran in; the loader batches merged into one."""
        return {
            "steps": self._steps,
            "changed_steps": self._changed,
            "uncut_steps": self.uncut,
            "problem": self._problem,
            "micro_batches": list(self._most),
            "samples": sum(self._most),
            "merged_batches": self.windows.sampler.window if self.windows.sampler else 1,
            "apart_steps": self._apart_steps,
            "apart_why": self._apart_why or None,
            "weighed_by": None if self.weighing is None else str(self.weighing.counter),
            "micro_batch": self.micro,
            "searched": None if self._found is None else self._found.why,
            "rates": None if self._found is None else {str(size): rate for size, rate in self._found.rates.items()},
        }

    def choose(self, strategy: Any, trainer: Any, batch: Any, rest: Sequence[Any]) -> Chosen:
        """The batch in micro-batches of the size that was asked for, or the user's batches of its window.

        Args:
            rest: what training_step is given after the batch.
        """
        window = self.windows.read(trainer.fit_loop.total_batch_idx, batch)
        if self._search is not None and self._found is None:
            if window is not None and len(window.sizes) < window.full:
                self.micro = window.sizes[0]  # a run that was resumed inside of a window searches in the next
                return Chosen(self._cut(batch, trainer, window))
            self._find_size(self._search, strategy, batch, window, rest)
        elif self._search is not None and self.refused is None and self.windows.find_apart(batch) is None:
            self._fit_longer(self._search, strategy, batch, window, rest)
        if window is None:
            return Chosen(self._split(strategy, trainer, batch, rest))
        if len(window.sizes) == 1:
            return Chosen(self._cut(batch, trainer, window), apart=self.refused is not None)
        own, reason = self._list_own(batch, window)
        if self._undecided:
            self._undecided = False
            if reason is None:
                merged = cut(batch, self.micro, window, whole_batches=self.groups is not None)
                reason = self._compare(strategy, own, merged, rest)
            self.refused = reason = self._agree(strategy, reason)
        if reason is None or not own:
            return Chosen(self._cut(batch, trainer, window))
        if not self._apart_why:
            self._apart_why = reason
            self._warn(f"{self._rung}: {'windows run' if self.refused else 'a window runs'} batch by batch: {reason}")
        self._steps, self._apart_steps = self._steps + 1, self._apart_steps + 1
        return Chosen(own, apart=True)

    # -- the size -------------------------------------------------------------------------------------------------

    def _find_size(
        self, search: SizeSearch, strategy: Any, batch: Any, window: Merged | None, rest: Sequence[Any]
    ) -> None:
        """Let the first window decide what a micro-batch is; the user's own batches stay where that is the answer."""
        own, batches = (samples(batch), 1) if window is None else (window.sizes[0], len(window.sizes))
        trial = self._make_trial(strategy, batch, window, rest, own or 1)
        try:
            if (apart := self.windows.find_apart(batch)) is not None:
                raise CannotSplit(apart[1])
            if window is not None and len(set(window.sizes)) > 1:
                raise CannotSplit("the first batches differ in size")
            trial.take(trial.own)
        except CannotSplit as reason:
            # All ranks must ask each other, or none.
            sizes, why = [trial.own], f"no search: {reason}"
            search.skip = lambda: why
        else:
            sizes, search.longest = list_sizes(trial.own, batches), measure_length(batch)
        with self._one_time.span("rehearsal"):
            self._found = search.find(strategy, sizes, trial)
        self.micro = self._found.size
        if self.micro == trial.own:
            self.refused, self._undecided = f"your own micro-batch stays: {self._found.why}", False
            self._apart_why = self.refused

    def _fit_longer(
        self, search: SizeSearch, strategy: Any, batch: Any, window: Merged | None, rest: Sequence[Any]
    ) -> None:
        """Longer samples than those of the search may need a smaller micro-batch from here."""
        own = (samples(batch) or 1) if window is None else window.sizes[0]
        if not search.meets_longer(batch, own):
            return
        with self._one_time.span("rehearsal"):
            found = search.fit_longer(strategy, batch, self._make_trial(strategy, batch, window, rest, own))
        if found is not None and self._found is not None:
            self.micro, self._found = found.size, replace(self._found, why=f"{self._found.why}; {found.why}")

    def _make_trial(self, strategy: Any, batch: Any, window: Merged | None, rest: Sequence[Any], own: int) -> Trial:
        take = partial(cut, batch, window=window, whole_batches=self.groups is not None)
        return Trial(own, lambda size: take(size)[0], self._make_take_loss(strategy, rest), self.groups)

    def _make_take_loss(self, strategy: Any, rest: Sequence[Any]) -> TakeLoss:
        step = strategy.lightning_module.training_step
        return lambda batch, number: get_loss(step(batch, *self.windows.renumber(rest, number)))

    # -- one of the user's batches, in pieces -----------------------------------------------------------------------

    def _split(self, strategy: Any, trainer: Any, batch: Any, rest: Sequence[Any]) -> list[Piece]:
        """Pieces of one of the user's batches; the batch itself where its gradient is not theirs."""
        whole = [Piece(batch, samples(batch) or 0, 1.0)]
        if self.refused is not None:
            self._steps, self.uncut = self._steps + 1, self.uncut + 1
            return whole
        pieces = self._cut(batch, trainer, None)
        if self._undecided and (len(pieces) > 1 or trainer.world_size > 1):
            self._undecided = False
            reason = self._weigh(strategy, trainer, batch, pieces, rest)
            self.refused = self._problem = self._agree(strategy, reason)
            if self.refused is not None:
                self._warn(f"{self._rung}: batches run whole: {self.refused}")
                self._changed, self.uncut, self._most = 0, self.uncut + 1, ()
                return whole
        if self.weighing is not None and len(pieces) > 1:
            weights = self.weighing.counter.weigh([piece.batch for piece in pieces])
            pieces = [piece._replace(weight=weight) for piece, weight in zip(pieces, weights, strict=True)]
        return pieces

    def _weigh(
        self, strategy: Any, trainer: Any, batch: Any, pieces: Sequence[Piece], rest: Sequence[Any]
    ) -> str | None:
        """Find out what the pieces are to be weighed by; why they must not be trained on, if so."""
        reason, mine = None, None
        if len(pieces) > 1:
            with self._one_time.span("rehearsal"):
                reason, mine = weigh_pieces(strategy, batch, pieces, self._make_take_loss(strategy, rest))
        self.weighing = next((each for each in gather(trainer, mine) if each is not None), None)
        return reason

    # -- a window of them, merged -----------------------------------------------------------------------------------

    def _list_own(self, batch: Any, window: Merged) -> tuple[list[Piece], str | None]:
        """The user's batches of a window, and why they should not be merged. None of them where a hook changed the
        merged batch so that they cannot be told apart."""
        if (apart := self.windows.find_apart(batch)) is not None:
            return [Piece(each, samples(each) or 0, 1 / window.full) for each in apart[0]], apart[1]
        try:
            return cut_at(batch, *window), self.refused
        except CannotSplit as error:
            return [], str(error)

    def _compare(self, strategy: Any, own: Sequence[Piece], merged: Sequence[Piece], rest: Sequence[Any]) -> str | None:
        take_loss = self._make_take_loss(strategy, rest)
        with self._one_time.span("rehearsal"):
            if merged[0].samples >= own[0].samples:
                return explain_difference(strategy, own, merged, take_loss, self.groups, self._compares)
            # A search found that the user's own batch does not fit.
            reason, weighing = weigh_pieces(strategy, own[0].batch, cut(own[0].batch, self.micro), take_loss)
            return reason or (weighing and "the loss is a mean over tokens, but a window weights it by samples")

    def _agree(self, strategy: Any, reason: str | None) -> str | None:
        """Why windows are not merged in this run, on any rank."""
        if not strategy.reduce_boolean_decision(reason is None, all=True):
            reason = reason or "another rank must not merge its first window"
        if reason is not None:
            self._check_strict(reason, "batch by batch")
        return reason

    # -- cutting ----------------------------------------------------------------------------------------------------

    def _cut(self, batch: Any, trainer: Any, window: Merged | None) -> list[Piece]:
        try:
            if window is None:
                self._check_size(batch, trainer)
            pieces = cut(batch, self.micro, window, whole_batches=self.groups is not None and window is not None)
        except CannotSplit as reason:
            self._check_strict(str(reason), "with whole batches")
            self.uncut, self._problem = self.uncut + 1, self._problem or str(reason)
            # A short last window keeps the weight accumulation would have given it.
            share = 1.0 if window is None else len(window.sizes) / window.full
            rows, sizes = samples(batch) or 0, window.sizes if window else ()
            groups = len(sizes) if len(set(sizes)) == 1 and sum(sizes) == rows else 1
            pieces = [Piece(batch, sum(sizes) if window else rows, share, groups)]
        self._steps += 1
        self._changed += len(pieces) > 1 or (window is not None and len(window.sizes) > 1)
        if len(pieces) > len(self._most):
            self._most = tuple(piece.samples for piece in pieces)
        return pieces

    def _check_size(self, batch: Any, trainer: Any) -> None:
        """Refuse a batch whose first dimension is not its samples: a list of images [C, H, W] would be cut in C."""
        rows = samples(batch)
        if self.whole is None or rows is None:
            return
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._misfit or not (rows == self.whole[0] or (last and rows == self.whole[1])):
            self._misfit = True
            raise CannotSplit(f"the loader's batches have {self.whole[0]} samples, and the first tensor {rows} rows")

    def _check_strict(self, reason: str, otherwise: str) -> None:
        if self._strict:
            do = f"turn rungs.{self._rung} off, or turn strict off to train {otherwise}"
            raise FastLoopError(got=f"{self._rung}.micro_batch={self.micro}", why=reason, do=do) from None
