"""Reasons to doubt a run's figures, one sentence each: the state of the machine, long steps, disturbed trials. And the
line that says where the loop waits for its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.numbers import format_short
from fastloop.records.measurement import CEILINGS, DISTURBED, Measurement, measure_unevenness
from fastloop.records.plan import Finding, say_count
from fastloop.records.readings import read_requested_garbage, read_step_ms

DRIFTED_PCT = 10.0
WORTH_A_NOTE = 0.05
"""Smallest share of the step for which the user's own garbage collection is named."""
LONG_STEPS = ("the mean step is", "were so long that")
"""Phrases in a finding about a few long steps."""


def list_caveats(seen: Measurement, findings: Sequence[Finding] = ()) -> list[str]:
    """Return the reasons to doubt the figures, and costs that lie in several parts of the step, as one text, without
    those that findings mention; empty if none."""
    is_named = any(words in finding.why for finding in findings for words in LONG_STEPS)
    repeats = (seen.evidence.get("loader") or {}).get("repeats")
    caveats = [
        *([] if repeats is None else [repeats]),
        *seen.state,
        *_list_resumed(seen),
        *_list_skipped_steps(seen),
        *_list_missing_trace(seen),
        *([] if is_named else list_unevenness(seen)),
        *_list_requested_garbage(seen, findings),
        *_list_disturbances(seen),
        *_list_drift(seen),
    ]
    return ["; ".join(caveats)] if caveats else []


def _list_resumed(seen: Measurement) -> list[str]:
    """Report that the run continued an epoch, which Lightning alone would have begun again in another order."""
    if not (found := seen.evidence.get("resumed")):
        return []
    return [
        f"training resumed after batch {found['batches']} of epoch {found['epoch']}, with the remaining samples;"
        " without fastloop, the sampler would have started over"
    ]


def _list_skipped_steps(seen: Measurement) -> list[str]:
    """Report the optimizer steps that a loss scaler left out."""
    if not (skipped := (seen.evidence.get("model") or {}).get("skipped_steps")):
        return []
    steps = say_count(skipped, "optimizer step")
    return [f"the loss scaler skipped {steps} whose gradients overflowed float16; schedulers advanced anyway"]


def _list_requested_garbage(seen: Measurement, findings: Sequence[Finding]) -> list[str]:
    """Report a line that collects garbage for a twentieth of the step or more, unless a finding names it."""
    line, ms = read_requested_garbage(seen)
    if not ms or ms < WORTH_A_NOTE * (read_step_ms(seen) or ms) or any(line in finding.why for finding in findings):
        return []
    return [f"{line} takes {ms:.1f} ms of each step"]


def _list_missing_trace(seen: Measurement) -> list[str]:
    """Report a requested trace that is missing or incomplete."""
    found = seen.kernels or {}
    if skipped := found.get("skipped"):
        return [f"no trace: {skipped}"]
    steps, wanted = found.get("steps") or 0, found.get("asked_steps") or 0
    ended = f"the trace covers {steps} {'step' if steps == 1 else 'steps'}, not {wanted}: training ended early"
    return [ended] if 0 < steps < wanted else []


def list_unevenness(seen: Measurement) -> list[str]:
    """Report that a few long steps dominate the means."""
    known_ms = (seen.evidence.get("compilation") or {}).get("ms_per_step")
    times = measure_unevenness(seen, known_ms or 0.0)
    if times is None:
        return []
    return [f"the mean step is {times:.1f} times the median one: a few long steps distort these figures"]


def _list_disturbances(seen: Measurement) -> list[str]:
    now = seen.samples_per_s
    slow = [(name, rate) for name in CEILINGS if now and (rate := seen.ceilings.get(name)) and rate < DISTURBED * now]
    return [
        f"the trial {name} was slower than the unchanged run ({rate:,.0f} instead of {now:,.0f} samples/s):"
        " something else on the machine disturbed it; run it again"
        for name, rate in slow
    ]


def _list_drift(seen: Measurement) -> list[str]:
    drifted = [look for look in seen.drift if (look.get("change_pct") or 0) >= DRIFTED_PCT]
    if not drifted:
        return []
    last = drifted[-1]
    longer = f"a step took {last['change_pct']:.0f} % longer at step {last.get('step')} than in the timed window"
    return [f"{longer}{f': {why}' if (why := last.get('why')) else ''}"]


# -- where the loop waits for its device, in one line: the result of ``fastloop diagnose --syncs`` ---------------------

MOST = 3
"""Most places in the line; the report has all of them."""


def count_hunted_steps(seen: Measurement) -> int | None:
    """Return the steps in which every synchronization was searched for; None if that was not requested."""
    found = (seen.evidence.get("syncs") or {}).get("hunted_steps")
    return None if found is None else int(found)


def describe_syncs(seen: Measurement) -> list[str]:
    """Describe the most expensive places, or say that none were found; empty if they were not searched for."""
    if not seen.syncs:
        if (hunted := count_hunted_steps(seen)) is None:
            return []
        return [f"none found, in {hunted} steps" if hunted else "n/a: training ended before the search"]
    places = [_place(sync, seen.device) for sync in seen.syncs[:MOST]]
    more = len(seen.syncs) - len(places)
    return ["; ".join([*places, *([f"{more} more in the report"] if more else [])])]


def _place(sync: Mapping[str, Any], device: str) -> str:
    ms, often = sync.get("ms_per_step"), sync.get("per_step")
    if ms is not None:
        cost = f", {format_short(ms, 'ms')} a step"
    else:
        cost = ", no cost on the CPU" if device == "cpu" else f", {often:.3g} a step" if often is not None else ""
    return f"{sync.get('where') or 'n/a'} {sync.get('what') or 'n/a'}{cost}"
