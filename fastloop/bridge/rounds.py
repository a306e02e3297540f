"""One and the same optimizer step, made several times from slightly different beginnings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastloop.bridge import repeatable, snapshot

ROUNDING = {"fp32": 2.0**-20, "tf32": 2.0**-11, "bf16": 2.0**-8}
"""Relative errors of weights that stand for a precision's. A float32 sum of some hundred products is off by more than
one rounding; the others add up in float32."""


@dataclass(frozen=True)
class Start:
    """Where a round begins."""

    name: str
    seed: int = 0
    error: float = 0.0
    """Relative, of every parameter."""

    def set(self, module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        """Bring parameters, buffers and random streams there."""
        repeatable.seed(self.seed)
        parameters = {snapshot.plain(name) for name, _ in module.named_parameters()}
        with torch.no_grad():
            for name, tensor in snapshot.named(module):
                own = weights.get(name)
                if own is not None and self.error and name in parameters and own.is_floating_point():
                    own = own * (1 + self.error * torch.randn_like(own))
                if own is not None:
                    tensor.copy_(own)
        repeatable.seed(self.seed)


TWICE = (Start("first"), Start("again"))
STARTS = (*TWICE, Start("random", seed=1), *(Start(name, error=error) for name, error in ROUNDING.items()))


@dataclass
class Round:
    """What came of one."""

    start: Start = TWICE[0]
    batches: int = 0
    begins: int = 0
    """batch_idx of its first batch."""
    loss: float | None = None
    gradient: dict[str, Any] = field(default_factory=dict)
    clipped: dict[str, Any] = field(default_factory=dict)
