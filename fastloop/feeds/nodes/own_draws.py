"""A separate random generator for each batch: threads share torch's default one, so their draws would depend on timing.

Each batch draws from a generator seeded with the loader's seed plus the batch's number, just as each worker process has
one seeded with its number. The training's random stream is not touched. Only torch's functions are intercepted, not
Python's or NumPy's.
Source: torch/overrides.py, TorchFunctionMode; its stack is thread-local.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWING = frozenset(
    {"rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "poisson"}
    | {"uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "geometric_", "cauchy_"}
)
"""torch's functions and methods that take a generator and draw from it."""


class OwnDraws(TorchFunctionMode):
    """Inside the context, this thread's draws on the CPU use one generator, unless a call names another one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, with the generator if it draws random numbers."""
        given = dict(kwargs or {})
        draws = getattr(func, "__name__", "") in _DRAWING and given.get("generator") is None
        if draws and not _is_elsewhere(args, given):
            given["generator"] = self._generator
        return func(*args, **given)


def _is_elsewhere(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the draw happens on another device, which has a separate generator."""
    device = kwargs.get("device")
    return (device is not None and torch.device(device).type != "cpu") or any(
        isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in args
    )
