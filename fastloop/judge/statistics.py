"""The statistics of an experiment: plain numbers in, plain numbers out. ``None`` = the data cannot tell.

The run is the unit, never the step: steps of one run share its machine, its seed and its luck. Everything is done on
log(samples per second), so that a ratio is a difference and its interval is the same read from either side. Error
rates and power of all this are simulated in tests/judge/test_judge.py.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy
from scipy.special import stdtrit

Runs = int | Literal["auto"]
"""Of each arm: a number, or as many as it takes, judged at the planned looks."""

ALPHA = 0.05
"""How often an experiment may name a difference that is none: once in twenty, whatever it compares and looks at."""

POWER = 0.8
"""How often a difference of the smallest visible size is seen."""

LOOKS = (3, 5, 7, 10)
"""Rounds after which ``auto`` may judge. Judging after every round from 3 to 10 would cry wolf 16 times in 100."""

LOOKS_FASTER = 0.90
"""One-sided confidence at which a screen keeps a change: one idle change in ten gets through, to be caught by the
fresh experiment at the end, and few real ones are lost to two pairs of runs."""

_LEAST_SD = 1e-9
"""Spread below which rates are equal but for rounding."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One arm against the base, on the logarithmic scale."""

    log_ratio: float
    """log(rate of the arm / rate of the base)."""
    se: float
    """Standard error of it."""
    dof: int
    """Degrees of freedom behind it."""
    sd: float
    """Spread of log(rate) from run to run: 0.015 is 1.5 %."""

    @property
    def ratio(self) -> float:
        return _exp(self.log_ratio)


