"""Puts back what a tensor holds, and with it the number by which autograd notices writes."""

from __future__ import annotations

from collections.abc import Callable

import torch


def keep_contents(tensor: torch.Tensor) -> Callable[[], None]:
    """Copy a tensor; returns a function that writes the copy back.

    It writes even if the tensor's version has not changed, because batch normalization writes its running statistics
    without changing it. The version is that of before: else autograd refuses views that a metric made of the model's
    outputs and keeps in a list, and graphs that the model keeps.
    """
    memory = tensor.detach()
    copied, preserve = memory.clone(), getattr(torch.autograd.grad_mode, "_unsafe_preserve_version_counter", None)
    version = None if preserve is None or tensor.is_inference() else preserve(memory)

    def put_back() -> None:
        memory.copy_(copied)
        if version is not None:
            version.__exit__(None, None, None)

    return put_back
