"""Tokens per sample of a language model's batches: all tokens, and those that are not padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastloop.feeds.batch_tree import iterate_tensors

MOST = 256
"""Most batches that are counted; their sums stay on the device until the end."""
SHORTEST = 8
"""Fewer integers per sample are categories, such as a user and an item, unless the batch says that they are tokens."""


class Tokens:
    """Counts the tokens in batches of integer tensors [samples, length]. Adds no synchronization."""

    def __init__(self) -> None:
        self._rows = self._all = 0
        self._real: list[torch.Tensor] = []
        self._masked = 0

    def add(self, batch: Any) -> None:
        """Count a batch; does nothing if it holds no integer tensor [samples, length]."""
        ids = _find_token_ids(batch)
        if ids is None or (self._rows and len(self._real) >= MOST):
            return
        self._rows += ids.shape[0]
        self._all += ids.numel()
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            self._real.append(mask.detach().ne(0).sum())
            self._masked += ids.numel()

    def per_sample(self) -> tuple[float | None, float | None]:
        """Return tokens per sample, with and without those that an attention mask hides; None if unknown. Costs one
        synchronization."""
        if not self._rows:
            return None, None
        every = self._all / self._rows
        if not self._masked:
            return every, None
        real = sum(float(count) for count in self._real)
        return every, every * real / self._masked


def _find_token_ids(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        found = batch["input_ids"]
        return found if found.ndim == 2 else None
    first = next(iterate_tensors(batch), None)
    if first is None or first.ndim != 2 or first.dtype not in (torch.int64, torch.int32, torch.int16):
        return None
    is_masked = isinstance(batch, Mapping) and "attention_mask" in batch
    return first if is_masked or first.shape[1] >= SHORTEST else None
