"""Exchange between ranks, so that all of them reach the same result."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from fastloop.evidence.model.collectives import RefuseCollectives

Answer = TypeVar("Answer")


def gather(trainer: Any, mine: Answer) -> list[Answer]:
    """Collect an object from all ranks, in rank order; a collective if there are several."""
    if trainer.world_size == 1:
        return [mine]
    every: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(every, mine)
    return every


def gather_first(trainer: Any, mine: Answer | None) -> Answer | None:
    """The answer of the first rank that has one; None if none has. All ranks must call this."""
    return next((each for each in gather(trainer, mine) if each is not None), None)


def refuse_exchange(trainer: Any) -> AbstractContextManager[Any]:
    """Refuse collectives inside ``with``, because the other ranks may not run the same calls."""
    return nullcontext() if trainer.world_size == 1 else RefuseCollectives()  # type: ignore[no-untyped-call]
