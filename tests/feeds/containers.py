"""Kinds of containers that a batch may be made of."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

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


class Graphs:
    """As a graph library's batch: no container to us, moved by its own method, its tensors in an inner store."""

    def __init__(self, graphs: int, nodes: int) -> None:
        self.store = {"x": torch.zeros(nodes, 2), "edge_index": torch.zeros(2, 4 * nodes, dtype=torch.int64)}
        self.store["y"] = torch.zeros(graphs)
        self.owner = self
        self.num_graphs: Any = graphs

    def to(self, *args: Any, **kwargs: Any) -> Graphs:
        self.store = {name: tensor.to(*args, **kwargs) for name, tensor in self.store.items()}
        return self


class Bare:
    """One that can be moved and says nothing of its size."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)

    def pin_memory(self) -> Bare:
        return self
