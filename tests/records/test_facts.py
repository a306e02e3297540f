"""Sizes as people read them. What facts say of a run is tested with those who read it."""

from __future__ import annotations

import pytest

from fastloop.records.facts import format_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1280, "1.28 kB"),
        (525_000_000, "525 MB"),
        (999_900_000, "1 GB"),
        (8e9, "8 GB"),
        (3.21e13, "32.1 TB"),
    ],
)
def test_sizes(size: float, text: str) -> None:
    assert format_bytes(size) == text
