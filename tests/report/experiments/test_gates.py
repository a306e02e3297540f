"""Parity in words."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.records.experiment import Gate, Outcome
from fastloop.records.store import decode
from fastloop.report.experiments import verdict_words
from tests.report.made_experiments import BROKEN, CLAIMLESS, HELD, UNKNOWN, gate


def outcome(content: dict[str, Any]) -> Outcome:
    found = decode(content, Outcome)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("parity", "said"),
    [
        (HELD, "approximate, passed: ledger equal, gradient 3.1e-3 (limit 0.05), loss +0.1 % (limit 0.5 %)"),
        (BROKEN, "approximate, FAILED: ledger equal, gradient 0.75 (limit 0.05) FAILED; the gradient differs"),
        (UNKNOWN, "approximate, could not tell: ledger equal, loss could not tell; the loss could not tell"),
        (CLAIMLESS, "not claimed: the batch is another"),
        ({}, ""),
        ({**CLAIMLESS, "why": "claims no parity: it changes the training"}, "not claimed: it changes the training"),
        ({"class": "exact", "passed": None, "why": "not testable here"}, "could not tell: not testable here"),
    ],
    ids=["held", "broken", "unknown", "claimless", "nothing", "claims-none", "not-testable"],
)
def test_parity_in_a_line(parity: dict[str, Any], said: str) -> None:
    assert verdict_words.describe_parity(outcome(parity)) == said


def test_a_lower_loss_has_its_sign_and_a_note_of_a_gate_is_shown() -> None:
    lower = gate("loss", deviation=-0.12, limit=0.5)
    assert (
        verdict_words.describe_parity(outcome({**HELD, "gates": [lower]}))
        == "approximate, passed: loss -0.12 % (limit 0.5 %)"
    )
    noted = gate("gradient", deviation=0.0, detail={"note": "only the arm clips"})
    assert (
        verdict_words.describe_parity(outcome({**HELD, "gates": [noted]}))
        == "approximate, passed: gradient 0; only the arm clips"
    )


def test_changes_training_does_not_hide_a_failed_gate() -> None:
    assert "FAILED" in verdict_words.describe_parity(outcome({**BROKEN, "class": "changes-training"}))


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (0.25, "0.25"), (3.1e-3, "3.1e-3"), (1e-5, "1e-5"), (1.234e6, "1.2e6"), (-0.04, "-0.04")],
)
def test_deviations_of_any_size_are_short(value: float, said: str) -> None:
    assert verdict_words.format_compact(value) == said


def test_what_was_not_measured_is_na() -> None:
    assert (
        verdict_words.format_figure(Gate(name="loss", passed=None, why=""), "deviation") == "n/a"
        and verdict_words.format_figure(Gate(name="gradient", passed=None, why=""), "limit") == "n/a"
    )


def test_the_table_has_every_gate_with_limit_and_what_it_could_see() -> None:
    table = verdict_words.tabulate_gates([("amp", outcome(HELD)), ("none", Outcome(why="base failed"))])
    assert [row[:6] for row in table.rows] == [
        ("amp (approximate)", "ledger", "passed", "n/a", "n/a", "n/a"),
        ("amp (approximate)", "gradient", "passed", "3.1e-3", "0.05", "1e-4"),
        ("amp (approximate)", "loss", "passed", "+0.1 %", "0.5 %", "0.2 %"),
        ("none", "none", "could not tell", "n/a", "n/a", "n/a"),
    ]
    assert table.rows[3][-1] == "base failed" and verdict_words.tabulate_gates([]).note == "n/a: no gate ran."
