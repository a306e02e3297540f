"""What is said where no bottleneck is named: too little was seen, nothing is to gain, or something is not known."""

from __future__ import annotations

from fastloop.diagnose import data
from fastloop.diagnose.naming import ORDINARY_MS, share_pct
from fastloop.diagnose.split import COMPUTE, STARVED_SHARE, WORTH_NAMING_PCT, device_limits, inside, part_ms
from fastloop.measurement import PARTS, Measurement


def too_short(seen: Measurement) -> str:
    """Words for a window without a step in it."""
    if not seen.total_steps:
        return "too short to judge: no step was trained"
    ran = "1 step" if seen.total_steps == 1 else f"{seen.total_steps} steps"
    if seen.total_steps > seen.warmup_steps + 2 and seen.state:
        return f"nothing was measured in {ran}: {'; '.join(seen.state)}"
    return (f"too short to judge: {ran} ran and the first {seen.warmup_steps} are warm-up;"
            " train longer or lower watch.warmup_steps")  # fmt: skip


def to_name(seen: Measurement) -> str:
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
