"""What we do around one training step besides computing it: inputs change their layout, the dtype is noted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fastloop.evidence.dtype import product_dtype
from fastloop.feeds.tree import map_tensors


class ChannelsLast:
    """Brings image batches [N, C, H, W] into channels-last order, and counts them."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, batch: Any) -> Any:
        """The batch with its 4-D floating tensors in channels-last order; the same object where it has none."""
        found = False

        def change(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            if tensor.dim() != 4 or not tensor.is_floating_point():
                return tensor
            found = True
            return tensor.contiguous(memory_format=torch.channels_last)

        changed = map_tensors(batch, change)
        self.batches += found
        return changed if found else batch

    def evidence(self) -> Mapping[str, Any]:
        return {"converted_batches": self.batches}


class DtypeSpy:
    """Notes the dtype a matrix product has inside the user's training_step, at its first call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype: str | None = None

    def around(self, module: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, which leads to ``module.training_step``, with the note taken inside the latter."""
        original = module.training_step

        def spied(*args: Any, **kwargs: Any) -> Any:
            self.dtype = product_dtype(self.device)
            return original(*args, **kwargs)

        def once(*args: Any, **kwargs: Any) -> Any:
            with attribute(module, "training_step", spied):
                return step(*args, **kwargs)

        return step if self.dtype is not None else once

    def evidence(self) -> Mapping[str, Any]:
        return {"dtype": self.dtype}


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute for a moment, and leave the instance as it was."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
