"""Lines for the user, printed on rank 0 only."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn


def say(line: str) -> None:
    """Print a line."""
    rank_zero_info(f"fastloop: {line}")


def skip(_line: str) -> None:
    """Print nothing."""


def warn(line: str) -> None:
    """Print a line as a warning."""
    rank_zero_warn(f"fastloop: {line}")
