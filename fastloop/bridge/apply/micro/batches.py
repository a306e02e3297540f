"""Runs several forward and backward passes inside one call of training_step, as if they were one.

Lightning calls training_step, then zero_grad, then backward. All pieces but the last run forward and backward inside
training_step; their gradients are set aside while Lightning zeroes gradients, and put back right before the last
backward, so that one exchange between ranks covers them all. batch_idx, global_step, schedules, hooks and the step's
loss do not change.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastloop.bridge.apply.micro.choice import PieceChoice
from fastloop.bridge.apply.micro.piece_logs import PieceLogs
from fastloop.bridge.apply.site import LiveSite
from fastloop.bridge.attributes import attribute
from fastloop.bridge.watch.phases import PIECE
from fastloop.feeds.batch_tree import BatchWindow
from fastloop.feeds.splitting import Piece, get_loss, join, sum_losses


class MicroBatches:
    """Runs each train batch in the pieces into which `choice` cuts it."""

    def __init__(self, choice: PieceChoice) -> None:
        self.choice, self.windows, self._groups, self._site = choice, choice.windows, choice.groups, choice.site
        self.apart = False
        """Whether the current batch runs as the user's own batches of its window."""
        self._held: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def show_window(self, batches: BatchWindow) -> Any:
        """The batch that Lightning gets for a window of separate batches; see `MergedWindows`."""
        return self.windows.show(batches, self.choice.refused)

    def run(self, step: Callable[..., Any], whole: Callable[..., Any], batch: Any, rest: Sequence[Any]) -> Any:
        """Run one training_step over the pieces of `batch`; returns what it would have returned for the whole.

        Args:
            whole: replaces `step` for a batch that runs in one piece.
            rest: the arguments after the batch.
        """
        pieces, self.apart = self.choice.choose(batch, rest)
        self._begin(pieces[0])
        if len(pieces) == 1 and math.isclose(pieces[0].weight, 1):
            output = whole(pieces[0].batch, *rest)
            if get_loss(output) is None:
                self._skip(batch)
            return output
        module, weighing = self._site.module, self.choice.weighing
        parameters = list(module.parameters())  # a step may unfreeze parameters
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        outputs: list[Any] = []
        logs = PieceLogs(module, pieces, () if weighing is None else weighing.names)
        with attribute(module, "log", logs.take):
            for place, piece in enumerate(pieces):
                logs.piece = piece
                self._begin(piece)
                more = self.windows.renumber(rest, place) if self.apart else rest
                if piece is pieces[-1]:
                    outputs.append(step(piece.batch, *more))
                    break
                with _skip_exchange(self._site.strategy):
                    outputs.append(step(piece.batch, *more))
                    if (loss := get_loss(outputs[-1])) is not None:
                        _run_backward(self._site, piece.weigh(loss))
        held = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        skipped = [get_loss(output) is None for output in outputs]
        if any(skipped) and self.windows.sampler is None and self._site.trainer.world_size == 1:
            return self._run_whole(step, batch, rest)
        logs.flush(hides_rows=self.windows.find_apart(batch) is not None)
        if all(skipped) or (any(skipped) and not self.apart):
            self._skip(batch)
            return None  # the user skips this batch; Lightning then runs no backward
        self._held = [
            (parameter, gradient) for parameter, gradient in zip(parameters, held, strict=True) if gradient is not None
        ]
        loss = sum_losses(outputs, pieces)
        kept = [place for place, skip in enumerate(skipped) if not skip]
        return join([outputs[place] for place in kept], [pieces[place] for place in kept], loss)

    def before_backward(self) -> None:
        """Put the held gradients back, so that the last piece's backward adds to them."""
        for parameter, gradient in self._held:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held = []

    def after_backward(self) -> None:
        """From now on, a call of a module contains one batch again. Not earlier: activation checkpointing may still
        call modules during the backward."""
        if self._groups is not None:
            self._groups.begin(1)

    def _run_whole(self, step: Callable[..., Any], batch: Any, rest: Sequence[Any]) -> Any:
        """Run the user's batch in one piece: a piece without a loss does not say whether the batch has one."""
        self.choice.note_no_loss()
        output = step(batch, *rest)
        if get_loss(output) is None:
            self._skip(batch)
        return output

    def _skip(self, batch: Any) -> None:
        """The user's step returned no loss, so there is no backward."""
        self.after_backward()
        if not self.apart:
            self.choice.stop_merging(batch)

    def _begin(self, piece: Piece) -> None:
        if self._groups is not None:
            self._groups.begin(piece.groups)


def _skip_exchange(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    block = getattr(strategy, "block_backward_sync", None)
    return block() if block is not None else contextlib.nullcontext()


def _run_backward(site: LiveSite, loss: torch.Tensor) -> None:
    """Run a backward without Lightning's hooks around it: callbacks see only one backward per batch, the last."""
    plugin, trainer = site.strategy.precision_plugin, site.trainer
    loss = loss / trainer.accumulate_grad_batches
    if (scaler := getattr(plugin, "scaler", None)) is not None:
        loss = scaler.scale(loss)
    with trainer.profiler.profile(f"{PIECE}backward"):
        plugin.backward(loss, site.module, trainer.optimizers[0])
