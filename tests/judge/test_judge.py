"""The judge on trial: simulated experiments with a known truth, through the real order and the real verdict.

Runs spread by 1.5 % and the machine drifts by 0 or 4 % over the experiment. Of 200 experiments an honest judge at 5 %
may be wrong 18 times (5 % and its own noise). The controls show that the same trial convicts judges that are not
honest: a blocked order, looking after every run, several arms each at 5 %, and silence taken for proof.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from fastloop.judge.statistics import (
    LOOKS,
    Effect,
    Pool,
    Runs,
    compute_error_rate,
    compute_interval,
    count_most_rounds,
    estimate_effect,
    is_due,
    looks_faster,
    order,
    screen,
)
from fastloop.judge.verdict import compare, exit_code, is_final
from fastloop.records.experiment import Comparison, Outcome, Sample

SPREAD, REPEATS, WRONG, RIGHT = 0.015, 200, 18, 180
DRIFTS = (0.0, 0.04)
SAME = Outcome(parity_class="exact", passed=True, why="all gates passed")

Judge = Callable[[float, float, int], Comparison]
"""(true ratio, drift, seed) to a verdict."""


class Machine:
    """Runs arms of known speed. The drift is over the whole experiment as it was planned."""

    def __init__(self, truths: tuple[float, ...], drift: float, seed: int, runs: int) -> None:
        self.truths, self.drift, self.last = truths, drift, runs * len(truths) - 1
        self.dice = random.Random(f"machine {seed} {drift}")
        self.rates: list[list[float]] = [[] for _ in truths]
        self.places: list[list[int]] = [[] for _ in truths]

    def run(self, arm: int) -> None:
        place = sum(map(len, self.places))
        slow = math.exp(self.dice.gauss(0, SPREAD) - self.drift * place / self.last)
        self.rates[arm].append(400 * self.truths[arm] * slow)
        self.places[arm].append(place)

    def sample(self, arm: int) -> Sample:
        return Sample(name=f"arm{arm}", samples_per_s=tuple(self.rates[arm]), places=tuple(self.places[arm]))

    def effect(self) -> Effect:
        found = estimate_effect(self.rates[0], self.places[0], self.rates[1], self.places[1])
        assert found is not None
        return found


def judged(
    truths: tuple[float, ...], drift: float, seed: int, runs: Runs, alpha: float | None = None
) -> list[Comparison]:
    """An experiment as ``ab`` runs it: round by round, judged when due, ended when final."""
    alpha = compute_error_rate(runs, len(truths) - 1) if alpha is None else alpha
    machine = Machine(truths, drift, seed, count_most_rounds(runs))
    found: list[Comparison] = []
    for rounds, arms in enumerate(order(len(truths), count_most_rounds(runs), seed), start=1):
        for arm in arms:
            machine.run(arm)
        if is_due(rounds, runs):
            base, *others = map(machine.sample, range(len(truths)))
            found = [compare(base, other, SAME, alpha=alpha) for other in others]
            if is_final(found):
                break
    return found


def with_runs(runs: Runs) -> Judge:
    return lambda truth, drift, seed: judged((1.0, truth), drift, seed, runs)[0]


def tried(judge: Judge, truth: float, drift: float, repeats: int = REPEATS) -> list[Comparison]:
    return [judge(truth, drift, seed) for seed in range(repeats)]


def alarms(found: list[Comparison]) -> int:
    return sum(one.verdict in ("faster", "slower") for one in found)


def covering(found: list[Comparison], truth: float) -> int:
    return sum(one.ci95 is not None and one.ci95[0] <= truth <= one.ci95[1] for one in found)


JUDGES = pytest.mark.parametrize("runs", [5, "auto"], ids=["5 runs", "auto"])
MACHINES = pytest.mark.parametrize("drift", DRIFTS, ids=["steady", "drifting 4 %"])


@JUDGES
@MACHINES
def test_identical_arms_raise_few_alarms(runs: Runs, drift: float) -> None:
    found = tried(with_runs(runs), 1.0, drift)
    assert alarms(found) <= WRONG and covering(found, 1.0) >= RIGHT
    assert exit_code(found, failed=False) == 4, "among so many some are inconclusive, and that is said"


@JUDGES
@MACHINES
@pytest.mark.parametrize("truth", [1.05, 0.95], ids=["5 % faster", "5 % slower"])
def test_a_true_five_percent_is_found(runs: Runs, drift: float, truth: float) -> None:
    found = tried(with_runs(runs), truth, drift)
    right = "faster" if truth > 1 else "slower"
    assert sum(one.verdict == right for one in found) >= RIGHT
    assert covering(found, truth) >= RIGHT
    assert not {one.verdict for one in found} & ({"faster", "slower"} - {right}), "and never the wrong way round"


@pytest.mark.parametrize("runs", [3, 5, 10, "auto"], ids=["3 runs", "5 runs", "10 runs", "auto"])
@MACHINES
@pytest.mark.parametrize("truth", [1.04, 0.96], ids=["4 % faster", "4 % slower"])
def test_a_true_four_percent_is_not_called_no_difference(runs: Runs, drift: float, truth: float) -> None:
    found = tried(with_runs(runs), truth, drift)
    assert sum(one.verdict == "no_difference" for one in found) <= 0.05 * REPEATS


@MACHINES
def test_enough_runs_do_end_in_no_difference(drift: float) -> None:
    """Otherwise the test above is passed by never saying it."""
    assert sum(one.verdict == "no_difference" for one in tried(with_runs(10), 1.0, drift)) >= REPEATS // 2


def families(drift: float, runs: Runs, alpha: float | None = None) -> list[list[Comparison]]:
    """Four arms that are the base, against the base."""
    return [judged((1.0,) * 5, drift, seed, runs, alpha) for seed in range(REPEATS)]


@JUDGES
@MACHINES
def test_several_idle_arms_together_raise_as_few_alarms_as_one(runs: Runs, drift: float) -> None:
    found = families(drift, runs)
    assert sum(alarms(arms) > 0 for arms in found) <= WRONG
    assert sum(covering(arms, 1.0) == 4 for arms in found) >= REPEATS - WRONG, "their intervals hold together"


@MACHINES
def test_control_several_arms_each_at_its_own_five_percent_do_not(drift: float) -> None:
    found = families(drift, 5, compute_error_rate(5))
    assert sum(alarms(arms) > 0 for arms in found) > 2 * WRONG
    assert all(alarms([arms[at] for arms in found]) <= WRONG for at in range(4)), "one of them alone would be honest"


@MACHINES
def test_each_arm_of_several_is_judged_as_fairly(drift: float) -> None:
    found = [judged((1.0, 1.05, 1.0), drift, seed, "auto") for seed in range(REPEATS)]
    assert sum(arms[0].verdict == "faster" for arms in found) >= RIGHT
    assert alarms([arms[1] for arms in found]) <= WRONG


def test_auto_ends_early_where_the_answer_is_plain() -> None:
    assert {one.runs for one in tried(with_runs("auto"), 1.3, 0.04)} == {LOOKS[0]}
    assert {one.runs for one in tried(with_runs("auto"), 1.0, 0.04)} <= set(LOOKS)


@MACHINES
def test_lost_runs_cost_power_and_not_honesty(drift: float) -> None:
    """Every other experiment lost its arm's first two runs."""
    found = []
    for seed in range(REPEATS):
        machine = Machine((1.0, 1.0), drift, seed, 5)
        for arms in order(2, 5, seed):
            for arm in arms:
                machine.run(arm)
        base, arm_sample, lost = machine.sample(0), machine.sample(1), 2 * (seed % 2)
        found.append(
            compare(
                base,
                Sample(name="b", samples_per_s=arm_sample.samples_per_s[lost:], places=arm_sample.places[lost:]),
                SAME,
            )
        )
    assert alarms(found) <= WRONG and covering(found, 1.0) >= RIGHT and {one.runs for one in found} == {3, 5}


