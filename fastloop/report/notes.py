"""What makes the figures of a run doubtful, in a sentence each: the machine, the hour, trials that were disturbed."""

from __future__ import annotations

from collections.abc import Sequence

from fastloop.measurement import CEILINGS, DISTURBED, Measurement, uneven
from fastloop.records import Finding

DRIFTED_PCT = 10.0
LONG_STEPS = ("the mean step is", "took so long that")
"""Words of a finding that has told of a few long steps."""


def notes(seen: Measurement, findings: Sequence[Finding] = ()) -> list[str]:
    """What to hold against the figures, as one text, without what the findings say; empty where nothing is known."""
    told = any(words in finding.why for finding in findings for words in LONG_STEPS)
    said = [*seen.state, *_no_trace(seen), *([] if told else _uneven(seen)), *_disturbed(seen), *_drifted(seen)]
    return ["; ".join(said)] if said else []


def _no_trace(seen: Measurement) -> list[str]:
    """A trace that was asked for and is not there, or not all of it."""
    found = seen.kernels or {}
    if skipped := found.get("skipped"):
        return [f"no trace: {skipped}"]
    steps, asked = found.get("steps") or 0, found.get("asked_steps") or 0
    ended = f"the trace is of {steps} {'step' if steps == 1 else 'steps'}, not {asked}: the training ended before"
    return [ended] if 0 < steps < asked else []


def _uneven(seen: Measurement) -> list[str]:
    """Some steps are so long that the means are theirs."""
    times = uneven(seen)
    return [] if times is None else [
        f"the mean step is {times:.1f} times the median one: a few long steps weigh on these figures"]  # fmt: skip


def _disturbed(seen: Measurement) -> list[str]:
    now = seen.samples_per_s
    slow = [(name, rate) for name in CEILINGS if now and (rate := seen.ceilings.get(name)) and rate < DISTURBED * now]
    return [f"the trial {name} was slower than the run it should beat, {rate:,.0f} to {now:,.0f} samples/s:"
            " disturbed by something else, run it again" for name, rate in slow]  # fmt: skip


def _drifted(seen: Measurement) -> list[str]:
    drifted = [look for look in seen.drift if (look.get("change_pct") or 0) >= DRIFTED_PCT]
    if not drifted:
        return []
    last = drifted[-1]
    longer = f"took {last['change_pct']:.0f} % longer than in the window"
    return [f"the step at {last.get('step')} {longer}{f': {why}' if (why := last.get('why')) else ''}"]
