"""Joins several batches into one along their samples, such that cutting it returns exactly those batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastloop.errors import name_kind
from fastloop.feeds.batch_tree import CannotRegroup, count_rows, is_container, iterate_tensors, list_members, rebuild

_PLAIN = (type(None), str, bytes, bool, int, float, complex)


def concatenate(batches: Sequence[Any]) -> Any:
    """Join the samples of all batches into one, in order; a single batch is returned as the same object.

    Tensors [n, ...] and lists of n strings or numbers are concatenated on dim 0. Members that do not hold one entry per
    sample must be the same in all batches.

    Raises:
        CannotRegroup: tensors differ in trailing shape (padded lengths), type or dtype; a number differs between
            batches; a member is some other object; containers have different members.
    """
    if len(batches) == 1:
        return batches[0]
    rows = [count_rows(batch) or 0 for batch in batches]
    if not all(rows):
        raise CannotRegroup("a batch holds no tensor with a first dimension")
    return _join(batches, rows)


def _join(members: Sequence[Any], rows: Sequence[int]) -> Any:
    first = members[0]
    kinds = {type(member).__name__: None for member in members}
    if any(type(member) is not type(first) for member in members):
        raise CannotRegroup(f"a {' in one batch and a '.join(kinds)} in another")
    if isinstance(first, torch.Tensor):
        return _join_tensors(members, rows)
    if isinstance(first, _PLAIN):
        return _share_member(members)
    if type(first) in (list, tuple) and not any(True for member in members for _ in iterate_tensors(member)):
        return _join_lists(members, rows)
    if not is_container(first):
        raise CannotRegroup(f"{name_kind(first)} cannot be concatenated")
    columns = iter(list(zip(*(_list_members(member, first) for member in members), strict=True)))
    try:
        return rebuild(first, lambda _: _join(next(columns), rows))
    except CannotRegroup:
        raise
    except Exception as error:  # a user's constructor may raise anything
        raise CannotRegroup(f"{name_kind(first)} cannot be rebuilt from its members: {error}") from error


def _list_members(member: Any, first: Any) -> list[Any]:
    """List the direct members, in the order in which `rebuild` walks those of the first batch."""
    if isinstance(first, Mapping):
        if member.keys() != first.keys():
            odd = sorted(map(str, member.keys() ^ first.keys()))
            raise CannotRegroup(f"batches with different keys: {', '.join(odd)}")
        return [member[key] for key in first]
    if isinstance(first, (list, tuple)) and len(member) != len(first):
        raise CannotRegroup(f"{name_kind(first)} of {len(first)} members in one batch, {len(member)} in another")
    return list_members(member)


def _join_tensors(members: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    first = members[0]
    if type(first) is not torch.Tensor:
        raise CannotRegroup(f"tensors of the class {type(first).__name__} may not concatenate as plain ones do")
    if first.layout != torch.strided:
        raise CannotRegroup(f"tensors of layout {first.layout} cannot be concatenated")
    if all(member.dim() == 0 for member in members):
        if any(not torch.equal(member, first) for member in members):
            raise CannotRegroup("a number that differs between batches")
        return first
    for member, count in zip(members, rows, strict=True):
        if member.dim() == 0 or member.shape[0] != count:
            raise CannotRegroup(f"a tensor of shape {tuple(member.shape)} in a batch of {count} samples")
    if len(shapes := dict.fromkeys(tuple(member.shape[1:]) for member in members)) > 1:
        few = " and ".join(str(list(shape)) for shape in list(shapes)[:2])
        raise CannotRegroup(f"batches of several shapes, such as padded lengths: samples of {few}")
    if len(kinds := dict.fromkeys(str(member.dtype) for member in members)) > 1:
        raise CannotRegroup(f"tensors of {' and '.join(kinds)}")
    return torch.cat(list(members))


def _join_lists(members: Sequence[Any], rows: Sequence[int]) -> Any:
    """Join lists that have one entry per sample, or share one that is the same in all; refuse if cutting could confuse
    the two cases."""
    if all(len(member) == count for member, count in zip(members, rows, strict=True)):
        return type(members[0])(entry for member in members for entry in member)
    if len(members[0]) == sum(rows):
        raise CannotRegroup("a list with as many entries as the window has samples")
    return _share_member(members)


def _share_member(members: Sequence[Any]) -> Any:
    first = members[0]
    try:
        same = all(bool(member == first) for member in members)
    except Exception:  # a user's comparison may raise anything
        same = False
    if not same:
        raise CannotRegroup(f"{name_kind(first)} that differs between batches")
    return first
