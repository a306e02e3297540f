"""Several forward and backward passes inside one call of training_step, as if they were one.

Lightning calls training_step, then zero_grad, then backward. All pieces but the last run forward and backward inside
training_step; their gradients are held aside while Lightning zeroes, and come back right before the last backward, so
that one exchange between ranks covers them all. batch_idx, global_step, schedules, hooks and the loss of the step are
what they were.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fastloop.bridge.marks import PIECE
from fastloop.bridge.piecelogs import PieceLogs
from fastloop.bridge.step import attribute
from fastloop.errors import FastLoopError
from fastloop.feeds.pieces import CannotSplit, Piece, cut, join
from fastloop.feeds.tree import samples
from fastloop.feeds.windows import WindowSampler


class MicroBatches:
    """Cuts each train batch and runs the pieces.

    Args:
        micro: samples per piece.
        strict: a batch that cannot be cut is an error, raised before anything is computed from it.
    """

    def __init__(self, micro: int, *, strict: bool = False) -> None:
        self.micro, self.strict = micro, strict
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

    def evidence(self) -> Mapping[str, Any]:
        """Batches, how many of them ran in other pieces than the loader's own and how many could not be cut, and why;
        the sizes of the most pieces one of them ran in; the loader batches merged into one."""
        return {"steps": self.steps, "changed_steps": self.changed, "uncut_steps": self.uncut, "problem": self.problem,
                "micro_batches": list(self.most), "samples": sum(self.most),
                "merged_batches": self.windows.window if self.windows else 1}  # fmt: skip

    def run(self, strategy: Any, trainer: Any, step: Callable[..., Any], batch: Any, rest: Sequence[Any]) -> Any:
        """Run one training_step over the pieces of `batch`; returns what it would have returned for the whole."""
        pieces = self._cut(batch, trainer)
        if len(pieces) == 1 and math.isclose(pieces[0].weight, 1):
            return step(batch, *rest)
        module = strategy.lightning_module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        outputs: list[Any] = []
        logs = PieceLogs(module, pieces)
        with attribute(module, "log", logs.take):
            for piece in pieces:
                logs.piece = piece
                if piece is pieces[-1]:
                    outputs.append(step(piece.batch, *rest))
                    break
                with _no_exchange(strategy):
                    outputs.append(step(piece.batch, *rest))
                    if (loss := loss_of(outputs[-1])) is not None:
                        _backward(strategy, trainer, module, loss * piece.weight)
        logs.flush()
        held = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        if any(loss_of(output) is None for output in outputs):
            return None  # the user skips this batch; Lightning then runs no backward
        self._held = [(parameter, gradient) for parameter, gradient in zip(parameters, held, strict=True)
                      if gradient is not None]  # fmt: skip
        return join(outputs, pieces, _step_loss(outputs, pieces))

    def before_backward(self) -> None:
        """Put the held gradients back, to be added to by the last piece's backward."""
        for parameter, gradient in self._held:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held = []

    def _cut(self, batch: Any, trainer: Any) -> list[Piece]:
        window = self._next_window(trainer)
        try:
            if window is None:
                self._check_size(batch, trainer)
            pieces = cut(batch, self.micro, window)
        except CannotSplit as reason:
            if self.strict:
                do = "turn rungs.batch off, or strict to train with whole batches"
                raise FastLoopError(got=f"batch.micro_batch={self.micro}", why=str(reason), do=do) from None
            self.uncut, self.problem = self.uncut + 1, self.problem or str(reason)
            # A short last window keeps the weight accumulation would have given it.
            share = 1.0 if window is None else len(window[0]) / window[1]
            pieces = [Piece(batch, sum(window[0]) if window else samples(batch) or 0, share)]
        merged = len(window[0]) if window else 1
        self.steps += 1
        self.changed += len(pieces) > 1 or merged > 1
        if len(pieces) > len(self.most):
            self.most = tuple(piece.samples for piece in pieces)
        return pieces

    def _next_window(self, trainer: Any) -> tuple[tuple[int, ...], int] | None:
        """Sizes of the loader batches in this batch; the same ones again where a closure runs its batch again."""
        if self.windows is None:
            return None
        if (number := trainer.fit_loop.total_batch_idx) != self._window_of:
            self._window, self._window_of = (self.windows.sizes.popleft(), self.windows.window), number
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


def loss_of(output: Any) -> Any:
    """The loss in what training_step returned: a tensor, the 'loss' of a mapping, or None."""
    return output.get("loss") if isinstance(output, Mapping) else output


def _step_loss(outputs: Sequence[Any], pieces: Sequence[Piece]) -> torch.Tensor:
    """The step's loss in value; in gradient only the last piece's share, for the others have had their backward."""
    loss: torch.Tensor = loss_of(outputs[-1]) * pieces[-1].weight
    for output, piece in zip(outputs[:-1], pieces, strict=False):
        loss = loss + loss_of(output).detach() * piece.weight
    return loss


def _no_exchange(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    block = getattr(strategy, "block_backward_sync", None)
    return block() if block is not None else contextlib.nullcontext()


def _backward(strategy: Any, trainer: Any, module: Any, loss: torch.Tensor) -> None:
    """One backward without Lightning's hooks around it: callbacks see one backward per batch, the last."""
    plugin = strategy.precision_plugin
    loss = loss / trainer.accumulate_grad_batches
    if (scaler := getattr(plugin, "scaler", None)) is not None:
        loss = scaler.scale(loss)
    with trainer.profiler.profile(f"{PIECE}backward"):
        plugin.backward(loss, module, trainer.optimizers[0])
