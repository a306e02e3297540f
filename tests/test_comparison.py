"""The records of an experiment: frozen, by keyword, and unknown unless told."""

from __future__ import annotations

import dataclasses

import pytest

from fastloop.comparison import Comparison, Gate, Outcome, Sample


def test_what_is_not_known_is_none_and_never_a_pass() -> None:
    one = Comparison(arm="amp", verdict="inconclusive", why="")
    assert (one.ratio, one.ci95, one.mde_pct, one.parity.passed) == (None, None, None, None)
    assert Gate(name="loss", passed=None, why="").deviation is None and Outcome().gates == ()


def test_they_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sample(name="base").name = "other"  # type: ignore[misc]
