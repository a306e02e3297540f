"""Several forward and backward passes inside one call of training_step, as if they were one.

Lightning calls training_step, then zero_grad, then backward. All pieces but the last run forward and backward inside
training_step; their gradients are held aside while Lightning zeroes, and come back right before the last backward, so
that one exchange between ranks covers them all. batch_idx, global_step, schedules, hooks and the loss of the step are
what they were.

A merged window may turn out not to be one batch: the user's batches cannot be concatenated, or the loss is no mean over
samples. Its pieces are then the user's own batches, which is the user's own accumulation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fastloop.bridge.apply.micro.gradient_check import TakeLoss, Weighing, explain_difference, weigh_pieces
from fastloop.bridge.apply.micro.piece_logs import PieceLogs
from fastloop.bridge.apply.micro.search import SizeSearch, Trial, measure_length
from fastloop.bridge.apply.rehearse.rehearsal import gather
from fastloop.bridge.apply.site import attribute
from fastloop.bridge.watch.phases import PIECE
from fastloop.errors import FastLoopError
from fastloop.evidence.clock.one_time import OneTime
from fastloop.feeds.batch_norm.groups import BatchGroups
from fastloop.feeds.batch_tree import Window, samples
from fastloop.feeds.concatenation import CannotConcatenate, concatenate
from fastloop.feeds.splitting import CannotSplit, Piece, cut, cut_at, get_loss, join, sum_losses
from fastloop.feeds.window_batches import WindowSampler
from fastloop.judge.micro_batch import FoundSize, list_sizes


class MicroBatches:
    """Cuts each train batch and runs the pieces.

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
        self.search = micro if isinstance(micro, SizeSearch) else None
        self.micro = 0 if isinstance(micro, SizeSearch) else micro
        self.rung, self.strict, self.warn = rung, strict, warn
        self.found: FoundSize | None = None
        self.weighing: Weighing | None = None
        self.groups, self._compares = groups, compares
        self.windows: WindowSampler | None = None
        self.whole: tuple[int, int] | None = None
        """Samples of every batch but an epoch's last one, and of a short last one; None where that is not known."""
        self.problem: str | None = None
        self.steps = self.changed = self.uncut = 0
        self.most: tuple[int, ...] = ()
        self._held: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._window: tuple[tuple[int, ...], int] | None = None
        self._window_of = -1
        self._misfit = False
        self.refused: str | None = None
        """Why no window is merged, or no batch cut, in this run."""
        self.apart = False
        """The window at hand runs as the user's own batches."""
        self.apart_steps, self._apart_why = 0, ""
        self._undecided = compares or groups is not None
        self._one_time = one_time or OneTime()
        self._came_apart: tuple[Window, str] | None = None
        """The last window whose batches are not one batch, and why."""
        self._joined: tuple[Any, tuple[int, ...]] | None = None
        """The last one that was concatenated here, and the sizes of its batches."""

    def evidence(self) -> Mapping[str, Any]:
        """Batches, how many of them ran in other pieces than the loader's own and how many could not be cut, and why;
        the sizes of the most pieces one of them ran in; the loader batches merged into one."""
        return {
            "steps": self.steps,
            "changed_steps": self.changed,
            "uncut_steps": self.uncut,
            "problem": self.problem,
            "micro_batches": list(self.most),
            "samples": sum(self.most),
            "merged_batches": self.windows.window if self.windows else 1,
            "apart_steps": self.apart_steps,
            "apart_why": self._apart_why or None,
            "weighed_by": None if self.weighing is None else str(self.weighing.counter),
            "micro_batch": self.micro,
            "searched": None if self.found is None else self.found.why,
            "rates": None if self.found is None else {str(size): rate for size, rate in self.found.rates.items()},
        }

    def take_window(self, batches: Window) -> Any:
        """What Lightning is to see of a window whose batches came apart, on the device: their concatenation, or the
        last of them, while the others wait for `run`."""
        reason = self.refused
        if reason is None:
            try:
                whole = concatenate(batches)
            except CannotConcatenate as error:
                reason = str(error)
            else:
                self._joined = whole, tuple(samples(batch) or 0 for batch in batches)
                return whole
        self._came_apart = batches, reason
        return batches[-1]

    def find_whole(self, batch: Any) -> Any:
        """All batches of the window, where Lightning sees only one of them."""
        found = self._find_apart(batch)
        return batch if found is None else found[0]

    def _find_apart(self, batch: Any) -> tuple[Window, str] | None:
        """That window, and why it is none to concatenate."""
        return self._came_apart if self._came_apart is not None and self._came_apart[0][-1] is batch else None

    def convert(self, batch: Any, convert: Callable[[Any], Any]) -> Any:
        """`convert` the batch that Lightning sees, and with it all that goes with it."""
        if (apart := self._find_apart(batch)) is not None:
            self._came_apart = Window(map(convert, apart[0])), apart[1]
            return self._came_apart[0][-1]
        converted = convert(batch)
        if self._joined is not None and self._joined[0] is batch:
            self._joined = converted, self._joined[1]
        return converted

    def run(self, strategy: Any, trainer: Any, step: Callable[..., Any], batch: Any, rest: Sequence[Any]) -> Any:
        """Run one training_step over the pieces of `batch`; returns what it would have returned for the whole."""
        pieces = self._choose_pieces(strategy, trainer, batch, rest)
        self._begin(pieces[0])
        if len(pieces) == 1 and math.isclose(pieces[0].weight, 1):
            output = step(pieces[0].batch, *rest)
            if get_loss(output) is None:
                self.after_backward()
            return output
        module = strategy.lightning_module
        parameters = list(module.parameters())  # a step may free some that are frozen before it
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        outputs: list[Any] = []
        logs = PieceLogs(module, pieces, () if self.weighing is None else self.weighing.names)
        with attribute(module, "log", logs.take):
            for number, piece in enumerate(pieces):
                logs.piece = piece
                self._begin(piece)
                more = self._number(rest, number) if self.apart else rest
                if piece is pieces[-1]:
                    outputs.append(step(piece.batch, *more))
                    break
                with _skip_exchange(strategy):
                    outputs.append(step(piece.batch, *more))
                    if (loss := get_loss(outputs[-1])) is not None:
                        _run_backward(strategy, trainer, module, piece.weigh(loss))
        logs.flush(hides_rows=self._find_apart(batch) is not None)
        held = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        skipped = [get_loss(output) is None for output in outputs]
        if all(skipped) or (any(skipped) and not self.apart):
            self.after_backward()
            return None  # the user skips this batch; Lightning then runs no backward
        self._held = [
            (parameter, gradient) for parameter, gradient in zip(parameters, held, strict=True) if gradient is not None
        ]
        loss = sum_losses(outputs, pieces)
        kept = [number for number, skip in enumerate(skipped) if not skip]
        return join([outputs[number] for number in kept], [pieces[number] for number in kept], loss)

    def _number(self, rest: Sequence[Any], number: int) -> Sequence[Any]:
        """The arguments after the batch, with the batch_idx that a batch of this window has without us."""
        if self.windows is None or not rest or not isinstance(rest[0], int):
            return rest
        return (rest[0] * self.windows.window + number, *rest[1:])

    def before_backward(self) -> None:
        """Put the held gradients back, to be added to by the last piece's backward."""
        for parameter, gradient in self._held:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held = []

    def after_backward(self) -> None:
        """What is called from now on holds one batch. Until then, a checkpoint may call a module again."""
        if self.groups is not None:
            self.groups.begin(1)

    def _begin(self, piece: Piece) -> None:
        if self.groups is not None:
            self.groups.begin(piece.groups)

    def _choose_pieces(self, strategy: Any, trainer: Any, batch: Any, rest: Sequence[Any]) -> list[Piece]:
        """The batch in micro-batches of the size that was asked for, or the user's batches of its window."""
        window = self._take_window(trainer, batch)
        if self.search is not None and self.found is None:
            if window is not None and len(window[0]) < window[1]:
                self.micro = window[0][0]  # a run that was resumed inside of a window searches in the next
                return self._cut(batch, trainer, window)
            self._find_size(self.search, strategy, batch, window, rest)
        elif self.search is not None and self.refused is None and self._find_apart(batch) is None:
            self._fit_longer(self.search, strategy, batch, window, rest)
        self.apart = self.refused is not None
        if window is None:
            return self._split(strategy, trainer, batch, rest)
        if len(window[0]) == 1:
            return self._cut(batch, trainer, window)
        own, reason = self._list_own(batch, window)
        if self._undecided:
            self._undecided = False
            if reason is None:
                merged = cut(batch, self.micro, window, whole_batches=self.groups is not None)
                reason = self._compare(strategy, own, merged, rest)
            self.refused = reason = self._agree(strategy, reason)
        self.apart = reason is not None and bool(own)
        if not self.apart:
            return self._cut(batch, trainer, window)
        if not self._apart_why:
            self._apart_why = reason or ""
            self.warn(f"{self.rung}: {'windows run' if self.refused else 'a window runs'} batch by batch: {reason}")
        self.steps, self.apart_steps = self.steps + 1, self.apart_steps + 1
        return own

    def _find_size(self, search: SizeSearch, strategy: Any, batch: Any, window: Any, rest: Sequence[Any]) -> None:
        """Let the first window decide what a micro-batch is; the user's own batches stay where that is the answer."""
        own, batches = (samples(batch), 1) if window is None else (window[0][0], len(window[0]))
        trial = self._make_trial(strategy, batch, window, rest, own or 1)
        try:
            if (apart := self._find_apart(batch)) is not None:
                raise CannotSplit(apart[1])
            if window is not None and len(set(window[0])) > 1:
                raise CannotSplit("the first batches differ in size")
            trial.take(trial.own)
        except CannotSplit as reason:
            # All ranks must ask each other, or none.
            sizes, why = [trial.own], f"no search: {reason}"
            search.skip = lambda: why
        else:
            sizes, search.longest = list_sizes(trial.own, batches), measure_length(batch)
        with self._one_time.span("rehearsal"):
            self.found = search.find(strategy, sizes, trial)
        self.micro = self.found.size
        if self.micro == trial.own:
            self.refused, self._undecided = f"your own micro-batch stays: {self.found.why}", False
            self._apart_why = self.refused

    def _fit_longer(self, search: SizeSearch, strategy: Any, batch: Any, window: Any, rest: Sequence[Any]) -> None:
        """Longer samples than those of the search may need a smaller micro-batch from here."""
        own = (samples(batch) or 1) if window is None else window[0][0]
        if not search.meets_longer(batch, own):
            return
        with self._one_time.span("rehearsal"):
            found = search.fit_longer(strategy, batch, self._make_trial(strategy, batch, window, rest, own))
        if found is not None and self.found is not None:
            self.micro, self.found = found.size, replace(self.found, why=f"{self.found.why}; {found.why}")

    def _make_trial(self, strategy: Any, batch: Any, window: Any, rest: Sequence[Any], own: int) -> Trial:
        take = partial(cut, batch, window=window, whole_batches=self.groups is not None)
        return Trial(own, lambda size: take(size)[0], self._make_take_loss(strategy, rest), self.groups)

    def _make_take_loss(self, strategy: Any, rest: Sequence[Any]) -> TakeLoss:
        step = strategy.lightning_module.training_step
        return lambda batch, number: get_loss(step(batch, *self._number(rest, number)))

    def _split(self, strategy: Any, trainer: Any, batch: Any, rest: Sequence[Any]) -> list[Piece]:
        """Pieces of one of the user's batches; the batch itself where its gradient is not theirs."""
        self.apart = False
        whole = [Piece(batch, samples(batch) or 0, 1.0)]
        if self.refused is not None:
            self.steps, self.uncut = self.steps + 1, self.uncut + 1
            return whole
        pieces = self._cut(batch, trainer, None)
        if self._undecided and (len(pieces) > 1 or trainer.world_size > 1):
            self._undecided = False
            reason = self._weigh(strategy, trainer, batch, pieces, rest)
            self.refused = self.problem = self._agree(strategy, reason)
            if self.refused is not None:
                self.warn(f"{self.rung}: batches run whole: {self.refused}")
                self.changed, self.uncut, self.most = 0, self.uncut + 1, ()
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

    def _list_own(self, batch: Any, window: tuple[Sequence[int], int]) -> tuple[list[Piece], str | None]:
        """The user's batches of a window, and why they should not be merged. None of them where a hook changed the
        merged batch so that they cannot be told apart."""
        if (apart := self._find_apart(batch)) is not None:
            return [Piece(each, samples(each) or 0, 1 / window[1]) for each in apart[0]], apart[1]
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

    def _check_strict(self, reason: str, otherwise: str) -> None:
        if self.strict:
            do = f"turn rungs.{self.rung} off, or turn strict off to train {otherwise}"
            raise FastLoopError(got=f"{self.rung}.micro_batch={self.micro}", why=reason, do=do) from None

    def _cut(self, batch: Any, trainer: Any, window: tuple[Sequence[int], int] | None) -> list[Piece]:
        try:
            if window is None:
                self._check_size(batch, trainer)
            pieces = cut(batch, self.micro, window, whole_batches=self.groups is not None and window is not None)
        except CannotSplit as reason:
            self._check_strict(str(reason), "with whole batches")
            self.uncut, self.problem = self.uncut + 1, self.problem or str(reason)
            # A short last window keeps the weight accumulation would have given it.
            share = 1.0 if window is None else len(window[0]) / window[1]
            rows, sizes = samples(batch) or 0, window[0] if window else ()
            groups = len(sizes) if len(set(sizes)) == 1 and sum(sizes) == rows else 1
            pieces = [Piece(batch, sum(sizes) if window else rows, share, groups)]
        self.steps += 1
        self.changed += len(pieces) > 1 or (window is not None and len(window[0]) > 1)
        if len(pieces) > len(self.most):
            self.most = tuple(piece.samples for piece in pieces)
        return pieces

    def _take_window(self, trainer: Any, batch: Any) -> tuple[tuple[int, ...], int] | None:
        """Sizes of the loader batches in this batch; the same ones again where a closure runs its batch again."""
        if self.windows is None:
            return None
        if (number := trainer.fit_loop.total_batch_idx) != self._window_of:
            sizes = self.windows.sizes.popleft()
            self._came_apart = self._find_apart(batch)
            if self._joined is not None and self._joined[0] is not batch:
                self._joined = None
            if self._joined is not None:
                sizes = self._joined[1]
            elif len(sizes) == 1:  # a collate function may have dropped samples
                sizes = (samples(batch) or sizes[0],)
            self._window, self._window_of = (sizes, self.windows.window), number
        return self._window

    def _check_size(self, batch: Any, trainer: Any) -> None:
        """Refuse a batch whose first dimension is not its samples: a list of images [C, H, W] would be cut in C."""
        rows = samples(batch)
        if self.whole is None or rows is None:
            return
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._misfit or not (rows == self.whole[0] or (last and rows == self.whole[1])):
            self._misfit = True
            raise CannotSplit(f"the loader's batches have {self.whole[0]} samples, and the first tensor {rows} rows")


def _skip_exchange(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    block = getattr(strategy, "block_backward_sync", None)
    return block() if block is not None else contextlib.nullcontext()


def _run_backward(strategy: Any, trainer: Any, module: Any, loss: torch.Tensor) -> None:
    """One backward without Lightning's hooks around it: callbacks see one backward per batch, the last."""
    plugin = strategy.precision_plugin
    loss = loss / trainer.accumulate_grad_batches
    if (scaler := getattr(plugin, "scaler", None)) is not None:
        loss = scaler.scale(loss)
    with trainer.profiler.profile(f"{PIECE}backward"):
        plugin.backward(loss, module, trainer.optimizers[0])
