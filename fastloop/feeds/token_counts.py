"""Counts tokens, for losses that are means over tokens instead of samples: those that a mask or the labels select."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from fastloop.feeds.batch_tree import count_rows, iterate_tensors

IGNORED = -100
"""Label that torch's cross-entropy ignores by default."""


class Counter(NamedTuple):
    """Counts entries in one tensor [n, length, ...] of a batch, without a synchronization."""

    place: int
    """Index among the batch's tensors."""
    ignored: int
    first: int
    """First position of a sample that counts; 1 if each token predicts the next one."""

    def weigh(self, batches: Sequence[Any]) -> torch.Tensor:
        """Return each batch's share of all counted entries, or of all samples if no entry counts, [batches]."""
        counts = torch.stack([self._count(batch) for batch in batches]).double()
        rows = torch.stack([counts.new_full((), count_rows(batch) or 0) for batch in batches])
        counts = torch.where(counts.sum() > 0, counts, rows)
        return counts / counts.sum()

    def _count(self, batch: Any) -> torch.Tensor:
        tensor = list(iterate_tensors(batch))[self.place]
        return (tensor[:, self.first :] != self.ignored if self.first else tensor != self.ignored).sum()

    def __str__(self) -> str:
        where = ", from the second token on" if self.first else ""
        return f"entries of tensor {self.place + 1} of the batch that are not {self.ignored}{where}"


def list_token_counters(batch: Any, module: torch.nn.Module, ignored: Collection[int] = ()) -> list[Counter]:
    """List what could be counted in a batch: entries other than 0 or an ``ignore_index``, as in masks, labels and
    lengths.

    Args:
        ignored: each ``ignore_index`` that the module's code names.
    """
    marks = {IGNORED, 0, *ignored}
    for part in module.modules():
        if isinstance(mark := getattr(part, "ignore_index", None), int):
            marks.add(mark)
    rows = count_rows(batch)
    return [
        Counter(place, mark, first)
        for place, each in enumerate(iterate_tensors(batch))
        if each.dim() and each.shape[0] == rows and (not each.is_floating_point() or each.dim() == 2)
        for mark in sorted(marks)
        for first in ((0, 1) if each.dim() > 1 and each.shape[1] > 1 else (0,))
        if bool((each == mark).any())
    ]


def find_named_counter(batch: Any, ignored: Collection[int]) -> Counter | None:
    """Find the labels whose ``ignore_index`` the module's code names; None if it is not clear which tensor they are."""
    rows = count_rows(batch)
    whole = [
        (place, each)
        for place, each in enumerate(iterate_tensors(batch))
        if each.dim() and each.shape[0] == rows and not each.is_floating_point() and each.dtype != torch.bool
    ]
    found = [(place, mark) for place, each in whole for mark in ignored if bool((each == mark).any())]
    if not found and len(whole) == 1:  # this batch may have none of them
        found = [(whole[0][0], mark) for mark in ignored]
    return Counter(*found[0], 0) if len(found) == 1 else None
