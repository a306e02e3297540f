"""Attributes that an object's ``__dict__`` does not show: its slots and its class's; also those of a tensor."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def read_slots(owner: Any) -> dict[str, Any]:
    """The values of the slots that classes written in Python declare."""
    bases = [base for base in type(owner).__mro__ if "__slots__" in vars(base)]
    members = [each for base in bases for each in vars(base).values() if isinstance(each, types.MemberDescriptorType)]
    return {each.__name__: each.__get__(owner) for each in members if _has_value(each, owner)}


def read_class(owner: type) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if not name.startswith("__")}


def read_marks(owner: torch.Tensor) -> dict[str, Any]:
    """A tensor's attributes, without Dynamo's marks."""
    return {name: value for name, value in vars(owner).items() if not name.startswith("_dynamo")}


READERS = {object: read_slots, type: read_class, torch.Tensor: read_marks}
"""How to read the names. The key's own ``__setattr__`` writes them, which bypasses one in the user's class."""


def restore_names(kind: Any, owner: Any, before: Mapping[str, Any]) -> None:
    """Restore the values that the names had."""
    now = READERS[kind](owner)
    for name in now.keys() - before.keys():
        kind.__delattr__(owner, name)
    for name, value in before.items():
        if now.get(name, now) is not value:
            kind.__setattr__(owner, name, value)


def list_inner(values: Mapping[str, Any]) -> Iterator[Any]:
    """The values that may hold state, without methods."""
    code = (types.FunctionType, classmethod, staticmethod, property, types.MemberDescriptorType)
    return (value for value in values.values() if not isinstance(value, code))


def _has_value(member: types.MemberDescriptorType, owner: Any) -> bool:
    try:
        member.__get__(owner)
    except AttributeError:
        return False
    return True
