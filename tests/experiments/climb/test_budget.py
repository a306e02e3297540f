"""The time a command may take."""

from __future__ import annotations

import pytest

from fastloop.experiments.climb.budget import GRACE_S, ClimbBudget, Spent


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_begins_that_cannot_end() -> None:
    clock = Clock()
    budget = ClimbBudget(60, clock)
    budget.begin("a run", 59)
    with pytest.raises(Spent, match=r"a run \(about 61 s\)"):
        budget.begin("a run", 61)
    clock.now += 60
    with pytest.raises(Spent):
        budget.begin("anything", 0)
    assert budget.spent_s() == 60 and not budget.is_over()
    clock.now += GRACE_S + 1
    assert budget.is_over() and budget.describe_left() == f"{GRACE_S + 1 + 0:.0f} s over the budget"


def test_a_reserve_is_for_what_comes_last() -> None:
    budget = ClimbBudget(300, Clock())
    budget.reserve(100)
    budget.begin("a run", 199)
    with pytest.raises(Spent):
        budget.begin("a run", 201)
    budget.begin("the end", 299, last=True)
    assert budget.describe_left() == "5.0 min of the budget left"


def test_a_step_that_overruns_is_stopped_while_the_shortest_end_still_fits() -> None:
    clock = Clock()
    budget = ClimbBudget(300, clock)
    budget.reserve(150, 100)
    assert budget.begin("a run", 50) == 300 - 100
    clock.now += 200
    assert not budget.is_over()
    clock.now += 1
    assert budget.is_over()
    assert budget.begin("the end", 90, last=True) == 99 + GRACE_S
    assert not budget.is_over()


@pytest.mark.parametrize(("reserve_s", "kept_s"), [(50, 50), (90, 90), (101 + GRACE_S, 0)])
def test_what_does_not_fit_any_more_is_not_kept_for(reserve_s: float, kept_s: float) -> None:
    budget = ClimbBudget(100, Clock())
    budget.reserve(reserve_s)
    assert budget.kept_s == kept_s
    budget.begin("a run", 100 - kept_s)
    with pytest.raises(Spent):
        budget.begin("a run", 101 - kept_s)


def test_the_most_that_is_left_is_kept() -> None:
    """A long end, as long as that fits; then a short one."""
    clock = Clock()
    budget = ClimbBudget(200, clock)
    budget.reserve(150, 100)
    budget.begin("a run", 50)
    clock.now += 80
    assert budget.left_s() == 120 and budget.kept_s == 150
    with pytest.raises(Spent):
        budget.begin("a run", 1)
    clock.now += 10
    assert budget.kept_s == 100
    budget.begin("a run", 10)
    with pytest.raises(Spent):
        budget.begin("a run", 11)
    budget.begin("the end", 140, last=True)
    clock.now += 50
    assert budget.kept_s == 0


def test_a_reserve_that_came_too_late_keeps_nothing_back() -> None:
    """Found out at 80 s of 100 that the end takes 51: it cannot be had, so the 20 s are for the way."""
    clock = Clock()
    budget = ClimbBudget(110, clock)
    budget.reserve(51)
    clock.now += 90
    assert budget.kept_s == 0
    budget.begin("a run", 20)
    with pytest.raises(Spent):
        budget.begin("the end", 51, last=True)


def test_the_end_may_use_the_grace() -> None:
    clock = Clock()
    budget = ClimbBudget(100, clock)
    clock.now += 90
    budget.begin("the end", 10 + GRACE_S, last=True)
    with pytest.raises(Spent):
        budget.begin("the end", 11 + GRACE_S, last=True)
    clock.now += 30
    budget.begin("all of it is there already", 0.0, last=True)
