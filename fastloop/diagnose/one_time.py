"""What should come once and does not: compiles that go on; and rungs with which the run is slower than without.

Both are said in the first line of a summary, whatever else holds the run up: a rate without the compiles, or beside no
other, would praise a run that has got slower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fastloop.diagnose.attribution import WORTH_NAMING_PCT, StepParts
from fastloop.diagnose.finding import bound_gain_pct
from fastloop.diagnose.remedies import Rungs
from fastloop.records.measurement import AUTOTUNE, COMPILE, GAPS, VALIDATION_COMPILE, Measurement
from fastloop.records.plan import Finding, Rehearsed, Verdict
from fastloop.records.readings import micro_batches, read_step_ms, to_number

STORM = "compile_storm"
"""The cause for which a rung's card may have better advice than ours."""
STORM_STEPS = 6
"""Steps with a compile from which on it is not a matter of the first steps, the first validation and a last batch."""
STORM_PCT = 10.0
"""Share of the fit that such compiles must have taken to be named."""
SLOWER = {"eager_steps": 1.05, "rehearsal": 1.5}
"""Times the reference beyond which the whole interval must lie. A rehearsal is of the modules alone, while a
training_step also computes losses and metrics."""
FEWEST = 5
"""Steps, of each kind, without which nothing is compared."""


def find_storm(seen: Measurement, rungs: Rungs, step: StepParts | None) -> Finding | None:
    """Compiles that go on through the run: of a rung, or by the user's own torch.compile."""
    found = seen.evidence.get("compilation") or {}
    causes = [seen.one_time_s.get(cause) for cause in (COMPILE, VALIDATION_COMPILE, AUTOTUNE)]
    took_s, fit_s = sum(to_number(seconds) or 0.0 for seconds in causes), to_number(found.get("fit_s"))
    steps, ms = to_number(found.get("steps")) or 0, to_number(found.get("ms_per_step"))
    share = None if ms is None or step is None else step.to_pct(ms)
    goes_on = share is not None and share >= WORTH_NAMING_PCT
    if not fit_s or not (goes_on or (steps >= STORM_STEPS and 100 * took_s >= STORM_PCT * fit_s)):
        return None
    reasons = [str(reason) for reason in found.get("reasons") or ()]
    least = "at least " if found.get("at_least") else ""
    seconds = f"{took_s:.{int(fit_s < 10)}f} s of this run's {fit_s:.{int(fit_s < 10)}f} s"
    facts = f"compile ran {least}{found.get('count')} times, {seconds}"
    of_window = "" if share is None else f", {ms:.1f} ms of each step in the window"
    remedy = rungs.choose(
        seen,
        STORM,
        "mark the dimensions that change as dynamic (torch._dynamo.mark_dynamic, torch.compile(dynamic=True)), pad to a"
        " few lengths, or do without compiling",
    )
    return Finding(
        bottleneck="host_other",
        share_pct=share,
        why=f"{facts}, in {steps:.0f} of {seen.total_steps} steps{of_window}; {remedy.says}",
        patch=remedy.patch,
        ceiling_gain_pct=None if share is None else bound_gain_pct(share),
        detail=tuple(f"compiled anew: {reason}" for reason in reasons),
        title="COMPILING AGAIN AND AGAIN",
        alarm=f"{facts}{f' ({reasons[0]})' if reasons else ''}",
    )


# -- slower than the run's own eager steps, or than the rehearsal's ----------------------------------------------------


class Times(NamedTuple):
    """Milliseconds of steps, or of what a rehearsal runs: the mean, its standard error, and how many."""

    mean_ms: float
    error_ms: float
    n: int