# -- screens ----------------------------------------------------------------------------------------------------------


def climbed(truth: float, drift: float, seed: int) -> list[bool]:
    """Six screens of two pairs each with one pool, as a climb does them."""
    pool, kept = Pool(), []
    for number in range(6):
        machine = Machine((1.0, truth), drift / 6, 6 * seed + number, 2)
        for arms in order(2, 2, seed + number):
            for arm in arms:
                machine.run(arm)
        pairs = list(zip(*machine.rates, strict=True))
        kept.append(looks_faster(screen(pairs, pool)))
        pool = pool.plus(pairs)
    return kept


@MACHINES
def test_a_screen_keeps_one_idle_change_in_ten_and_most_real_ones(drift: float) -> None:
    idle = [climbed(1.0, drift, seed) for seed in range(REPEATS)]
    assert 0.05 * 6 * REPEATS <= sum(map(sum, idle)) <= 0.13 * 6 * REPEATS
    real = [climbed(1.05, drift, seed) for seed in range(REPEATS)]
    alone, pooled = ([kept[number] for kept in real] for number in (0, 5))
    assert sum(pooled) >= RIGHT
    assert sum(alone) < 0.85 * sum(pooled), "the control: two pairs alone see much less"


# -- controls: judges that must not pass -------------------------------------------------------------------------------


def blocked(truth: float, drift: float, seed: int, *, runs: int = 5) -> Effect:
    """A A A A A B B B B B and a plain t test, blind to the order."""
    machine = Machine((1.0, truth), drift, seed, runs)
    for arm in [0] * runs + [1] * runs:
        machine.run(arm)
    nowhere = [0] * runs
    found = estimate_effect(machine.rates[0], nowhere, machine.rates[1], nowhere)
    assert found is not None and found.dof == 2 * runs - 2
    return found


def test_control_a_blocked_order_mistakes_drift_for_an_effect() -> None:
    def count_alarms(drift: float) -> int:
        intervals = [compute_interval(blocked(1.0, drift, seed)) for seed in range(REPEATS)]
        return sum(low > 1 or high < 1 for low, high in intervals)

    assert count_alarms(0.04) > 2 * WRONG
    assert count_alarms(0.0) <= WRONG, "the drift did it"


def peeking(truth: float, drift: float, seed: int, alpha: float) -> bool:
    """Look after every round from 3 to 10, each time at full ``alpha``, and stop at the first alarm."""
    machine = Machine((1.0, truth), drift, seed, 10)
    for rounds, arms in enumerate(order(2, 10, seed), start=1):
        for arm in arms:
            machine.run(arm)
        if rounds >= 3:
            low, high = compute_interval(machine.effect(), alpha)
            if low > 1 or high < 1:
                return True
    return False


@MACHINES
def test_control_peeking_spends_more_than_it_has(drift: float) -> None:
    peeked = sum(peeking(1.0, drift, seed, 0.05) for seed in range(REPEATS))
    assert peeked > WRONG and peeked > 2 * alarms(tried(with_runs("auto"), 1.0, drift))


def test_control_silence_is_no_proof_of_equality() -> None:
    """A judge that says "no difference" whenever it sees none would hide a true 4 %."""
    found = tried(with_runs(3), 1.04, 0.0)
    assert REPEATS - alarms(found) > 2 * 0.05 * REPEATS
