"""Finds the known name that a mistyped one probably means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.65
"""Similarity needed to suggest a name: ``anp`` and ``amp`` reach 0.67, ``cache`` and ``batch`` only 0.6."""
LEAST = 3
"""Fewest letters of a name for a match by prefix."""


def find_nearest(written: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to a written one: a few letters differ, or one of the two begins with the other.

    Returns:
        None if nothing is close: a bad guess misleads more than the list of all names.
    """
    names = {name.lower(): name for name in known}
    word = written.lower()
    near = difflib.get_close_matches(word, names, n=1, cutoff=ALIKE)
    long = [name for name in names if min(len(name), len(word)) >= LEAST]
    near += [name for name in long if name.startswith(word) or word.startswith(name)]
    return names[near[0]] if near else None
