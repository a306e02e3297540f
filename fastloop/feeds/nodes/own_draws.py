"""A random generator for each batch: torch has one for all threads, and which thread draws which would be chance.

Each batch draws from a generator seeded by the loader's seed and the batch's number, as each worker process has one by
its number. The training's own stream is not touched. Only torch's functions are seen; Python's and NumPy's are not.
Source: torch/overrides.py, TorchFunctionMode; its stack is the thread's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWING = frozenset(
    {"rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "poisson"}
    | {"uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "geometric_", "cauchy_"}
)
"""torch's functions and methods that draw from the generator that they are given."""


class OwnDraws(TorchFunctionMode):
    """Inside it, what this thread draws on the CPU comes from one generator, unless another one is named."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, with the generator where it draws."""
        given = dict(kwargs or {})
        if (
            getattr(func, "__name__", "") in _DRAWING
            and given.get("generator") is None
            and not _is_elsewhere(args, given)
        ):
            given["generator"] = self._generator
        return func(*args, **given)


def _is_elsewhere(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether what is drawn lies on another device, which has a generator of its own."""
    device = kwargs.get("device")
    return (device is not None and torch.device(device).type != "cpu") or any(
        isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in args
    )


def draw_own(seed: int | None, make: Callable[[], Any]) -> Any:
    """What `make` gives, drawn from a generator of this seed; None: as it is."""
    if seed is None:
        return make()
    with OwnDraws(seed):
        return make()
