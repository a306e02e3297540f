"""Findings about repeated compiles, which should happen once, and about rungs that make the run slower.

Both come first in a summary, no matter what else slows the run down: a rate that leaves out the compiles, or that has
nothing to compare with, would hide that the run became slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.diagnose.attribution import WORTH_NAMING_PCT, StepParts
from fastloop.diagnose.finding import compute_gain_bound_pct
from fastloop.diagnose.remedies import Rungs
from fastloop.records.measurement import AUTOTUNE, COMPILE, VALIDATION_COMPILE, Measurement
from fastloop.records.plan import Finding, Verdict, say_count
from fastloop.records.readings import count_micro_batches, read_step_ms, to_number

STORM = "compile_storm"
"""The cause for which a rung's card may have better advice than the default."""
STORM_STEPS = 6
"""From this many steps with a compile, it is more than the first steps, the first validation and a last batch."""
STORM_PCT = 10.0
"""Smallest share of the fit for naming such compiles."""


def find_storm(seen: Measurement, rungs: Rungs, step: StepParts | None) -> Finding | None:
    """Find recompiles throughout the run, by a rung or by the user's torch.compile."""
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
    facts = f"torch.compile ran {least}{say_count(int(found.get('count') or 1), 'time')} and took {seconds}"
    of_window = "" if share is None else f", {ms:.1f} ms of each step in the window"
    remedy = rungs.choose(
        seen,
        STORM,
        "mark the dimensions that change as dynamic (torch._dynamo.mark_dynamic, torch.compile(dynamic=True)), pad to"
        " a few lengths, or turn compiling off",
    )
    return Finding(
        bottleneck="host_other",
        share_pct=share,
        why=f"{facts}, in {steps:.0f} of {seen.total_steps} steps{of_window}; {remedy.says}",
        patch=remedy.patch,
        ceiling_gain_pct=None if share is None else compute_gain_bound_pct(share),
        detail=tuple(f"recompiled: {reason}" for reason in reasons),
        title="KEEPS RECOMPILING",
        alarm=f"{facts}{f' ({reasons[0]})' if reasons else ''}",
    )


# -- slower than without the rung, in the run's own steps ------------------------------------------------------------


def find_slowdown(seen: Measurement, verdicts: Sequence[Verdict]) -> Finding | None:
    """Find the rung that makes the run slower, beyond noise; None if there is none, or if it is unknown.

    Batches that alternated with and without rungs decide, ``evidence["second_look"]``. Steps that are slower than the
    rehearsed modules prove nothing: the user's code may do more in a step than call them.
    """
    active = [verdict for verdict in verdicts if verdict.took]
    looked = seen.evidence.get("second_look") or {}
    rungs = [verdict.rung for verdict in active if verdict.rung in (looked.get("rungs") or ())]
    name = " or ".join(rungs)
    found = _read_look(looked, name) if rungs else None
    if found is None:
        return _find_worker_loss(seen, active)
    more_ms, facts = found
    share = _compute_share_pct(seen, more_ms)
    return Finding(
        bottleneck="compute_bound",
        share_pct=share,
        why=f"{facts}; switch {name} off",
        patch={"rungs": {rungs[0]: {"enabled": False}}},
        ceiling_gain_pct=None if share is None else compute_gain_bound_pct(share),
        title=f"SLOWER WITH {rungs[0].upper()}",
        alarm=facts,
    )


def _find_worker_loss(seen: Measurement, active: Sequence[Verdict]) -> Finding | None:
    """Find a rung's worker processes if taking a batch from one takes longer than making it."""
    step_ms = read_step_ms(seen)
    for verdict in active:
        loss = (seen.evidence.get(verdict.rung) or {}).get("loss_ms") or (None, None)
        took_ms, made_ms = map(to_number, loss)
        if took_ms is None or made_ms is None or not step_ms:
            continue
        share = 100 * min(step_ms, (took_ms - made_ms) * count_micro_batches(seen)) / step_ms
        if share < WORTH_NAMING_PCT:
            continue
        facts = (
            f"a batch takes {made_ms:.2f} ms to make, but taking it from a worker takes {took_ms:.2f} ms"
            " (medians of the first batches)"
        )
        return Finding(
            bottleneck="data_wait",
            share_pct=share,
            why=f"{facts}; switch {verdict.rung} off",
            patch={"rungs": {verdict.rung: {"enabled": False}}},
            ceiling_gain_pct=compute_gain_bound_pct(share),
            title=f"SLOWER WITH {verdict.rung.upper()}",
            alarm=f"{took_ms:.2f} ms for a batch from a worker, {made_ms:.2f} ms to make it",
        )
    return None


def _compute_share_pct(seen: Measurement, more_ms: float) -> float | None:
    """Return the slowdown in percent of a step, at most forward and backward: only these have become slower."""
    step_ms = read_step_ms(seen)
    parts = [ms for part in ("forward", "backward") if (ms := to_number(seen.parts_ms.get(part)))]
    if not step_ms:
        return None
    most_ms = sum(parts) if parts else step_ms
    return 100 * min(more_ms * count_micro_batches(seen), most_ms) / step_ms


def _read_look(looked: Mapping[str, Any], name: str) -> tuple[float, str] | None:
    """Return by how many milliseconds forward and backward of a batch are slower with the rungs of this name than
    without, and the text; None unless they are slower by the margin at which a rung is switched off."""
    keys = ("with_ms", "without_ms", "low_ms", "high_ms", "n")
    with_ms, without_ms, low_ms, high_ms, n = (to_number(looked.get(key)) for key in keys)
    if with_ms is None or without_ms is None or low_ms is None or high_ms is None or n is None:
        return None
    if not looked.get("is_slower"):
        return None
    facts = (
        f"forward and backward take {with_ms:.1f} ms with {name}, {without_ms:.1f} ms without"
        f" (n = {n:.0f} each, slower by {low_ms:.1f} to {high_ms:.1f} ms, 95 %)"
    )
    return with_ms - without_ms, facts
