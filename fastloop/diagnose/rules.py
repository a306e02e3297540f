"""All rules, and the verdict they come to: bottlenecks by their share of the step, or nothing to gain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fastloop.diagnose import busy, comm, data, device, gaps, host
from fastloop.diagnose.naming import ORDINARY_MS, serial_gain_pct, share_pct
from fastloop.diagnose.reading import number, step_ms
from fastloop.diagnose.split import COMPUTE, STARVED_SHARE, WORTH_NAMING_PCT, device_limits, inside, part_ms
from fastloop.measurement import PARTS, Measurement
from fastloop.records import Finding

Rule = Callable[[Measurement, tuple[str, ...]], Finding | None]
RULES: tuple[Rule, ...] = (
    comm.straggler, data.data_wait, data.h2d, host.sync, host.host_other, host.launch_bound, host.callbacks_logging,
    comm.comm_exposed, device.fp32_math, device.memory_bound, device.compute_bound, gaps.validation, gaps.checkpoint,
    gaps.epoch_gap,
)  # fmt: skip
"""One per bottleneck. Where shares are equal, the earlier comes first."""


def findings(seen: Measurement, enabled: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """Bottlenecks in order of their share of the step; a single `none` where there is nothing to name.

    Args:
        seen: the measurement; ``evidence["loader"]`` says how the data was loaded, ``evidence["model"]``, if there,
            what the user's own code does already (``compiled``, ``channels_last``, ``fused``, and its ``convs``).
        enabled: rungs that are switched on, which no patch proposes again.
    """
    if step_ms(seen) is None or not any(number(seen.parts_ms.get(part)) is not None for part in PARTS):
        found = [Finding(bottleneck="none", share_pct=None, why=too_short(seen))]
    else:
        found = _within_the_step([finding for rule in RULES if (finding := rule(seen, enabled)) is not None])
        if len(found) > 1 and busy.is_well_used(seen):  # no reason to leave a slow validation as it is
            found = [finding for finding in found if finding.bottleneck != "compute_bound"]
        found = found or [Finding(bottleneck="none", share_pct=None, why=nothing(seen))]
    first = dataclasses.replace(found[0], detail=(*found[0].detail, *seen.state))
    return (first, *found[1:])


def _within_the_step(found: list[Finding]) -> list[Finding]:
    """By share, and no more of them than the step has: what is left over after the larger ones bounds the smaller."""
    kept, left = [], 100.0
    for finding in sorted(found, key=lambda each: -(each.share_pct or 0.0)):
        share, gain = finding.share_pct, finding.ceiling_gain_pct
        if share is not None and share > left:
            share = left
            if share < WORTH_NAMING_PCT:
                continue
            if gain is not None and finding.ceiling_is_estimate:
                gain = min(gain, serial_gain_pct(share) or gain)
            finding = dataclasses.replace(finding, share_pct=share, ceiling_gain_pct=gain)
        left -= share or 0.0
        kept.append(finding)
    return kept


def too_short(seen: Measurement) -> str:
    """Words for a window without a step in it."""
    return (f"too short to judge: {seen.total_steps} steps ran and the first {seen.warmup_steps} are warm-up;"
            " train longer or lower watch.warmup_steps")  # fmt: skip


def nothing(seen: Measurement) -> str:
    """Words for the verdict that nothing is to be named, with what came closest and what is not known."""
    costs = [(share, part) for part in PARTS if part not in (*COMPUTE, "unexplained")
             if (share := share_pct(seen, part_ms(seen, part))) is not None]  # fmt: skip
    words = [data.held_nothing_up(seen), *unknown(seen)]
    costs = [cost for cost in costs if words[0] is None or cost[1] != "data_wait"]
    if costs:
        share, part = max(costs, key=lambda cost: cost[0])
        small = f", less than the {ORDINARY_MS} ms that any loop pays" if share >= WORTH_NAMING_PCT and \
            (part_ms(seen, part) or 0.0) < ORDINARY_MS else ""  # fmt: skip
        words.insert(0, f"the largest cost beside the work itself is {part}, {share:.1f} % of the step{small}")
    head = "no bottleneck among what was measured" if unknown(seen) else "nothing to gain"
    return f"{head}: {'; '.join(word for word in words if word)}"


def unknown(seen: Measurement) -> list[str]:
    """What was not measured and could hide a bottleneck."""
    said, rest = [], share_pct(seen, part_ms(seen, "unexplained"))
    if rest is not None and rest >= WORTH_NAMING_PCT:
        said.append(f"{rest:.1f} % of the step is unexplained")
    starved = share_pct(seen, part_ms(seen, "data_wait")) or 0.0
    if data.held_nothing_up(seen) is not None and starved >= 100 * STARVED_SHARE:
        said.append("what else makes the device wait was not found")
    split = inside(seen)
    if split is None:
        said.append("the step was not split further")
    elif seen.device == "cuda" and device_limits(seen):
        said.append("the GPU is the limit, and how well it is used was not measured")
    elif seen.device == "cuda" and split.source is None:
        said.append("how busy the GPU was is not known")
    return said
