"""Regroups the samples of one run's batches into the batch sizes of another run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from fastloop.errors import name_kind
from fastloop.feeds.batch_tree import CannotRegroup, count_rows, iterate_tensors, map_tensors
from fastloop.feeds.concatenation import concatenate
from fastloop.feeds.splitting import cut_at

Leaves = list[torch.Tensor]
"""One batch's tensors, depth first, on the host."""


def copy_tensors(batch: Any) -> Leaves:
    """Return copies of a batch's tensors on the host."""
    return [leaf.detach().to("cpu", copy=True) for leaf in iterate_tensors(batch)]


def regroup(own: Sequence[Any], others: Sequence[Leaves]) -> list[Any]:
    """Build batches like `own` that hold the samples of `others` in their order.

    Args:
        own: batches of the target sizes. Their members that are not tensors stay unchanged.
        others: the tensors of the other batches. Tensors without dimensions belong to no sample: they must be the same
            in all batches.

    Uses only as many of `own` as the samples of `others` fill.

    Raises:
        CannotRegroup: the samples do not fill whole batches, or the tensors differ in kind or length.
    """
    sizes = [_count_rows(list(iterate_tensors(batch))) for batch in own]
    theirs = [_count_rows(leaves) for leaves in others]
    ends = list(accumulate(sizes))
    if sum(theirs) not in ends:
        raise CannotRegroup(f"{sum(theirs)} samples do not fill whole batches of {'/'.join(map(str, sizes[:4]))}")
    sizes = sizes[: ends.index(sum(theirs)) + 1]
    if len({len(leaves) for leaves in others} | {len(list(iterate_tensors(batch))) for batch in own}) > 1:
        raise CannotRegroup("the batches do not all have the same number of tensors")
    if theirs != sizes:
        others = [piece.batch for piece in cut_at(concatenate(others), sizes, full=1)]
    return [_fill(batch, leaves) for batch, leaves in zip(own, others, strict=False)]


def _count_rows(leaves: Sequence[torch.Tensor]) -> int:
    rows = count_rows(leaves)
    if not rows:
        raise CannotRegroup("a batch holds no tensor with a first dimension")
    return rows


def _fill(batch: Any, leaves: Leaves) -> Any:
    """Return the batch with `leaves` for its tensors, each on the device of the one it replaces."""
    if isinstance(batch, torch.Tensor):
        return leaves[0].to(batch.device, copy=True)
    following = iter(leaves)
    try:
        return map_tensors(batch, lambda own: next(following).to(own.device, copy=True))
    except Exception as error:  # a user's constructor may raise anything
        raise CannotRegroup(f"{name_kind(batch)} cannot be built from its members: {error}") from error
