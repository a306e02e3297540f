"""Turns the runs of two arms and their parity into a verdict in one sentence.

It claims no speed if there are too few runs, no changed rung took effect, or the arms are not the same training;
"inconclusive" is a fine answer. Several arms against one base share the error rate (see ``compute_error_rate``): of
twenty experiments in which nothing differs, one reports a difference, however many arms they have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fastloop.judge.statistics import ALPHA, Effect, compute_interval, compute_mde_pct, estimate_effect
from fastloop.records.experiment import Comparison, Judged, Outcome, Sample, choose_digits
from fastloop.records.plan import say_count

LEAST_RUNS = 3
"""Runs per arm. A spread estimated from two runs is meaningless."""
LEAST_STEPS = 5
"""Optimizer steps in each window. The first few are not typical: their GPU is still cool, the queues still full."""
WIDE = 10
"""From this value on, an end of an interval is printed with three significant digits."""


def compare(base: Sample, arm: Sample, parity: Outcome, *, band_pct: float = 3.0, alpha: float = ALPHA) -> Comparison:
    """Judge one arm.

    Args:
        base: finished runs of the base. A run without a positive rate counts as lost.
        parity: whether the two are the same training.
        band_pct: differences within plus or minus this count as none. ``no_difference`` needs the whole interval inside
            it; a certain difference is reported, however small.
        alpha: how often the interval may miss the truth (``statistics.compute_error_rate``).
    """
    bases, arms = _Runs.of(base), _Runs.of(arm)
    fewest = min(len(bases.rates), len(arms.rates))
    found = estimate_effect(bases.rates, bases.places, arms.rates, arms.places) if fewest else None
    judged = found if fewest >= LEAST_RUNS else None
    ratio = judged.ratio if judged else None
    ci95 = compute_interval(judged, alpha) if judged else None
    mde = compute_mde_pct(judged.sd, len(bases.rates), len(arms.rates), judged.dof, alpha) if judged else None
    by_queues = _explain_queues(ci95, base, arm)
    verdict = "inconclusive" if by_queues else _choose_verdict(ci95, band_pct)
    figures = _describe_figures(verdict, ratio, ci95, alpha, _count(bases, arms))
    hopeless = explain_hopeless(base, arm)
    if against := _list_obstacles(bases, arms, judged, hopeless, by_queues, parity):
        verdict, why = "inconclusive", _write_sentence([*against, "" if hopeless else figures])
    else:
        why = _write_sentence(
            [figures + _explain_verdict(verdict, band_pct, mde, fewest), *_list_notes(base, arm, parity)]
        )
    return Comparison(
        arm=arm.name,
        verdict=verdict,
        why=why,
        ratio=ratio,
        ci95=ci95,
        mde_pct=mde,
        alpha=alpha,
        runs=fewest,
        parity=parity,
    )


def explain_hopeless(base: Sample, arm: Sample) -> str | None:
    """Why no number of such runs leads to a verdict; None if it may."""
    return _explain_same_arm(base, arm) or _explain_few_steps(base, arm)


def _explain_same_arm(base: Sample, arm: Sample) -> str | None:
    """Why the two arms are effectively the same although their rungs differ; None if something does differ.

    A rung that the arm switches off counts if it took effect in the base. Returns None unless both have a finished run,
    or the arm's plan tells.
    """
    if not arm.refused and not (base.samples_per_s and arm.samples_per_s):
        return None
    if not arm.changed_rungs or arm.changes_more or set(arm.changed_rungs) & _took(base, arm):
        return None
    why = _list_reasons(base, arm, arm.changed_rungs)
    said = "not run: none of its changes would take effect" if arm.refused else "no changed rung took effect"
    return f"{said}: {why}"


def _explain_few_steps(base: Sample, arm: Sample) -> str | None:
    """Why the windows have too few steps for a rate; None if they have enough."""
    for side in (base, arm):
        if side.timed_steps is not None and side.timed_steps < LEAST_STEPS:
            return (
                f"only {say_count(side.timed_steps, 'step')} of {side.name} could be timed, and a verdict needs"
                f" {LEAST_STEPS}: the rest went to warm-up and filling queues; train longer, or lower"
                " watch.warmup_steps"
            )
    return None


def is_final(comparisons: Sequence[Comparison], hopeless: Collection[str] = ()) -> bool:
    """Whether an experiment may end at this look, because more runs would not settle anything.

    Args:
        hopeless: arms that no number of runs can decide (``explain_hopeless``, or nothing left to run). A failed parity
            gate is final by itself.
    """
    return all(one.parity.passed is False or one.arm in hopeless or _is_settled(one) for one in comparisons)


def _is_settled(one: Comparison) -> bool:
    """Whether the comparison is decided. For a faster arm, the loss gate must also be decided, which takes runs too."""
    waits = one.verdict == "faster" and "loss" in one.parity.undecided
    return one.verdict != "inconclusive" and not waits


def exit_code(comparisons: Sequence[Comparison], failed: bool) -> int:
    """1 a run failed, 3 parity failed, 4 inconclusive, 0 otherwise; the first that applies to any arm.

    A faster arm is also inconclusive if a required gate did not decide whether it is the same training; an arm without
    a difference, if its gradient could not be compared. A slower one is rejected either way.
    """
    if failed:
        return 1
    if any(one.parity.passed is False for one in comparisons):
        return 3
    unproven = (_is_unproven(one) for one in comparisons)
    return 4 if any(one.verdict == "inconclusive" for one in comparisons) or any(unproven) else 0


def _is_unproven(one: Comparison) -> bool:
    open_ = one.parity.undecided
    return bool(open_) if one.verdict == "faster" else one.verdict != "slower" and "gradient" in open_


@dataclass(frozen=True)
class _Runs:
    rates: list[float]
    places: list[int]

    @classmethod
    def of(cls, sample: Sample) -> _Runs:
        runs = [
            (rate, place)
            for rate, place in zip(sample.samples_per_s, sample.places, strict=True)
            if math.isfinite(rate) and rate > 0
        ]
        return cls([rate for rate, _ in runs], [place for _, place in runs])


def _choose_verdict(ci95: tuple[float, float] | None, band_pct: float) -> Judged:
    if ci95 is None:
        return "inconclusive"
    low, high = ci95
    if low > 1 or high < 1:
        return "faster" if low > 1 else "slower"
    return "no_difference" if 1 - band_pct / 100 < low and high < 1 + band_pct / 100 else "inconclusive"


def _explain_queues(ci95: tuple[float, float] | None, base: Sample, arm: Sample) -> str | None:
    """Why a certain difference may be nothing but batches that were begun before the windows; None if it is more."""
    low, high = ci95 or (1.0, 1.0)
    if low > 1 >= low * (1 - arm.queue_error_pct / 100):
        quick = arm
    elif high < 1 <= high / (1 - min(99.9, base.queue_error_pct) / 100):
        quick = base
    else:
        return None
    return (
        f"{quick.name}'s window is too short for its queues: batches begun before it may be up to"
        f" {quick.queue_error_pct:.0f} % of its rate; raise --steps, or omit it"
    )


def _list_obstacles(
    bases: _Runs, arms: _Runs, judged: Effect | None, hopeless: str | None, by_queues: str | None, parity: Outcome
) -> list[str]:
    """Reasons why there can be no verdict, most serious first."""
    if hopeless and not arms.rates:  # its plan tells
        return [hopeless]
    found = []
    if parity.passed is False:
        gates = [f"{gate.name} failed: {gate.why}" for gate in parity.gates if gate.passed is False]
        found.append("no speed is claimed: " + (", ".join(gates) or parity.why or "parity failed"))
    elif min(len(bases.rates), len(arms.rates)) < LEAST_RUNS:
        found.append(f"insufficient: {_count(bases, arms)}, a verdict needs {LEAST_RUNS}")
    elif judged is None:
        found.append("the order of the runs cannot be separated from the arms")
    elif by_queues:
        found.append(by_queues)
    return [*([hopeless] if hopeless else []), *found]


def _list_notes(base: Sample, arm: Sample, parity: Outcome) -> list[str]:
    """Further notes that a reader of a verdict needs."""
    took = _took(base, arm)
    idle = [rung for rung in arm.changed_rungs if rung not in took]
    notes = [f"no credit to {_list_reasons(base, arm, idle)}"] if idle else []
    return [*notes, parity.why] if parity.passed is None and parity.why else notes


def _took(base: Sample, arm: Sample) -> set[str]:
    return {*base.active_rungs, *arm.active_rungs}


def _list_reasons(base: Sample, arm: Sample, rungs: Sequence[str]) -> str:
    whys = {**base.inactive_rungs, **arm.inactive_rungs}
    return ", ".join(f"{rung} ({whys[rung]})" if whys.get(rung) else rung for rung in rungs)


def _count(base: _Runs, arm: _Runs) -> str:
    n_base, n_arm = len(base.rates), len(arm.rates)
    said = say_count(n_base, "run")
    return f"{said} of each" if n_base == n_arm else f"{said} of the base and {n_arm} of the arm"


def _describe_figures(
    verdict: Judged, ratio: float | None, ci95: tuple[float, float] | None, alpha: float, count: str
) -> str:
    """The ratio with its interval; only the interval if undecided, because the ratio would look like a claim."""
    if ratio is None or ci95 is None:
        return ""
    digits = choose_digits(ci95)
    low, high = (f"{bound:.{digits}f}" if bound < WIDE else f"{bound:.3g}" for bound in ci95)
    level = f"{100 * (1 - alpha):.4g} % interval"
    if verdict == "inconclusive":
        return f"anything from {low}x to {high}x is possible ({level}, {count})"
    return f"{ratio:.{digits}f}x, {level} {low} to {high}, {count}"


def _explain_verdict(verdict: Judged, band_pct: float, mde: float | None, runs: int) -> str:
    if verdict == "no_difference":
        return f", entirely within {band_pct:g} % of 1"
    if verdict == "inconclusive" and mde is not None:
        least = f"{mde:,.0f}" if mde >= WIDE else f"{mde:.1f}"
        return (
            f": {runs} runs this noisy can only show differences above {least} %; repeat with more --runs, or on a"
            " quieter machine"
        )
    return ""


def _write_sentence(parts: Sequence[str]) -> str:
    return "; ".join(part for part in parts if part)
