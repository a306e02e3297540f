"""Which samples each optimizer step saw, with how many backwards and at which learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback


class Ledger(Callback):
    """Being written."""

    @classmethod
    def into(cls, trainer: Any, out: Path) -> None:
        """Let a Trainer's next fit keep a ledger in this directory."""
