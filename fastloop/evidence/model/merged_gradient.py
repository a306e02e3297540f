"""Whether the gradient of several merged batches is the weighted sum of their gradients.

It is if the loss is a mean over samples. Two numbers distinguish other losses from rounding. A loss with other weights
(tokens, classes) moves the gradient *along* the gradients of the batches; rounding scatters it into all its thousands
of directions, hardly any of them along those few. So the first number can have a small limit in any precision, and only
the second, the whole *distance*, must leave room for the precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastloop.evidence.model.gradient_distance import view_as_real

SAMPLED = 2**16
"""Elements of a gradient that are compared, spread evenly over all parameters."""
MOST_ALONG, IN_DOUBT = 5e-3, 1.5e-3
"""Shares of the gradient's norm. Token means over sentences of 28 to 32 tokens are off by 8e-3, of 16 to 32 by 1e-1.
Rounding to bfloat16 leaves up to 3e-4 there on a CPU, and left 6e-3 on an H200 once. So above `IN_DOUBT` the gradients
are computed once more in float32, where this is the limit; where that is not possible, it is `MOST_ALONG`."""
MOST_APART = {"fp64": 1e-3, "fp32": 1e-3, "tf32": 3e-2, "bf16": 0.1, "fp16": 0.1}
"""Share of the gradient's norm, by the coarsest arithmetic in use. Sums in another order are off by 1e-6 in float32,
and flip ReLUs near zero; a limit above 0.1 would test nothing."""


class Difference(NamedTuple):
    """Difference between a merged gradient and the expected sum, relative to that sum."""

    apart: float
    along: float
    """The part of it that lies in the span of the batches' gradients."""


def sample_gradient(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Some elements of a loss's gradient, always the same ones, [n] on the host. Leaves ``.grad`` alone.

    Raises:
        RuntimeError: the loss does not depend on parameters in a way that `torch.autograd.grad` can follow.
    """
    found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    stride = max(1, -(-sum(parameter.numel() for parameter in parameters) // SAMPLED))
    parts = []
    for parameter, gradient in zip(parameters, found, strict=True):
        dense = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
        sampled = view_as_real(dense.detach().reshape(-1)[::stride])
        parts.append(sampled.reshape(-1).to("cpu", torch.float64))
    return torch.cat(parts)


def measure_difference(
    own: Sequence[torch.Tensor], weights: Sequence[float], merged: torch.Tensor
) -> Difference | None:
    """How far a merged gradient [n] is from the weighted sum of `own` gradients [n]; None if they are not finite.

    Infinite if that sum is zero and the merged gradient is not.
    """
    basis = torch.stack(list(own))
    target = basis.T @ torch.tensor(weights, dtype=basis.dtype)
    difference, norm = merged - target, float(target.norm())
    if not (bool(torch.isfinite(basis).all()) and bool(torch.isfinite(merged).all())):
        return None
    if norm == 0:
        apart = float("inf") if float(merged.norm()) else 0.0
        return Difference(apart, apart)
    # gelsd: similar batches have similar gradients.
    mix = torch.linalg.lstsq(basis.T, difference[:, None], driver="gelsd").solution
    return Difference(float(difference.norm()) / norm, float((basis.T @ mix).norm()) / norm)
