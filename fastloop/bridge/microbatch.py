"""Several forward and backward passes inside one call of training_step, as if they were one.

Lightning calls training_step, then zero_grad, then backward. All pieces but the last run forward and backward inside
training_step; their gradients are held aside while Lightning zeroes, and come back right before the last backward, so
that one exchange between ranks covers them all. batch_idx, global_step, schedules, hooks and the loss of the step are
what they were.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastloop.errors import FastLoopError
from fastloop.feeds.pieces import CannotSplit, Piece, cut, join, mean
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
        self.problem: str | None = None
        self.steps = 0
        self.last: tuple[int, ...] = ()
        self._held: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def evidence(self) -> Mapping[str, Any]:
        """Micro-batch sizes of the latest step, the loader batches merged into it, and what stood in the way."""
        return {"steps": self.steps, "micro_batches": list(self.last), "samples": sum(self.last),
                "merged_batches": self.windows.window if self.windows else 1, "problem": self.problem}  # fmt: skip

    def run(self, strategy: Any, trainer: Any, step: Callable[..., Any], batch: Any, rest: Sequence[Any]) -> Any:
        """Run one training_step over the pieces of `batch`; returns what it would have returned for the whole."""
        pieces = self._cut(batch)
        self.steps += 1
        self.last = tuple(piece.samples for piece in pieces)
        if len(pieces) == 1 and math.isclose(pieces[0].weight, 1):
            return step(batch, *rest)
        module = strategy.lightning_module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in parameters]
        outputs: list[Any] = []
        for parameter in parameters:
            parameter.grad = None
        with _averaged_logs(module, pieces, outputs):
            for piece in pieces[:-1]:
                with _no_exchange(strategy):
                    outputs.append(step(piece.batch, *rest))
                    if loss_of(outputs[-1]) is not None:
                        _backward(strategy, trainer, module, loss_of(outputs[-1]) * piece.weight)
            outputs.append(step(pieces[-1].batch, *rest))
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

    def _cut(self, batch: Any) -> list[Piece]:
        window = None
        if self.windows is not None:
            window = (self.windows.sizes.popleft(), self.windows.window)
        try:
            return cut(batch, self.micro, window)
        except CannotSplit as reason:
            if self.strict:
                raise FastLoopError(got=f"batch.micro_batch={self.micro}", why=str(reason),
                                    do="turn rungs.batch off, or strict to train with whole batches") from None  # fmt: skip
            self.problem = f"batches run whole: {reason}"
            # A short last window keeps the weight accumulation would have given it.
            share = 1.0 if window is None else len(window[0]) / window[1]
            return [Piece(batch, sum(window[0]) if window else 0, share)]


def loss_of(output: Any) -> Any:
    """The loss in what training_step returned: a tensor, the 'loss' of a mapping, or None."""
    return output.get("loss") if isinstance(output, Mapping) else output


def _step_loss(outputs: Sequence[Any], pieces: Sequence[Piece]) -> torch.Tensor:
    """The step's loss in value; in gradient only the last piece's share, for the others have had their backward."""
    last = loss_of(outputs[-1]) * pieces[-1].weight
    return sum((loss_of(output).detach() * piece.weight for output, piece in zip(outputs[:-1], pieces, strict=False)),
               start=last)  # type: ignore[no-any-return]  # fmt: skip


def _no_exchange(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    block = getattr(strategy, "block_backward_sync", None)
    return block() if block is not None else contextlib.nullcontext()


def _backward(strategy: Any, trainer: Any, module: Any, loss: torch.Tensor) -> None:
    """One backward without Lightning's hooks around it: callbacks see one backward per batch, the last."""
    plugin = strategy.precision_plugin
    loss = loss / trainer.accumulate_grad_batches
    if (scaler := getattr(plugin, "scaler", None)) is not None:
        loss = scaler.scale(loss)
    plugin.backward(loss, module, trainer.optimizers[0])


@contextlib.contextmanager
def _averaged_logs(module: Any, pieces: Sequence[Piece], outputs: Sequence[Any]) -> Iterator[None]:
    """Collect what training_step logs for each piece, and log it once for the whole batch.

    Without it Lightning would show the last piece's value as the step's.
    """
    calls: dict[str, list[tuple[Any, Piece]]] = defaultdict(list)
    options: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        calls[name].append((value, pieces[len(outputs)]))
        size = (options[name][1].get("batch_size") or 0) if name in options else 0
        if kwargs.get("batch_size") is not None:
            kwargs["batch_size"] += size
        options[name] = (args, kwargs)

    module.log = log
    try:
        yield
    finally:
        del module.log
    for name, logged in calls.items():
        args, kwargs = options[name]
        values, weights = [value for value, _ in logged], [piece for _, piece in logged]
        module.log(name, _combined(values, weights, kwargs.get("reduce_fx", "mean")), *args, **kwargs)


def _combined(values: Sequence[Any], pieces: Sequence[Piece], reduce: Any) -> Any:
    numbers = all(isinstance(value, (int, float, torch.Tensor)) for value in values)
    if len(values) == 1 or not numbers:  # a torchmetrics object has already seen every piece
        return values[-1]
    values = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
    if reduce in ("mean", torch.mean):
        return mean(values, pieces)
    if reduce in ("sum", torch.sum):
        return sum(values[1:], start=values[0])
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    by_name = {"max": torch.max, "min": torch.min}
    return by_name.get(reduce, reduce)(stacked)
