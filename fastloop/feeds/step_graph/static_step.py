"""One training step on tensors that stay where they are: its forward recorded, and its backward.

Two recordings and not one, because things happen between them that see and change what is there: gradients are zeroed,
and hooks are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastloop.feeds.batch_tree import is_container, map_tensors, tensors
from fastloop.feeds.step_graph.recording import CudaRecorder

_CONSTANTS = (type(None), bool, int, float, str, bytes, torch.dtype)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one forward made."""

    loss: torch.Tensor
    made: Sequence[torch.Tensor]
    """All tensors that leave the step; the same ones in the same order each time."""


class StaticStep:
    """A step that is recorded once and replayed for each batch that is alike.

    Args:
        run: the forward, on a batch.
        batch: whose shapes, types and other values all others must have.
        parameters: whose gradients the backward writes.
    """

    def __init__(self, run: Callable[[Any], Ran], batch: Any, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.key = read_key(batch)
        self.made: Sequence[torch.Tensor] = ()
        """What the step made of the batch that was replayed last."""
        self._run, self._parameters = run, parameters
        self._inputs = map_tensors(batch, lambda tensor: torch.empty_like(tensor).copy_(tensor))
        self._slots = list(tensors(self._inputs))
        self._loss: torch.Tensor | None = None
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._forward: Callable[[], None] = lambda: None
        self._backward: Callable[[], None] = lambda: None

    def play(self, batch: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Run the step as it is, unrecorded: copies of what it made, and of the gradients by name. Gradients of the
        parameters are afterwards what they were."""
        self.fill(batch)
        with gradients_aside(self._parameters.values()):
            made = [tensor.clone() for tensor in self._run_forward()]
            self._run_backward()
            found = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
        return made, found

    def record(self, recorder: CudaRecorder) -> None:
        """Record forward and backward, on the batch at hand.

        Raises:
            Exception: whatever the device, or the step, raises where it cannot be recorded.
        """
        with gradients_aside(self._parameters.values()):
            self.made, self._forward = recorder.record(self._run_forward)
            written, self._backward = recorder.record(self._run_backward)
            owners = [each for each in self._parameters.values() if each.grad is not None]
        self._gradients = list(zip(owners, written, strict=True))
        self._loss = None

    def replay(self, batch: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """As `play`, of what was recorded."""
        self.forward(batch)
        made = [tensor.clone() for tensor in self.made]
        with gradients_aside(self._parameters.values()):
            for parameter in self._parameters.values():
                parameter.grad = None
            self.backward()
            named = self._parameters.items()
            return made, {name: each.grad.clone() for name, each in named if each.grad is not None}

    def forward(self, batch: Any) -> None:
        """Replay the forward on this batch: `made` is new."""
        self.fill(batch)
        self._forward()

    def backward(self) -> None:
        """Replay the backward of the last forward, and add its gradients to those that the parameters have."""
        kept = [(each, own, static) for each, static in self._gradients if (own := each.grad) is not None]
        sums = _copy_away([own for _, own, _ in kept], {id(static) for _, _, static in kept})
        self._backward()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if kept:
            torch._foreach_add_(sums, [static for _, _, static in kept])
            for (parameter, _, _), gradient in zip(kept, sums, strict=True):
                parameter.grad = gradient

    def fill(self, batch: Any) -> None:
        """Copy a batch to where the step reads it."""
        with torch.no_grad():
            for slot, tensor in zip(self._slots, tensors(batch), strict=True):
                slot.copy_(tensor, non_blocking=True)

    def let_go(self) -> None:
        """Leave the parameters gradients of their own."""
        for parameter, gradient in self._gradients:
            if parameter.grad is gradient:
                parameter.grad = gradient.clone()
        self._gradients = []

    def _run_forward(self) -> list[torch.Tensor]:
        ran = self._run(self._inputs)
        self._loss = ran.loss
        return [tensor.detach() for tensor in ran.made]

    def _run_backward(self) -> list[torch.Tensor]:
        """Of the last forward: the graph of a recorded one is gone afterwards, and with it what its nodes know of the
        stream they were recorded on."""
        for parameter in self._parameters.values():
            parameter.grad = None
        assert self._loss is not None
        loss, self._loss = self._loss, None
        loss.backward()  # type: ignore[no-untyped-call]
        return [each.grad for each in self._parameters.values() if each.grad is not None]


def _copy_away(gradients: list[torch.Tensor], static: set[int]) -> list[torch.Tensor]:
    """The same gradients, those that a replay writes to as copies."""
    own = [torch.empty_like(each) if id(each) in static else each for each in gradients]
    pairs = [(copy, each) for copy, each in zip(own, gradients, strict=True) if copy is not each]
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [each for _, each in pairs])
    return own


@contextlib.contextmanager
def gradients_aside(parameters: Any) -> Iterator[None]:
    """Parameters have their own gradients again afterwards."""
    before = [(each, each.grad) for each in parameters]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def read_key(batch: Any) -> Any:
    """What batches must have in common to be replayed alike: containers, shapes, types, devices, and plain values.
    That of a batch with objects of other kinds is like no other's."""
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.dtype, batch.device
    if isinstance(batch, _CONSTANTS):
        return type(batch), batch
    if not is_container(batch):
        return object()
    if isinstance(batch, Mapping):
        return type(batch), *((name, read_key(value)) for name, value in batch.items())
    members = batch if isinstance(batch, (list, tuple)) else vars(batch).values()
    return type(batch), *(read_key(member) for member in members)
