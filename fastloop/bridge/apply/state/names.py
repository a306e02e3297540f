"""Attributes that an object's ``__dict__`` does not show: its slots and its class's; also those of a tensor."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fastloop.evidence.samples.dataset import read_slots


def read_class(owner: type) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if not name.startswith("__")}


def read_marks(owner: torch.Tensor) -> dict[str, Any]:
    """A tensor's attributes, without Dynamo's marks."""
    return {name: value for name, value in vars(owner).items() if not name.startswith("_dynamo")}


READERS: dict[Any, Callable[[Any], dict[str, Any]]] = {object: read_slots, type: read_class, torch.Tensor: read_marks}
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
