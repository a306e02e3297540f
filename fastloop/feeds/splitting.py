"""Cuts a batch into micro-batches, each with its weight in the loss of the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch

from fastloop.errors import name_kind
from fastloop.feeds.batch_tree import CannotRegroup, count_rows, is_container, iterate_tensors, rebuild

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Piece(NamedTuple):
    """One micro-batch."""

    batch: Any
    samples: int
    weight: Any
    """Factor of this piece's mean loss in the step's loss; a tensor on the device if it counts tokens."""
    groups: int = 1
    """Number of whole merged batches in it, all of one size."""

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the piece's share of the step's loss, in the loss's dtype."""
        return loss * (self.weight.to(loss.dtype) if isinstance(self.weight, torch.Tensor) else self.weight)


def cut(
    batch: Any, micro: int, window: tuple[Sequence[int], int] | None = None, *, whole_batches: bool = False
) -> list[Piece]:
    """Cut a batch into pieces of at most `micro` samples, or three where pairs would leave one over.

    Args:
        batch: containers of tensors with samples on dim 0; lists of one string or number per sample are cut too.
        micro: samples per piece.
        window: sizes of the loader batches that were merged into this one, and how many of them a full window has. Each
            weighs ``1/full``, as in Lightning's accumulation, so pieces never mix sizes.
        whole_batches: do not cut the merged batches, even if one is larger than `micro`.

    Raises:
        CannotRegroup: a member has a different first dimension, or its type cannot be cut.
    """
    total = count_rows(batch)
    if not total:
        raise CannotRegroup("the batch holds no tensor with a first dimension")
    pieces, start = [], 0
    for each, count, per_sample in _list_runs(total, window):
        most = max(each, micro // each * each) if whole_batches else micro
        for size in _choose_sizes(each * count, most, whole_batches=whole_batches):
            piece = batch if size == total else _slice(batch, slice(start, start + size), total)
            pieces.append(Piece(piece, size, size * per_sample, size // each if whole_batches else 1))
            start += size
    return pieces


def cut_at(batch: Any, sizes: Sequence[int], full: int) -> list[Piece]:
    """Cut a merged batch back into its batches, each with its weight under accumulation.

    Args:
        sizes: samples in each.
        full: batches in a full window.

    Raises:
        CannotRegroup: as in `cut`.
    """
    total = count_rows(batch) or 0
    if sum(sizes) != total:
        raise CannotRegroup(f"a merged batch has {total} samples where its window drew {sum(sizes)}")
    return [
        Piece(_slice(batch, slice(end - size, end), total), size, 1 / full)
        for end, size in zip(accumulate(sizes), sizes, strict=True)
    ]


def _choose_sizes(count: int, micro: int, *, whole_batches: bool) -> list[int]:
    """Choose piece sizes; avoid pieces of one sample, since BatchNorm and squeeze() stumble over them: one of three
    samples takes the place of two and one."""
    sizes = [micro] * (count // micro) + [count % micro] * (count % micro > 0)
    if len(sizes) > 1 and sizes[-1] == 1 and micro > 1 + whole_batches:
        sizes[-2:] = [micro - 1, 2] if micro > 2 else [3]
    return sizes


def _list_runs(total: int, window: tuple[Sequence[int], int] | None) -> list[tuple[int, int, float]]:
    """List runs of batches of one size: (samples in each, batches, weight per sample)."""
    if window is None:
        return [(total, 1, 1 / total)]
    sizes, full = window
    if sum(sizes) != total:
        raise CannotRegroup(f"a merged batch has {total} samples where its window drew {sum(sizes)}")
    runs = [(size, len(list(group))) for size, group in groupby(sizes)]
    return [(size, count, 1 / (full * size)) for size, count in runs]


def _slice(member: Any, part: slice, total: int) -> Any:
    if isinstance(member, torch.Tensor):
        if member.dim() == 0:
            return member
        if member.shape[0] != total:
            raise CannotRegroup(f"a tensor of shape {tuple(member.shape)} in a batch of {total} samples")
        return member[part]
    if member is None or isinstance(member, (str, bytes, bool, int, float, complex)):
        return member
    if (
        isinstance(member, (list, tuple))
        and not hasattr(member, "_fields")
        and not any(True for _ in iterate_tensors(member))
    ):
        return member[part] if len(member) == total else member
    if not is_container(member):
        raise CannotRegroup(f"{name_kind(member)} cannot be cut into micro-batches")
    try:
        return rebuild(member, lambda inner: _slice(inner, part, total))
    except CannotRegroup:
        raise
    except Exception as error:  # a user's constructor may raise anything
        raise CannotRegroup(f"{name_kind(member)} cannot be rebuilt from its members: {error}") from error


def get_loss(output: Any) -> Any:
    """Return the loss from training_step's output: a tensor, the 'loss' of a mapping, or None."""
    return output.get("loss") if isinstance(output, Mapping) else output


def sum_losses(outputs: Sequence[Any], pieces: Sequence[Piece]) -> torch.Tensor:
    """Return the step's loss; its gradient covers only the last piece's share, since the others' backward has run."""
    losses = [get_loss(output) for output in outputs]
    known = [piece.weigh(loss.detach()) for loss, piece in zip(losses[:-1], pieces, strict=False) if loss is not None]
    skips_last = losses[-1] is None
    last = torch.zeros_like(known[0], requires_grad=True) if skips_last else pieces[-1].weigh(losses[-1])
    return sum(known, start=last)


def join(outputs: Sequence[Any], pieces: Sequence[Piece], loss: torch.Tensor) -> Any:
    """Build the output of training_step for the whole batch: the step's loss, and the other members joined.

    Tensors and lists with one entry per sample are concatenated, floating-point scalars averaged by samples, counts
    added up, also inside mappings; for anything else, the last piece's is used. A count is an integer scalar; a plain
    number that is the same in all pieces is none, unless it is their size.
    """
    if not isinstance(outputs[-1], Mapping):
        return loss
    return {**_join_mapping(outputs, pieces), "loss": loss}


def _join_mapping(outputs: Sequence[Any], pieces: Sequence[Piece]) -> dict[Any, Any]:
    return {key: _join_member([output.get(key) for output in outputs], pieces) for key in outputs[-1] if key != "loss"}


def _join_member(members: Sequence[Any], pieces: Sequence[Piece]) -> Any:
    if all(isinstance(member, Mapping) for member in members):
        return _join_mapping(members, pieces)
    if all(
        isinstance(member, list) and len(member) == piece.samples for member, piece in zip(members, pieces, strict=True)
    ):
        return [entry for member in members for entry in member]
    if all(isinstance(member, torch.Tensor) for member in members):
        if all(member.dim() and len(member) == piece.samples for member, piece in zip(members, pieces, strict=True)):
            return torch.cat(list(members))
        if all(member.dim() == 0 and member.is_floating_point() for member in members):
            return average(members, [piece.samples for piece in pieces])
        if all(member.dim() == 0 and member.dtype in _INTEGERS for member in members):
            return sum(members[1:], start=members[0])
    sizes = [piece.samples for piece in pieces]
    if all(type(member) is float for member in members):
        return average(members, sizes)
    if all(type(member) is int for member in members) and (list(members) == sizes or len(set(members)) > 1):
        return sum(members)
    return members[-1]


def average(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean of one value per piece: numbers, or tensors of one shape. No synchronization."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
