"""The time a command may take."""

from __future__ import annotations

import pytest

from fastloop.commands.budget import GRACE_S, Budget, Spent


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_begins_that_cannot_end() -> None:
    clock = Clock()
    budget = Budget(60, clock)
    budget.check("a run", 59)
    with pytest.raises(Spent, match=r"a run \(about 61 s\)"):
        budget.check("a run", 61)
    clock.now += 60
    with pytest.raises(Spent):
        budget.check("anything", 0)
    assert budget.spent_s() == 60 and not budget.over()
    clock.now += GRACE_S + 1
    assert budget.over() and budget.said() == "0 s left"


def test_a_reserve_is_for_what_comes_last() -> None:
    budget = Budget(300, Clock())
    budget.reserve_s = 100
    budget.check("a run", 199)
    with pytest.raises(Spent):
        budget.check("a run", 201)
    budget.check("the end", 299, last=True)
    assert budget.said() == "5 min left"


def test_a_short_budget_keeps_half_for_the_way() -> None:
    budget = Budget(100, Clock())
    budget.reserve_s = 500
    budget.check("a run", 49)
    with pytest.raises(Spent):
        budget.check("a run", 51)
