"""Cross-entropy over many classes, in two kernels: one reads the logits once, the other writes their gradient once.

PyTorch's version casts 16-bit logits to float32, keeps their log-softmax for the backward and writes float32 gradients
of the same size. Here the forward keeps one number per row, and the backward writes the gradient of the logits.

Source: https://arxiv.org/abs/2410.10989 (Liger Kernel).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fastloop.errors import describe

FEWEST_CLASSES = 8192
ROW_MULTIPLE = 64
"""In elements: matrix products are slow if the row length in memory is not a multiple of 16 bytes."""
MOST_ELEMENTS = 2**28
"""Most logits at once: without the kernels this bounds the temporary memory."""
NONE, MEAN = 0, 1
"""Reductions, numbered as in torch."""
CHECKED_ROWS = 64
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-10}
"""Largest relative deviation of the gradient of the first rows."""
WATCHED = 3
"""Backwards for which a copy of the logits is kept. If code changes them in place after the loss, which PyTorch's
version allows, that shows, and PyTorch's version runs from then on. A copy is half of what that one keeps."""


def find_large(model: torch.nn.Module) -> int:
    """Return the row count of the largest matrix among the parameters if it could be such a loss's classes; else 0."""
    known = (each for each in model.parameters() if not torch.nn.parameter.is_lazy(each))
    rows = max((each.shape[0] for each in known if each.dim() == 2), default=0)
    return rows if rows >= FEWEST_CLASSES else 0


