"""Kinds of containers that a batch may be made of."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import torch

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str


@dataclasses.dataclass
class Counted:
    x: torch.Tensor
    made: int = dataclasses.field(default=0, init=False)
