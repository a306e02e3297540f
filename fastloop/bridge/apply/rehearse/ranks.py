"""Exchange between ranks, so that all of them reach the same result."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

Answer = TypeVar("Answer")


def gather(trainer: Any, mine: Answer) -> list[Answer]:
    """Collect an object from all ranks, in rank order; a collective if there are several."""
    if trainer.world_size == 1:
        return [mine]
    every: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(every, mine)
    return every
