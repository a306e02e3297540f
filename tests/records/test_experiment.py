"""The records of an experiment: frozen, by keyword, and unknown unless told."""

from __future__ import annotations

import dataclasses

import pytest

from fastloop.records.experiment import Comparison, Gate, Outcome, Sample


def test_what_is_not_known_is_none_and_never_a_pass() -> None:
    one = Comparison(arm="amp", verdict="inconclusive", why="")
    assert (one.ratio, one.ci95, one.mde_pct, one.parity.passed) == (None, None, None, None)
    assert Gate(name="loss", passed=None, why="").deviation is None and Outcome().gates == ()


def test_they_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sample(name="base").name = "other"  # type: ignore[misc]


def test_a_gate_that_nothing_can_test_is_not_undecided() -> None:
    held, hung = Gate(name="ledger", passed=True, why=""), Gate(name="gradient", passed=None, why="it hung")
    blind = Gate(name="loss", passed=None, why="not testable here", detail={"testable": False})
    assert Outcome(gates=(held, hung, blind)).undecided == (hung.name,) and Outcome().undecided == ()