class LargeCrossEntropy:
    """Replaces the function behind ``torch.nn.functional.cross_entropy``; calls with few classes go to the original.

    On the first call that has targets, loss and gradient of the first rows are checked against PyTorch's. After a
    deviation or an error, PyTorch's version runs from then on.

    Args:
        pads: pad the gradient's rows to a multiple of 64 elements in memory. Its shape does not change.

    Attributes:
        calls: calls that ran here; classes: of the last one; row: elements from one row of its gradient to the next.
        deviation: of the first call; failure: why this was turned off; passed: why a large call went to PyTorch.
        unchanged: backwards that found the logits as the loss had read them, of the first `WATCHED`.
    """

    def __init__(self, *, pads: bool) -> None:
        self.pads = pads
        self.calls = self.classes = self.row = self.unchanged = 0
        self.deviation: float | None = None
        self.failure = self.passed = ""

    @contextlib.contextmanager
    def put_in(self) -> Iterator[None]:
        """Inside the context, all ``cross_entropy`` calls come here, also through references imported earlier."""
        home: Any = torch._C._nn  # a function in torch.nn.functional could not be pickled while another has its name
        usual = home.cross_entropy_loss

        @functools.wraps(usual)
        def cross_entropy_loss(*args: Any, **kwargs: Any) -> Tensor:
            found = None
            if not is_compiling():  # otherwise it is part of a larger graph, which Inductor optimizes as a whole
                found = self._compute(usual, *args, **kwargs)
            return usual(*args, **kwargs) if found is None else found

        home.cross_entropy_loss = cross_entropy_loss
        try:
            yield
        finally:
            vars(cross_entropy_loss)["is_over"] = True  # concurrent fits may end in any order
            while getattr(home.cross_entropy_loss, "is_over", False):
                home.cross_entropy_loss = home.cross_entropy_loss.__wrapped__

    def _compute(
        self,
        usual: Callable[..., Tensor],
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = MEAN,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """Return the loss; None if the original should handle the call."""
        if self.failure or type(logits) is not Tensor or logits.dim() < 2 or logits.shape[1] < FEWEST_CLASSES:
            return None
        rows = logits.movedim(1, -1)  # back to [samples, tokens, classes], if the user transposed that
        plain = weight is None and label_smoothing == 0.0
        plain &= rows.is_contiguous() and target.shape == rows.shape[:-1] and target.dtype is torch.int64
        if not plain or logits.dtype not in CLOSE:
            self.passed = "it has class weights, label smoothing, targets that are not int64, or logits out of order"
            return None
        try:
            given = rows.flatten(0, -2), target.flatten().contiguous()
            losses: Tensor = _CrossEntropy.apply(*given, ignore_index, self, usual)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._fail(error)
            return None
        if self.failure:
            return None
        self.calls += 1
        self.classes = logits.shape[1]
        if reduction != NONE:
            losses = losses.sum() / (target != ignore_index).sum() if reduction == MEAN else losses.sum()
        else:
            losses = losses.view_as(target)
        return losses if torch.is_autocast_enabled(logits.device.type) else losses.to(logits.dtype)

    def run_forward(self, usual: Any, logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """Return losses [rows] and log-sum-exp [rows], in float32 or wider."""
        reduce, _ = find_kernels(logits)
        made = [reduce(*piece, ignore_index) for piece in _cut(logits, target)]
        losses, sums = (torch.cat(parts) for parts in zip(*made, strict=True))
        if self.deviation is None and len(few := _find_first(target, ignore_index)):
            expected = usual(logits[few].to(sums.dtype), target[few], None, NONE, ignore_index)
            self._compare(losses[few], expected, logits.dtype)
        return losses, sums

    def run_backward(
        self, usual: Any, logits: Tensor, target: Tensor, sums: Tensor, scale: Tensor, ignore_index: int
    ) -> Tensor:
        """Return the gradient [rows, classes] of the logits; `scale` [rows] is the gradient of the losses."""
        rows, classes = logits.shape
        width = -(-classes // ROW_MULTIPLE) * ROW_MULTIPLE if self.pads else classes
        gradient = logits.new_empty((rows, width))[:, :classes]

        def spread(write: Callable[..., None]) -> None:
            for piece in _cut(logits, target, sums, scale, gradient):
                write(*piece, ignore_index)

        try:
            spread(write_gradient if self.failure else find_kernels(logits)[1])
        except Exception as error:
            self._fail(error)
            spread(write_gradient)
        is_checked = bool(self.row or self.failure)
        if not is_checked and len(few := _find_first(target, ignore_index)):
            with torch.enable_grad():
                some = logits[few].detach().to(sums.dtype).requires_grad_()
                losses = usual(some, target[few], None, NONE, ignore_index)
                (expected,) = torch.autograd.grad(losses, [some], [scale[few].to(losses.dtype)])
            self._compare(gradient[few], expected, logits.dtype)
            is_checked = True
            if self.failure:
                spread(write_gradient)
        self.row = width if is_checked else 0
        return gradient

    def _compare(self, got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
        apart = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
        self.deviation = max(float(apart), self.deviation or 0.0)
        if not self.deviation <= CLOSE[dtype] and not self.failure:
            self.failure = f"the first rows deviate by {self.deviation:.2g} from PyTorch's own cross_entropy"

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or describe(error)


def _cut(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut the tensors along rows; the first is [rows, classes]."""
    rows = max(1, MOST_ELEMENTS // tensors[0].shape[1])
    yield from zip(*(torch.split(each, rows) for each in tensors), strict=True)


def _find_first(target: Tensor, ignore_index: int) -> Tensor:
    """Return the indices of the first rows that are not ignored."""
    return (target != ignore_index).nonzero().flatten()[:CHECKED_ROWS]


class _CrossEntropy(torch.autograd.Function):
    """Losses [rows] of logits [rows, classes] and targets [rows]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, owner: Any, usual: Any) -> Tensor:
        losses, sums = owner.run_forward(usual, logits, target, ignore_index)
        ctx.save_for_backward(logits)
        ctx.owner, ctx.usual, ctx.ignore_index, ctx.target, ctx.sums = owner, usual, ignore_index, target, sums
        if ctx.needs_input_grad[0]:
            ctx.seen, ctx.version = logits.detach(), logits._version
            ctx.copy = logits.detach().clone() if owner.unchanged < WATCHED else None
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        target, sums, owner = ctx.target, ctx.sums, ctx.owner
        if ctx.copy is not None and ctx.seen._version != ctx.version:
            logits, owner.failure = ctx.copy, owner.failure or "the logits are changed in place after the loss"
        else:
            (logits,) = ctx.saved_tensors
            owner.unchanged += 1
        if torch.is_grad_enabled():  # second derivatives need differentiable operations
            losses = ctx.usual(logits.to(sums.dtype), target, None, NONE, ctx.ignore_index)
            (gradient,) = torch.autograd.grad(losses, [logits], [scale.to(losses.dtype)], create_graph=True)
        else:
            gradient = owner.run_backward(ctx.usual, logits, target, sums, scale.contiguous(), ctx.ignore_index)
        return gradient, None, None, None, None


def find_kernels(logits: Tensor) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., None]]:
    """Return `reduce_rows` and `write_gradient`: Triton's kernels on a CUDA device, else those below."""
    if not logits.is_cuda or logits.dtype is torch.float64:
        return reduce_rows, write_gradient
    from fastloop.feeds.loss import kernels

    return kernels.reduce_rows, kernels.write_gradient


def reduce_rows(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return losses [rows], 0 for ignored targets, and log-sum-exp [rows], in float32 or wider."""
    kept = target != ignore_index
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sums = torch.logsumexp(wide, dim=1)
    chosen = logits.gather(1, torch.where(kept, target, 0).unsqueeze(1)).squeeze(1).to(wide.dtype)
    return torch.where(kept, sums - chosen, 0.0), sums


def write_gradient(
    logits: Tensor, target: Tensor, sums: Tensor, scale: Tensor, gradient: Tensor, ignore_index: int
) -> None:
    """Write (softmax - one-hot) * scale of the row into `gradient`, whose rows may be padded."""
    places = torch.arange(logits.shape[1], device=logits.device)
    weights = torch.exp(logits.to(sums.dtype) - sums.unsqueeze(1))
    weights = weights - (places == target.unsqueeze(1)).to(sums.dtype)
    kept = torch.where(target != ignore_index, scale, 0.0)
    gradient.copy_(weights * kept.unsqueeze(1))
