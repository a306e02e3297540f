"""Tokens per sample of a language model's batches: all of them, and those that are no padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastloop.feeds.tree import tensors

MOST = 256
"""Batches looked at: a ring of sums that stay on their device until the end."""


class Tokens:
    """Looks at batches of integer tensors [samples, length]. Adds no synchronisation."""

    def __init__(self) -> None:
        self._rows = self._all = 0
        self._real: list[torch.Tensor] = []
        self._masked = 0

    def add(self, batch: Any) -> None:
        """One batch; nothing where it holds no integer tensor [samples, length]."""
        ids = _ids(batch)
        if ids is None or (self._rows and len(self._real) >= MOST):
            return
        self._rows += ids.shape[0]
        self._all += ids.numel()
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            self._real.append(mask.detach().ne(0).sum())
            self._masked += ids.numel()

    def per_sample(self) -> tuple[float | None, float | None]:
        """Tokens per sample, and those that an attention mask does not hide (one synchronisation); None = not known."""
        if not self._rows:
            return None, None
        every = self._all / self._rows
        if not self._masked:
            return every, None
        real = sum(float(count) for count in self._real)
        return every, every * real / self._masked


def _ids(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        found = batch["input_ids"]
        return found if found.ndim == 2 else None
    first = next(tensors(batch), None)
    long = first is not None and first.ndim == 2 and first.dtype in (torch.int64, torch.int32, torch.int16)
    return first if long else None