def order(arms: int, rounds: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Which arm runs when: each round has every arm once; rounds come in pairs, a random order and its reverse.

    A drift in a straight line therefore cancels within each pair. More rounds continue a shorter plan of the same
    seed, so an experiment can be resumed and prolonged.
    """
    dice = random.Random(seed)
    plan: list[tuple[int, ...]] = []
    for _ in range(0, rounds, 2):
        there = dice.sample(range(arms), arms)
        plan += [tuple(there), tuple(reversed(there))]
    return tuple(plan[:rounds])


def effect(
    base: Sequence[float], base_places: Sequence[float], arm: Sequence[float], arm_places: Sequence[float]
) -> Effect | None:
    """Least squares of ``log(rate) ~ arm + order``.

    Args:
        base: samples per second of the base's runs, at least one, all above 0; ``arm`` likewise.
        base_places: where each of them stood among all runs of the experiment; ``arm_places`` likewise.

    The arms may have different numbers of runs. Returns None below one degree of freedom, and where order and arm are
    one and the same (each arm's runs all at one place, the arms' places apart). Where all runs have one place, the
    order is unknown and left out, which gives one degree of freedom more.
    """
    if len(base) != len(base_places) or len(arm) != len(arm_places) or not base or not arm:
        raise ValueError("every run needs a rate and a place, and every arm a run")
    rates, places = numpy.log([*base, *arm]), numpy.array([*base_places, *arm_places], dtype=float)
    is_arm = numpy.repeat([0.0, 1.0], [len(base), len(arm)])
    columns = [numpy.ones_like(rates), is_arm, places - places.mean()][: 3 if numpy.ptp(places) else 2]
    design = numpy.column_stack(columns)
    found, _, rank, _ = numpy.linalg.lstsq(design, rates, rcond=None)
    dof = len(rates) - len(columns)
    if dof < 1 or rank < len(columns):
        return None
    sd = max(math.sqrt(numpy.sum((rates - design @ found) ** 2) / dof), _LEAST_SD)
    se = sd * math.sqrt(numpy.linalg.inv(design.T @ design)[1, 1])
    return Effect(log_ratio=float(found[1]), se=se, dof=dof, sd=sd)


def interval(effect: Effect, alpha: float = ALPHA) -> tuple[float, float]:
    """Of the ratio: it misses the truth ``alpha`` of the time, half of that on either side."""
    reach = _t(effect.dof, 1 - alpha / 2) * effect.se
    return _exp(effect.log_ratio - reach), _exp(effect.log_ratio + reach)


def mde_pct(sd: float, n_a: int, n_b: int, dof: int, alpha: float = ALPHA) -> float:
    """Smallest speed-up, in percent, that ``n_a`` against ``n_b`` runs show with the probability ``POWER``.

    ``(t(1 - alpha/2) + t(POWER)) * sd * sqrt(1/n_a + 1/n_b)`` on the logarithmic scale.
    """
    return 100 * (_exp((_t(dof, 1 - alpha / 2) + _t(dof, POWER)) * sd * math.sqrt(1 / n_a + 1 / n_b)) - 1)


def error_rate(runs: Runs, arms: int = 1) -> float:
    """The error rate of one comparison at one look.

    ``ALPHA`` is shared out in equal parts over the arms that meet the base and, with ``auto``, over its looks
    (Bonferroni): however they hang together, all of them are right at once at least 1 - ``ALPHA`` of the time.
    """
    return ALPHA / arms / (len(LOOKS) if runs == "auto" else 1)


def due(rounds: int, runs: Runs) -> bool:
    """Whether to judge after so many finished rounds."""
    return rounds in LOOKS if runs == "auto" else rounds == runs


def most_rounds(runs: Runs) -> int:
    """Rounds after which the experiment ends in any case."""
    return LOOKS[-1] if runs == "auto" else runs


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Spread from run to run, gathered over several screens too short to know it by themselves.

    It takes for granted that the arms spread alike, in percent. Two plain numbers, to be written down and resumed.
    """

    squares: float = 0.0
    """Sum of squared residuals of log(rate) of single runs."""
    dof: int = 0

    @property
    def sd(self) -> float | None:
        """Of log(rate) of one run; None as long as nothing is known."""
        return max(math.sqrt(self.squares / self.dof), _LEAST_SD) if self.dof else None

    def plus(self, pairs: Sequence[tuple[float, float]]) -> Pool:
        """With the spread among the log ratios of one screen's pairs: half their variance is that of a run.

        A drift adds to it, as neighbouring pairs run in opposite order: screens get more careful, not bolder.
        """
        dof = len(pairs) - 1
        if dof < 1:
            return self
        return Pool(squares=self.squares + 0.5 * dof * statistics.variance(_log_ratios(pairs)), dof=self.dof + dof)


def screen(pairs: Sequence[tuple[float, float]], pool: Pool) -> Effect | None:
    """A quick look at one change: a few pairs of neighbouring runs, the spread pooled with that of earlier screens.

    Args:
        pairs: (base, arm) samples per second, run in alternating order: A B, B A (``order(2, 2, seed)``).
        pool: of what was run before, without these pairs; ``pool.plus(pairs)`` is the one for the next screen.

    Returns None without pairs, and where neither pairs nor pool tell the spread. Kept winners look better than they
    are: what a climb claims in the end comes from a fresh experiment.
    """
    sd, dof = pool.plus(pairs).sd, pool.plus(pairs).dof
    if not pairs or sd is None:
        return None
    return Effect(log_ratio=statistics.fmean(_log_ratios(pairs)), se=sd * math.sqrt(2 / len(pairs)), dof=dof, sd=sd)


def looks_faster(effect: Effect | None) -> bool:
    """Whether a screen keeps its change: faster by a one-sided t test."""
    return effect is not None and effect.log_ratio > _t(effect.dof, LOOKS_FASTER) * effect.se


def mean_gap_interval(gaps: Sequence[float], level: float = 0.90) -> tuple[float, float] | None:
    """t interval of the mean of ``gaps``, in their unit; None for fewer than two.

    Meant for the loss gate: one gap per seed, arm minus base, seeds paired.
    """
    if len(gaps) < 2:
        return None
    middle = statistics.fmean(gaps)
    reach = _t(len(gaps) - 1, (1 + level) / 2) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return middle - reach, middle + reach


def _log_ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [math.log(arm / base) for base, arm in pairs]


def _t(dof: int, probability: float) -> float:
    """Quantile of Student's t."""
    return float(stdtrit(dof, probability))


def _exp(log: float) -> float:
    """exp, without an overflow for an interval that says nothing."""
    return math.exp(min(log, 700.0))
