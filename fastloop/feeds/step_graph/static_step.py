"""One training step on tensors at fixed addresses, with its forward and its backward recorded.

There are two recordings because other code runs between them: gradients are zeroed, and hooks are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastloop.feeds.batch_tree import is_container, iterate_tensors, list_members, map_tensors
from fastloop.feeds.call_shapes import Replays
from fastloop.feeds.step_graph.recording import CudaRecorder

_CONSTANTS = (type(None), bool, int, float, str, bytes, torch.dtype)


Gradients = Sequence[tuple[torch.nn.Parameter, torch.Tensor]]
"""Parameters, and the tensors that hold their gradients."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Outputs of one forward."""

    loss: torch.Tensor
    made: Sequence[torch.Tensor]
    """All tensors that leave the step, always in the same order."""


class StaticStep:
    """A step that is recorded once and replayed for each batch with the same key.

    Args:
        run: the forward on a batch.
        batch: an example; all others must have the same shapes, types and plain values.
        parameters: their gradients are written by the backward.
    """

    def __init__(self, run: Callable[[Any], Ran], batch: Any, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.key = read_key(batch)
        self.made: Sequence[torch.Tensor] = ()
        """Outputs of the last replayed forward."""
        self._run, self._parameters = run, parameters
        self._inputs = map_tensors(batch, lambda tensor: torch.empty_like(tensor).copy_(tensor))
        self._fields = list(iterate_tensors(self._inputs))
        self._loss: torch.Tensor | None = None
        self.gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """The parameters with gradients, and the tensors that a replayed backward writes these to."""
        self._slots: list[torch.Tensor] = []
        """The memory that a replayed backward writes to. Other code has no access to these tensors, so it cannot give
        them another tensor's memory."""
        self._forward: Callable[[], None] = lambda: None
        self._backward: Callable[[], None] = lambda: None

    def play(self, batch: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Run the step without recording; return copies of its outputs, and the gradients by name. Restores the
        parameters' previous gradients."""
        self.fill(batch)
        with gradients_aside(self._parameters.values()):
            made = [tensor.clone() for tensor in self._run_forward()]
            self._run_backward()
            found = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
        return made, found

    def record(self, recorder: CudaRecorder) -> None:
        """Record forward and backward on the batch that `fill` copied last.

        Raises:
            Exception: whatever the device or the step raises if it cannot be recorded.
        """
        slots = {each: torch.empty_like(each) for each in self._parameters.values()}

        def run_backward() -> Sequence[torch.Tensor]:
            """Copy the gradients out of the recordings' memory: the next forward writes its activations there."""
            made = self._run_backward()
            written = [slot for parameter, slot in slots.items() if parameter.grad is not None]
            torch._foreach_copy_(written, made)
            return written

        with gradients_aside(self._parameters.values()):
            self.made, self._forward = recorder.record(self._run_forward)
            written, self._backward = recorder.record(run_backward)
        self._slots = [each.detach() for each in written]
        known = {id(each) for each in written}
        self.gradients = [(parameter, slot) for parameter, slot in slots.items() if id(slot) in known]
        self._loss = None

    def replay(self, batch: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Like `play`, but replay the recordings."""
        self.forward(batch)
        made = [tensor.clone() for tensor in self.made]
        with gradients_aside(self._parameters.values()):
            for parameter in self._parameters.values():
                parameter.grad = None
            self._replay_backward()
            named = self._parameters.items()
            return made, {name: each.grad.clone() for name, each in named if each.grad is not None}

    def forward(self, batch: Any) -> None:
        """Replay the forward on this batch, which overwrites `made`."""
        self.fill(batch)
        self._forward()
        Replays.count += 1

    def backward(self) -> None:
        """Replay the backward of the last forward, add its gradients to the parameters' gradients, and call the hooks
        on them: a replay does not."""
        self._replay_backward()
        for parameter, _ in self.gradients:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)

    def _replay_backward(self) -> None:
        for place, (parameter, gradient) in enumerate(self.gradients):
            if gradient.data_ptr() != self._slots[place].data_ptr():  # somebody wrote `grad.data = ...`
                self.gradients[place] = parameter, self._slots[place].detach()
        kept = [(each, own, static) for each, static in self.gradients if (own := each.grad) is not None]
        sums = _copy_away([own for _, own, _ in kept], {id(static) for _, _, static in kept})
        self._backward()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        if kept:
            torch._foreach_add_(sums, [static for _, _, static in kept])
            for (parameter, _, _), gradient in zip(kept, sums, strict=True):
                parameter.grad = gradient

    def fill(self, batch: Any) -> None:
        """Copy a batch into the step's input tensors."""
        with torch.no_grad():
            for field, tensor in zip(self._fields, iterate_tensors(batch), strict=True):
                field.copy_(tensor, non_blocking=True)

    def let_go(self) -> None:
        """Replace the parameters' gradients by copies that the graphs do not write to."""
        for parameter, gradient in self.gradients:
            if parameter.grad is gradient:
                parameter.grad = gradient.clone()
        self.gradients = []

    def _run_forward(self) -> list[torch.Tensor]:
        ran = self._run(self._inputs)
        self._loss = ran.loss
        return [tensor.detach() for tensor in ran.made]

    def _run_backward(self) -> list[torch.Tensor]:
        """Run the backward of the last forward. This frees the autograd graph of a recorded forward, whose nodes hold
        the stream that they were recorded on."""
        for parameter in self._parameters.values():
            parameter.grad = None
        assert self._loss is not None
        loss, self._loss = self._loss, None
        with _hooks_aside(self._parameters.values()):  # these gradients belong to no step
            loss.backward()  # type: ignore[no-untyped-call]
        return [each.grad for each in self._parameters.values() if each.grad is not None]


def _copy_away(gradients: list[torch.Tensor], static: set[int]) -> list[torch.Tensor]:
    """Return the gradients, with copies of those that a replay overwrites."""
    own = [torch.empty_like(each) if id(each) in static else each for each in gradients]
    pairs = [(copy, each) for copy, each in zip(own, gradients, strict=True) if copy is not each]
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [each for _, each in pairs])
    return own


@contextlib.contextmanager
def gradients_aside(parameters: Any) -> Iterator[None]:
    """Restore the parameters' gradients on exit."""
    before = [(each, each.grad) for each in parameters]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextlib.contextmanager
def _hooks_aside(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Inside the context, the parameters have no hooks on their gradients."""
    hooked = [(hooks, dict(hooks)) for each in parameters if (hooks := each._post_accumulate_grad_hooks)]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)


def read_key(batch: Any) -> Any:
    """Return a key that is equal for batches that can share a recording: same containers, shapes, dtypes, devices and
    plain values. The key of a batch with other kinds of objects equals no other key."""
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.dtype, batch.device
    if isinstance(batch, _CONSTANTS):
        return type(batch), batch
    if not is_container(batch):
        return object()
    if isinstance(batch, Mapping):
        return type(batch), *((name, read_key(value)) for name, value in batch.items())
    return type(batch), *map(read_key, list_members(batch))
