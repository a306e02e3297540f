"""Sets the environment variables that CUDA reads once, when it starts in a process."""

from __future__ import annotations

import os

import torch

from fastloop.ladder import Ladder, collect_cards


def set_variables(ladder: Ladder) -> None:
    """Set the variables that enabled rungs need, except those that the user has set.

    Once CUDA has started in this process, they would have no effect; nothing is set then.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    cards = collect_cards()
    for rung in ladder.enabled():
        for name, value in cards[rung].variables.items():
            os.environ.setdefault(name, value)
