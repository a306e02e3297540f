"""Whole epochs of two ledgers side by side."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.judge.sample_ledger import describe_later, find_wrong_epochs
from fastloop.records.trial import Ledger, LedgerEpoch

FIRST = [10, 100, True, "first", 0]


def ledger(*rows: list[Any], dataset: int | None = 100) -> Ledger:
    return Ledger(dataset=dataset, epochs=tuple(LedgerEpoch(*row) for row in (FIRST, *rows)))


def second(
    samples: int | None = 100, complete: bool = True, digest: str | None = "all", again: int | None = 0, end: int = 20
) -> list[Any]:
    return [end, samples, complete, digest, again]


SAME = "later ones have the same samples in a different order"
UNCOMPARED = "which ones cannot be compared"
RIGHT = {
    "same": (ledger(second()), ledger(second()), SAME),
    "same, of a part": (ledger(second(9, digest="x")), ledger(second(9, digest="x")), SAME),
    "drops others": (ledger(second(96, digest="x")), ledger(second(96, digest="y")), "none of them twice"),
    "puts back": (ledger(second(digest="x", again=31)), ledger(second(digest="y", again=29)), UNCOMPARED),
    "a small part": (ledger(second(40, digest="x")), ledger(second(40, digest="y", again=1)), UNCOMPARED),
    "of an unknown number": (
        ledger(second(digest="x"), dataset=None),
        ledger(second(digest="y"), dataset=None),
        UNCOMPARED,
    ),
    "no digest": (ledger(second(digest=None, again=None)), ledger(second(digest=None, again=None)), UNCOMPARED),
    "no count": (ledger(second(None, digest="x")), ledger(second(None, digest="y")), UNCOMPARED),
    "cut short": (ledger(second(8, False, "x")), ledger(second(8, False, "y")), "the next one, cut short"),
    "complete in one": (ledger(second(96, False, "x")), ledger(second(96, True, "y")), "the next one, cut short"),
}
WRONG = {
    "other samples": (ledger(second()), ledger(second(digest="other", again=1)), 20, "samples", "or some of them"),
    "strange ids": (
        ledger(second()),
        ledger(second(digest="other", again=None)),
        20,
        "samples",
        "has different samples",
    ),
    "twice": (ledger(second(96, digest="x")), ledger(second(96, digest="y", again=1)), 20, "samples", "twice"),
    "fewer": (ledger(second(8, False)), ledger(second(7, False)), 20, "samples", "epoch 2 has 8 vs. 7 samples"),
    "shorter": (ledger(second()), ledger(second(end=19)), 19, "epochs", "epoch 2 ends with"),
    "missing": (ledger(second()), ledger(), 20, "epochs", "2 vs. 1 epochs"),
}


@pytest.mark.parametrize(("base", "arm", "says"), list(RIGHT.values()), ids=list(RIGHT))
def test_epochs_that_another_order_explains(base: Any, arm: Any, says: str) -> None:
    assert not list(find_wrong_epochs(base, arm)) and not list(find_wrong_epochs(arm, base))
    assert says in describe_later(base, arm) and says in describe_later(arm, base)


@pytest.mark.parametrize(("base", "arm", "step", "what", "says"), list(WRONG.values()), ids=list(WRONG))
def test_epochs_that_it_does_not(base: Any, arm: Any, step: int, what: str, says: str) -> None:
    (found,) = find_wrong_epochs(base, arm)
    assert found[:2] == (step, what) and says in found[2]
    assert [wrong[:2] for wrong in find_wrong_epochs(arm, base)] == [(step, what)]


def test_the_weakest_of_several_epochs_is_told() -> None:
    base, arm = (ledger(second(), second(96, digest=name, end=30)) for name in "xy")
    assert "none of them twice" in describe_later(base, arm) and not list(find_wrong_epochs(base, arm))
    base, arm = (ledger(second(), second(8, False, name, end=30)) for name in "xy")
    assert describe_later(base, arm) == SAME, "the one that is cut short is a part of one"