def find_slowdown(seen: Measurement, verdicts: Sequence[Verdict]) -> Finding | None:
    """The rung with which the steady steps are slower than without, beyond noise; None where none is, or it is unknown.

    The reference are the run's own steps before its rungs were switched on, ``evidence["eager_steps"]["step_ms"]``, a
    list without one-time costs; else the rehearsal's time of the user's modules, against forward and backward.
    """
    active = [verdict for verdict in verdicts if verdict.took]
    compared = _compare_steps(seen) or _compare_rehearsal(seen, active)
    if not active or compared is None:
        return None
    now, eager, words = compared
    df = min(now.n, eager.n if eager.n > 1 else now.n) - 1
    half = _t95(df) * math.hypot(now.error_ms, eager.error_ms)
    more = now.mean_ms - eager.mean_ms
    if more - half <= (SLOWER[words] - 1) * eager.mean_ms:
        return None
    rungs = _blame(seen, active)
    name = " or ".join(rungs)
    what, reference = {
        "eager_steps": ("steps take", f"the run's own {eager.n} steps without rungs took"),
        "rehearsal": ("forward and backward take", "without rungs the rehearsed batch took"),
    }[words]
    facts = (
        f"{what} {now.mean_ms:.1f} ms with {name}, {reference} {eager.mean_ms:.1f} ms"
        f" (n = {now.n}, slower by {more - half:.1f} to {more + half:.1f} ms, 95 %)"
    )
    gain = bound_gain_pct(100 * (more / now.mean_ms))
    return Finding(
        bottleneck="compute_bound",
        share_pct=100 * more / now.mean_ms,
        why=f"{facts}; switch {name} off",
        patch={"rungs": {rung: {"enabled": False} for rung in rungs[:1]}},
        ceiling_gain_pct=gain,
        title=f"SLOWER WITH {rungs[0].upper()}",
        alarm=facts,
    )


def _compare_steps(seen: Measurement) -> tuple[Times, Times, str] | None:
    """The window's steps beside the run's own eager ones."""
    found = (seen.evidence.get("eager_steps") or {}).get("step_ms") or ()
    eager = [ms for each in found if (ms := to_number(each))]
    now = _read_steady(seen)
    if now is None or len(eager) < FEWEST:
        return None
    error = statistics.stdev(eager) / math.sqrt(len(eager))
    return now, Times(statistics.mean(eager), error, len(eager)), "eager_steps"


def _compare_rehearsal(seen: Measurement, active: Sequence[Verdict]) -> tuple[Times, Times, str] | None:
    """Forward and backward of a batch beside what the same modules took eager; both of the step's own spread.

    Where batches differ in size, the quickest tenth of the steps must be slower too: the rehearsed one may be small.
    """
    tried = [verdict.rehearsed for verdict in active if verdict.rehearsed and verdict.rehearsed.of_batch]
    eager = [ms for each in tried if (ms := to_number(each.eager_ms))]
    parts = [to_number(seen.parts_ms.get(part)) for part in ("forward", "backward")]
    now, mean, quickest = _read_steady(seen), read_step_ms(seen), to_number(seen.step_ms.get("p10"))
    if not eager or now is None or mean is None or quickest is None or parts[0] is None or parts[1] is None:
        return None
    batch_ms, scale = (parts[0] + parts[1]) / micro_batches(seen), 1 / micro_batches(seen)
    if batch_ms * quickest / mean <= max(eager):
        return None
    return Times(batch_ms, now.error_ms * scale, now.n), Times(max(eager), 0.0, 1), "rehearsal"


def _read_steady(seen: Measurement) -> Times | None:
    """The window's steps without what comes now and then; their spread by deciles, which single pauses do not move."""
    mean = read_step_ms(seen)
    low, high = (to_number(seen.step_ms.get(name)) for name in ("p10", "p90"))
    if mean is None or low is None or high is None or seen.steps < FEWEST:
        return None
    rare = sum(to_number(seen.parts_ms.get(part)) or 0.0 for part in GAPS)
    pauses = to_number((seen.evidence.get("pauses") or {}).get("ms_per_step")) or 0.0
    deviation = (high - low) / (2 * 1.2816)
    return Times(max(0.0, mean - max(rare, pauses)), deviation / math.sqrt(seen.steps), seen.steps)


def _blame(seen: Measurement, active: Sequence[Verdict]) -> list[str]:
    """The rung that costs: the one that rehearsed slowest against what was kept before it, where it cost anything; else
    the one that goes on paying what should come once; else all that were rehearsed, or are on."""
    costs, before = dict[str, float](), None
    for verdict in active:
        tried = verdict.rehearsed or Rehearsed()
        eager, changed = to_number(tried.eager_ms), to_number(tried.changed_ms)
        if eager is None or changed is None:
            continue
        costs[verdict.rung] = changed - (before if tried.of_batch and before is not None else eager)
        before = changed if tried.of_batch else before
    if costs and max(costs.values()) > 0:
        return [max(costs, key=costs.__getitem__)]
    again = [verdict.rung for verdict in active if seen.one_time_s.get(verdict.rung)]
    if again and (seen.evidence.get("compilation") or {}).get("ms_per_step"):
        return again[:1]
    return list(costs) or [verdict.rung for verdict in active]


def _t95(df: int) -> float:
    """Two-sided 95 % quantile of Student's t, by its expansion around the normal one; within 2 % from 4 on."""
    return 1.96 + 2.372 / df + 2.82 / df**2
