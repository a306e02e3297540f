"""The statistics of an experiment: plain numbers in, plain numbers out. ``None`` = the data do not suffice.

The unit of observation is the run, never the step: steps of one run share its machine, its seed and its luck. All
computations use log(samples per second), so that a ratio becomes a difference and its interval is symmetric between the
arms. tests/judge/test_judge.py simulates error rates and power.
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
"""Runs per arm: a number, or as many as needed, judged at the planned looks."""

ALPHA = 0.05
"""An experiment may report a nonexistent difference once in twenty, over all its comparisons and looks."""

POWER = 0.8
"""The probability of detecting a difference of the smallest visible size."""

LOOKS = (3, 5, 7, 10)
"""Rounds after which ``auto`` may judge. Judging after every round from 3 to 10 would give 16 false alarms in 100."""

LOOKS_FASTER = 0.90
"""One-sided confidence at which a screen keeps a change: one useless change in ten passes, to be caught by the fresh
experiment at the end, while few real gains are lost with only two pairs of runs."""

_LEAST_SD = 1e-9
"""Below this spread, rates are equal except for rounding."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One arm against the base, on the logarithmic scale."""

    log_ratio: float
    """log(rate of the arm / rate of the base)."""
    se: float
    """Its standard error."""
    dof: int
    """Degrees of freedom behind it."""
    sd: float
    """Spread of log(rate) from run to run: 0.015 is 1.5 %."""

    @property
    def ratio(self) -> float:
        return _exponentiate(self.log_ratio)


def order(arms: int, rounds: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """The order of the runs: each round has every arm once; rounds come in pairs, a random order and its reverse.

    A linear drift therefore cancels within each pair. A longer plan starts with the shorter plan of the same seed, so
    an experiment can be resumed and extended.
    """
    dice = random.Random(seed)
    plan: list[tuple[int, ...]] = []
    for _ in range(0, rounds, 2):
        there = dice.sample(range(arms), arms)
        plan += [tuple(there), tuple(reversed(there))]
    return tuple(plan[:rounds])


def estimate_effect(
    base: Sequence[float], base_places: Sequence[float], arm: Sequence[float], arm_places: Sequence[float]
) -> Effect | None:
    """Least squares of ``log(rate) ~ arm + order``.

    Args:
        base: samples per second of the base's runs, at least one, all above 0; ``arm`` likewise.
        base_places: position of each run among all runs of the experiment; ``arm_places`` likewise.

    The arms may have different numbers of runs. Returns None below one degree of freedom, and if order and arm are
    confounded (all runs of each arm at one place, different for each arm). If all runs share one place, the order is
    unknown and left out, which adds one degree of freedom.
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


def compute_interval(effect: Effect, alpha: float = ALPHA) -> tuple[float, float]:
    """Confidence interval of the ratio: it misses the truth with probability ``alpha``, half of that on either side."""
    reach = _compute_t_quantile(effect.dof, 1 - alpha / 2) * effect.se
    return _exponentiate(effect.log_ratio - reach), _exponentiate(effect.log_ratio + reach)


def compute_mde_pct(sd: float, n_a: int, n_b: int, dof: int, alpha: float = ALPHA) -> float:
    """Smallest speedup, in percent, that ``n_a`` against ``n_b`` runs detect with probability ``POWER``.

    ``(t(1 - alpha/2) + t(POWER)) * sd * sqrt(1/n_a + 1/n_b)`` on the logarithmic scale.
    """
    reach = _compute_t_quantile(dof, 1 - alpha / 2) + _compute_t_quantile(dof, POWER)
    return 100 * (_exponentiate(reach * sd * math.sqrt(1 / n_a + 1 / n_b)) - 1)


def compute_error_rate(runs: Runs, arms: int = 1) -> float:
    """The error rate of one comparison at one look.

    ``ALPHA`` is divided equally among the arms compared with the base and, with ``auto``, among its looks (Bonferroni):
    however they are correlated, all comparisons are right at once with probability at least 1 - ``ALPHA``.
    """
    return ALPHA / arms / (len(LOOKS) if runs == "auto" else 1)


def is_due(rounds: int, runs: Runs) -> bool:
    """Whether to judge after this many finished rounds."""
    return rounds in LOOKS if runs == "auto" else rounds == runs


def count_most_rounds(runs: Runs) -> int:
    """The largest number of rounds in an experiment."""
    return LOOKS[-1] if runs == "auto" else runs


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Run-to-run spread, pooled over several screens that are each too short to estimate it.

    Assumes that all arms have the same spread, in percent. Two plain numbers, easy to save and resume.
    """

    squares: float = 0.0
    """Sum of squared residuals of log(rate) of single runs."""
    dof: int = 0

    @property
    def sd(self) -> float | None:
        """Standard deviation of log(rate) of one run; None if unknown."""
        return max(math.sqrt(self.squares / self.dof), _LEAST_SD) if self.dof else None

    def plus(self, pairs: Sequence[tuple[float, float]]) -> Pool:
        """Add the spread among the log ratios of one screen's pairs: half their variance is that of a run.

        A drift increases it, because neighboring pairs run in opposite order: this makes screens more conservative.
        """
        dof = len(pairs) - 1
        if dof < 1:
            return self
        return Pool(squares=self.squares + 0.5 * dof * statistics.variance(_log_ratios(pairs)), dof=self.dof + dof)


def screen(pairs: Sequence[tuple[float, float]], pool: Pool) -> Effect | None:
    """A quick look at one change: a few pairs of neighboring runs, with the spread pooled from earlier screens.

    Args:
        pairs: (base, arm) samples per second, run in alternating order: A B, B A (``order(2, 2, seed)``).
        pool: spread of earlier runs, without these pairs; ``pool.plus(pairs)`` is the one for the next screen.

    Returns None without pairs, or if neither pairs nor pool determine the spread. Selected winners look better than
    they are, so a climb's final claim comes from a fresh experiment.
    """
    sd, dof = pool.plus(pairs).sd, pool.plus(pairs).dof
    if not pairs or sd is None:
        return None
    return Effect(log_ratio=statistics.fmean(_log_ratios(pairs)), se=sd * math.sqrt(2 / len(pairs)), dof=dof, sd=sd)


def looks_faster(effect: Effect | None) -> bool:
    """Whether a screen keeps its change: faster by a one-sided t test."""
    return effect is not None and effect.log_ratio > _compute_t_quantile(effect.dof, LOOKS_FASTER) * effect.se


def compute_mean_gap_interval(gaps: Sequence[float], level: float = 0.90) -> tuple[float, float] | None:
    """t interval of the mean of ``gaps``, in their unit; None for fewer than two.

    For the loss gate: one gap per seed, arm minus base, seeds paired.
    """
    if len(gaps) < 2:
        return None
    middle = statistics.fmean(gaps)
    reach = _compute_t_quantile(len(gaps) - 1, (1 + level) / 2) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return middle - reach, middle + reach


def _log_ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [math.log(arm / base) for base, arm in pairs]


def _compute_t_quantile(dof: int, probability: float) -> float:
    """Quantile of Student's t."""
    return float(stdtrit(dof, probability))


def _exponentiate(log: float) -> float:
    """exp, without overflow for an uninformative interval."""
    return math.exp(min(log, 700.0))
