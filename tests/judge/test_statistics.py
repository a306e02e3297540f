"""The arithmetic of the judge, against other ways to the same numbers. Its error rates are in test_judge.py."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from fastloop.judge.statistics import (
    LOOKS,
    Effect,
    Pool,
    compute_error_rate,
    compute_interval,
    compute_mde_pct,
    compute_mean_gap_interval,
    count_most_rounds,
    estimate_effect,
    is_due,
    looks_faster,
    order,
    screen,
)


def test_it_loads_quickly() -> None:
    """``scipy.stats`` alone takes longer than all of ``--help`` may."""
    code = "import sys, fastloop.judge.verdict; print(sorted({'torch', 'lightning', 'scipy.stats'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arms", [2, 3, 5])
def test_each_round_has_every_arm_and_pairs_mirror(arms: int) -> None:
    plan = order(arms, 9, seed=3)
    assert len(plan) == 9 and all(sorted(one) == list(range(arms)) for one in plan)
    assert all(plan[first + 1] == plan[first][::-1] for first in range(0, 8, 2))


@pytest.mark.parametrize("arms", [2, 3, 5])
def test_a_straight_drift_cancels_within_each_pair_of_rounds(arms: int) -> None:
    places: list[int] = [0] * arms
    for place, arm in enumerate(arm for one in order(arms, 6, seed=1) for arm in one):
        places[arm] += place
    assert len(set(places)) == 1
    blocked = [sum(range(arm * 6, arm * 6 + 6)) for arm in range(arms)]
    assert len(set(blocked)) == arms, "the control: blocks do not"


def test_more_rounds_continue_the_same_plan() -> None:
    assert all(order(3, 11, seed=7)[:rounds] == order(3, rounds, seed=7) for rounds in range(12))


def test_the_order_of_a_seed_is_the_same_on_another_day() -> None:
    """An experiment is resumed by another process, maybe under another Python."""
    assert order(3, 4, seed=0) == ((1, 2, 0), (0, 2, 1), (1, 2, 0), (0, 2, 1))


def test_seeds_differ_and_no_arm_always_leads() -> None:
    leaders = Counter(order(2, 2, seed)[0][0] for seed in range(400))
    assert 150 < leaders[0] < 250
    assert len({order(3, 10, seed) for seed in range(20)}) == 20


# -- effect -----------------------------------------------------------------------------------------------------------


def by_matrix(base: list[float], base_places: list[int], arm: list[float], arm_places: list[int]) -> tuple[float, ...]:
    """The same model through its design matrix."""
    y = np.log(base + arm)
    x = np.column_stack([np.ones(len(y)), [0] * len(base) + [1] * len(arm), base_places + arm_places])
    beta = np.linalg.lstsq(x, y, rcond=None)[0]
    dof = len(y) - 3
    sd = math.sqrt(float(np.sum((y - x @ beta) ** 2)) / dof)
    return float(beta[1]), sd * math.sqrt(np.linalg.inv(x.T @ x)[1, 1]), dof, sd


@pytest.mark.parametrize(("n_base", "n_arm"), [(5, 5), (3, 3), (5, 2), (1, 4), (2, 2)], ids=str)
def test_it_is_ordinary_least_squares(n_base: int, n_arm: int) -> None:
    dice = random.Random(n_base)
    places = dice.sample(range(20), n_base + n_arm)
    rates = [400 * math.exp(dice.gauss(0, 0.05) - 0.01 * place) for place in places]
    sides = rates[:n_base], places[:n_base], rates[n_base:], places[n_base:]
    found = estimate_effect(*sides)
    assert found is not None
    assert (found.log_ratio, found.se, found.dof, found.sd) == pytest.approx(by_matrix(*sides))


def test_a_drift_is_taken_out() -> None:
    places = ([0, 1, 2, 3], [4, 5, 6, 7])
    base, arm = ([100 * math.exp(-0.01 * place) for place in side] for side in places)
    found = estimate_effect(base, places[0], [1.1 * rate for rate in arm], places[1])
    assert found is not None and found.ratio == pytest.approx(1.1) and found.sd < 1e-6
    plain = sum(map(math.log, arm)) / 4 - sum(map(math.log, base)) / 4
    assert plain == pytest.approx(-0.04), "the control: the means alone blame the arm"


def test_too_little_is_no_effect() -> None:
    assert estimate_effect([400], [0], [410], [1]) is None
    assert estimate_effect([400, 401], [0, 3], [410], [1]) is None
    assert estimate_effect([400, 401], [0, 0], [410, 412], [1, 1]) is None, "order and arm are one"
    unknown = estimate_effect([400, 401], [0, 0], [410, 412], [0, 0])
    assert unknown is not None and unknown.dof == 2, "no order known, none taken out"


@pytest.mark.parametrize("sides", [([400.0], [], [400.0], [0]), ([], [], [400.0], [0])], ids=["no place", "no run"])
def test_runs_and_places_belong_together(sides: tuple[list[float], list[int], list[float], list[int]]) -> None:
    with pytest.raises(ValueError, match="every run needs"):
        estimate_effect(*sides)


def test_equal_rates_are_not_told_apart_by_rounding() -> None:
    rate = 123.456789
    found = estimate_effect([rate] * 5, [0, 3, 4, 7, 8], [rate * 3 / 3] * 5, [1, 2, 5, 6, 9])
    assert found is not None and found.se > 0 and abs(found.log_ratio) < found.se
    low, high = compute_interval(found)
    assert low < 1 < high < 1 + 1e-6


EFFECT = Effect(log_ratio=0.05, se=0.02, dof=7, sd=0.03)


def test_the_interval_is_students() -> None:
    """t(0.975) of 7 degrees of freedom is 2.3646, t(0.99375) of 3 is 5.3919: from printed tables."""
    assert compute_interval(EFFECT) == pytest.approx(
        (math.exp(0.05 - 2.3646 * 0.02), math.exp(0.05 + 2.3646 * 0.02)), rel=1e-5
    )
    wide = compute_interval(Effect(log_ratio=0.0, se=0.02, dof=3, sd=0.03), 0.0125)
    assert wide == pytest.approx((math.exp(-5.3919 * 0.02), math.exp(5.3919 * 0.02)), rel=1e-5)


def test_an_interval_that_says_nothing_is_still_a_pair_of_numbers() -> None:
    low, high = compute_interval(Effect(log_ratio=0.0, se=1e4, dof=1, sd=1e4))
    assert low == 0.0 and math.isfinite(high)


@pytest.mark.parametrize(("runs", "expected"), [(5, 3.1), (10, 2.0)])
def test_the_smallest_visible_effect_at_one_and_a_half_percent(runs: int, expected: float) -> None:
    assert compute_mde_pct(0.015, runs, runs, 2 * runs - 3) == pytest.approx(expected, abs=0.06)
    assert compute_mde_pct(0.015, runs, runs, 2 * runs - 3, alpha=0.0125) > 1.2 * compute_mde_pct(
        0.015, runs, runs, 2 * runs - 3
    )
    assert compute_mde_pct(0.5, 3, 3, 3) > 100, "percent of the base, not of the logarithm"


# -- planned looks ----------------------------------------------------------------------------------------------------


def test_looks_share_the_error_rate() -> None:
    assert [rounds for rounds in range(1, 15) if is_due(rounds, "auto")] == [3, 5, 7, 10] == list(LOOKS)
    assert compute_error_rate("auto") * len(LOOKS) == pytest.approx(0.05)
    assert count_most_rounds("auto") == 10


def test_a_number_of_runs_is_judged_once() -> None:
    assert [rounds for rounds in range(1, 8) if is_due(rounds, 5)] == [5]
    assert compute_error_rate(5) == 0.05 and count_most_rounds(4) == 4


def test_arms_share_the_error_rate_too() -> None:
    assert compute_error_rate(5, arms=4) == pytest.approx(0.0125)
    assert compute_error_rate("auto", arms=3) == pytest.approx(0.05 / 12)


# -- screens ----------------------------------------------------------------------------------------------------------

PAIRS = [(100.0, 104.0), (100.0, 106.0)]


def test_a_screen_is_the_mean_log_ratio() -> None:
    found = screen(PAIRS, Pool())
    assert found is not None and found.ratio == pytest.approx(math.sqrt(1.04 * 1.06)) and found.dof == 1
    apart = math.log(1.06 / 1.04)
    # Two differences of two runs each: their variance is apart^2 / 2, and half of it is that of a run.
    assert found.sd == pytest.approx(apart / 2) and found.se == pytest.approx(apart / 2)


def test_a_drift_cancels_between_pairs_in_opposite_order() -> None:
    base, arm = (100 * math.exp(-0.0), 100 * math.exp(-0.03)), (100 * math.exp(-0.01), 100 * math.exp(-0.02))
    found = screen(list(zip(base, arm, strict=True)), Pool())
    assert found is not None and found.log_ratio == pytest.approx(0.0, abs=1e-12)


def test_the_pool_lends_its_degrees_of_freedom() -> None:
    before = Pool().plus([(100, 101), (100, 99)]).plus([(100, 103), (100, 102), (100, 104)])
    assert before.dof == 3
    found = screen(PAIRS, before)
    assert found is not None and found.dof == 4 and found.sd == before.plus(PAIRS).sd
    assert Pool(squares=before.squares, dof=before.dof) == before, "two numbers bring it back"


def test_pairs_measure_the_spread_of_single_runs() -> None:
    dice = random.Random(0)
    pairs = [(math.exp(dice.gauss(5, 0.02)), math.exp(dice.gauss(5, 0.02))) for _ in range(4000)]
    assert Pool().plus(pairs).sd == pytest.approx(0.02, rel=0.05)


def test_a_single_pair_says_nothing_by_itself() -> None:
    assert screen([(100, 110)], Pool()) is None and not looks_faster(None)
    assert screen([], Pool().plus(PAIRS)) is None and Pool().plus([(100, 110)]) == Pool()
    lent = screen([(100, 110)], Pool().plus(PAIRS))
    assert lent is not None and lent.dof == 1


def test_looking_faster_takes_nine_to_one() -> None:
    """t(0.90) of 7 degrees of freedom is 1.4149."""
    just, short = (Effect(log_ratio=t * 0.02, se=0.02, dof=7, sd=0.02) for t in (1.42, 1.41))
    assert looks_faster(just) and not looks_faster(short)
    assert not looks_faster(Effect(log_ratio=-0.5, se=0.02, dof=7, sd=0.02)), "slower is not faster"


# -- gaps -------------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_mean_gap() -> None:
    """t(0.95) of 4 degrees of freedom is 2.1318."""
    gaps = [0.1, 0.2, 0.3, 0.4, 0.5]
    reach = 2.1318 * math.sqrt(0.025 / 5)
    assert compute_mean_gap_interval(gaps) == pytest.approx((0.3 - reach, 0.3 + reach), rel=1e-4)
    assert compute_mean_gap_interval([0.2, 0.2]) == pytest.approx((0.2, 0.2))
    assert compute_mean_gap_interval([0.2]) is None and compute_mean_gap_interval([]) is None
