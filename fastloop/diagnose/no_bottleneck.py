"""Findings that name no bottleneck: a fit that died, too few steps, nothing to gain, or something unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fastloop.diagnose.attribution import COMPUTE, STARVED_SHARE, WORTH_NAMING_PCT, Attribution
from fastloop.diagnose.between_steps import describe_pauses, describe_uneven_steps
from fastloop.diagnose.finding import ORDINARY_MS
from fastloop.diagnose.gpu_use import ASK_A_TRACE
from fastloop.diagnose.host import TINY_STEP_MS
from fastloop.diagnose.waits import rule_out_data_wait
from fastloop.records.measurement import CEILINGS, Measurement
from fastloop.records.plan import Finding
from fastloop.records.readings import is_beyond, is_crowded, read_activity, read_trace, to_number

TOGETHER_PCT = 15.0
"""Costs that are each too small to be named are named together if they reach this share of the step."""
WORDS = {
    "data_wait": "waiting for data",
    "h2d": "copying to the device",
    "comm_exposed": "exposed exchange",
    "callbacks_logging": "callbacks and logging",
    "checkpoint": "checkpoints",
    "epoch_gap": "the time between epochs",
    "host_other": "other work of the host",
}
"""What a sentence calls a part; the others are called by their names."""


def explain_no_step(seen: Measurement) -> Finding:
    """Make the finding for a window without a step."""
    steps = seen.total_steps
    if steps is None:
        return _make_none("NOT MEASURED", "nothing was measured: watch.enabled is false")
    ran = "1 step" if steps == 1 else f"{steps} steps"
    if steps > seen.warmup_steps + 2 and seen.state:
        return _make_none("NOT MEASURED", f"nothing was measured in {ran}: {'; '.join(seen.state)}")
    warmup = f"{ran} ran, but the first {seen.warmup_steps + 1} are not timed; train longer or lower watch.warmup_steps"
    return _make_none("TOO SHORT TO JUDGE", warmup if steps else "no step was trained")


def explain_death(seen: Measurement) -> Finding | None:
    """Make the finding for a fit that died; None if it did not."""
    if seen.died_of is None:
        return None
    count = seen.total_steps
    steps = "before its first step ended" if not count else f"after {count:,d} step{'s' * (count > 1)}"
    cause = seen.died_of.rstrip(".")
    why = f"the fit died {steps}: {cause}"
    if seen.steps:
        why += "; the figures are from the steps before that"
    if hint := (seen.evidence.get("died") or {}).get("hint"):
        why = f"{why}; {hint}"
    return dataclasses.replace(_make_none("DIED", why), alarm=seen.died_of)


def explain_none(step: Attribution, hidden: Sequence[Finding]) -> Finding:
    """Make the finding for a step without a bottleneck: the largest costs and what is unknown.

    Args:
        hidden: findings that were dropped because they are mostly single pauses.
    """
    missing = list_unknowns(step)
    if (pauses := describe_pauses(step, hidden)) is not None:
        return _make_none("SINGLE PAUSES", "; ".join([pauses, *missing]))
    ruled_out = rule_out_data_wait(step)
    parts = _list_parts(step, {*COMPUTE, "unexplained", *(() if ruled_out is None else ("data_wait",))})
    small = _list_costs(step, parts)
    most = _describe_largest(parts)
    title, head = "NOTHING TO GAIN", "no rung is worth trying"
    if (together := sum(share for share, _, _ in small)) >= TOGETHER_PCT:
        title, head = "NO SINGLE BOTTLENECK", f"{together:.1f} % of the step is not training"
        most = f"{', '.join(f'{name} {share:.1f} %' for share, name, _ in small)}, none large enough on its own"
    elif missing and step.device_ms is not None:
        title, head = "BUSY, USE UNKNOWN", f"the GPU works for {step.format_ms(step.device_ms)}"
    elif missing:
        title, head = "NO BOTTLENECK FOUND", "no bottleneck in what was measured"
    if not step.on_gpu and is_crowded(step.measured):
        title, head = "CPU OVERSUBSCRIBED", "the CPUs were oversubscribed (run it alone, or with fewer threads)"
    return _make_none(title, f"{head}: {'; '.join(word for word in (most, ruled_out, *missing) if word)}")


def _make_none(title: str, why: str) -> Finding:
    return Finding(bottleneck="none", share_pct=None, why=why, title=title)


def _list_parts(step: Attribution, but: set[str]) -> list[tuple[float, str, float]]:
    """List share of the step, words and milliseconds of the parts that are not the training work, largest first."""
    ranks = " (it includes ranks waiting for each other)" if step.measured.world_size > 1 else ""
    words = {**WORDS, "host_other": f"{WORDS['host_other']}{ranks}"}
    parts = [(step.to_pct(ms), words.get(part, part), ms) for part, ms in step.parts_ms.items() if part not in but]
    return sorted(parts, key=lambda each: -each[0])


def _list_costs(step: Attribution, parts: list[tuple[float, str, float]]) -> list[tuple[float, str, float]]:
    """Add idle time inside the compute phases to the parts, and drop costs that any loop has."""
    inside, found = step.inside, [*parts]
    if inside is not None and inside.source != "bound":
        within = {"synchronizations": inside.sync, "the host sleeping": inside.blocked, "launches": inside.launch}
        found += [(step.to_pct(ms), name, ms) for name, ms in within.items() if ms]
    worth = [cost for cost in found if cost[0] >= 1 and (cost[2] >= ORDINARY_MS or step.step_ms >= TINY_STEP_MS)]
    return sorted(worth, key=lambda each: -each[0])


def _describe_largest(parts: list[tuple[float, str, float]]) -> str | None:
    if not parts:
        return None
    share, part, ms = parts[0]
    ordinary = share >= WORTH_NAMING_PCT and ms < ORDINARY_MS
    only, small = ("", f", less than the {ORDINARY_MS} ms that any loop costs") if ordinary else ("only ", "")
    return f"the largest avoidable cost, {part}, is {only}{share:.1f} % of the step{small}"


def list_unknowns(step: Attribution) -> list[str]:
    """List what was not measured and could hide a bottleneck."""
    unknowns = list_doubts(step)
    rest = step.to_pct(max(0.0, step.parts_ms.get("unexplained", 0.0) - step.pauses_ms))
    if rest >= WORTH_NAMING_PCT:
        unknowns.append(f"{rest:.1f} % of the step is unexplained")
    if rule_out_data_wait(step) is not None and step.to_pct(step.parts_ms["data_wait"]) >= 100 * STARVED_SHARE:
        unknowns.append("what else makes the device wait is unknown")
    if step.inside is None:
        unknowns.append("the step was not split further")
    elif step.device_ms is not None:
        unknowns.append(f"how well the GPU is used was not measured: {ASK_A_TRACE}")
    elif step.on_gpu and step.inside.source is None:
        unknowns.append("how busy the GPU was is unknown")
    return unknowns


def list_doubts(step: Attribution) -> list[str]:
    """List what no part of the step explains: an idle GPU, uneven steps, trials that were too fast."""
    seen, doubts = step.measured, []
    if step.inside is not None and step.inside.unseen:
        active, source = read_activity(seen)
        doubts.append(
            f"the GPU was idle for another {step.format_ms(step.inside.unseen)} (a kernel ran {active:.0f} % of the"
            f" time{', per NVML' if source == 'nvml' else ''}), waiting for something unknown"
            + ("" if read_trace(seen) else ": find out with fastloop diagnose --syncs --trace 5")
        )
    if (uneven := describe_uneven_steps(step)) is not None:
        doubts.append(uneven)
    fast = [f"{to_number(seen.ceilings.get(name)):,.0f} {name}" for name in CEILINGS if is_beyond(seen, name)]
    if fast:
        doubts.append(
            f"{to_number(seen.samples_per_s):,.0f} samples/s now, {' and '.join(fast)}: no part of the step explains"
            " the difference, so the run or the machine was disturbed; run it again"
        )
    return doubts
