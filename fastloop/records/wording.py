"""Words for numbers in evidence and messages."""

from __future__ import annotations


def say_count(count: int, noun: str) -> str:
    """A number with its noun: ``1 batch``, ``1,024 batches``."""
    return f"{count:,} {noun if count == 1 else f'{noun}es' if noun.endswith(('s', 'tch')) else f'{noun}s'}"
