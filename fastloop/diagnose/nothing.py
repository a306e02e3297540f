"""What is said where no bottleneck is named: too little was seen, nothing is to gain, or something is not known."""

from __future__ import annotations

from collections.abc import Sequence

from fastloop.diagnose import data, pauses
from fastloop.diagnose.host import TINY_STEP_MS
from fastloop.diagnose.naming import ORDINARY_MS, per_step, share_pct
from fastloop.diagnose.reading import activity, is_beyond, number, step_ms
from fastloop.diagnose.split import COMPUTE, STARVED_SHARE, WORTH_NAMING_PCT, device_limits, inside, part_ms
from fastloop.measurement import CEILINGS, PARTS, Measurement
from fastloop.records import Finding

TOGETHER_PCT = 15.0
"""Share of the step from which on costs that are too small to be named one by one are told together."""


def too_short(seen: Measurement) -> Finding:
    """For a window without a step in it."""
    if seen.total_steps is None:
        return _none("NOT MEASURED", "nothing was measured: watch.enabled is false")
    ran = "1 step" if seen.total_steps == 1 else f"{seen.total_steps} steps"
    if not seen.total_steps:
        why = "too short to judge: no step was trained"
    elif seen.total_steps > seen.warmup_steps + 2 and seen.state:
        return _none("NOT MEASURED", f"nothing was measured in {ran}: {'; '.join(seen.state)}")
    else:
        why = (f"too short to judge: {ran} ran and the first {seen.warmup_steps} are warm-up;"
               " train longer or lower watch.warmup_steps")  # fmt: skip
    return _none("TOO SHORT TO JUDGE", why)


def to_name(seen: Measurement, hidden: Sequence[Finding]) -> Finding:
    """For a step in which nothing is to be named, with what came closest and what is not known.

    Args:
        hidden: what would have been named, if it were not single pauses for the most part.
    """
    missing = unknown(seen)
    if (told := pauses.told(seen, hidden)) is not None:
        return _none(pauses.TITLE, "; ".join([told, *missing]))
    acquitted, small = data.held_nothing_up(seen), _costs(seen)
    if (together := sum(share for share, _, _ in small)) >= TOGETHER_PCT:
        title, head = "NO SINGLE BOTTLENECK", f"no single bottleneck: {together:.1f} % of the step is not training"
        most: str | None = f"{', '.join(f'{name} {share:.1f} %' for share, name, _ in small)}, none of it one by itself"
    else:
        title, head = ("NO BOTTLENECK FOUND", "no bottleneck among what was measured") if missing else \
            ("NOTHING TO GAIN", "nothing to gain")  # fmt: skip
        most = _largest(seen)
    return _none(title, f"{head}: {'; '.join(word for word in (most, acquitted, *missing) if word)}")


def _none(title: str, why: str) -> Finding:
    return Finding(bottleneck="none", share_pct=None, why=why, title=title)


def _parts(seen: Measurement) -> list[tuple[float, str, float]]:
    """Share of the step, name and milliseconds of the parts that are not the work itself, the largest first."""
    free = {"data_wait"} if data.held_nothing_up(seen) is not None else set()
    spent = {part: ms for part in PARTS if part not in {*COMPUTE, "unexplained", *free}
             and (ms := part_ms(seen, part)) is not None}  # fmt: skip
    if seen.world_size > 1 and "host_other" in spent:
        spent["host_other (ranks wait for one another in it)"] = spent.pop("host_other")
    return sorted(((share_pct(seen, ms) or 0.0, part, ms) for part, ms in spent.items()), key=lambda each: -each[0])


def _costs(seen: Measurement) -> list[tuple[float, str, float]]:
    """The same with idle time inside the work, without what any loop pays."""
    split, step = inside(seen), step_ms(seen) or 0.0
    within = {} if split is None or split.source == "bound" else \
        {"synchronisations": split.sync, "a host asleep": split.blocked, "launches": split.launch}  # fmt: skip
    found = [*_parts(seen), *((share_pct(seen, ms) or 0.0, name, ms) for name, ms in within.items() if ms)]
    worth = [cost for cost in found if cost[0] >= 1 and (cost[2] >= ORDINARY_MS or step >= TINY_STEP_MS)]
    return sorted(worth, key=lambda each: -each[0])


def _largest(seen: Measurement) -> str | None:
    parts = _parts(seen)
    if not parts:
        return None
    share, part, ms = parts[0]
    small = f", less than the {ORDINARY_MS} ms that any loop pays" if share >= WORTH_NAMING_PCT and \
        ms < ORDINARY_MS else ""  # fmt: skip
    return f"the largest cost beside the work itself is {part}, {share:.1f} % of the step{small}"


def unknown(seen: Measurement) -> list[str]:
    """What was not measured and could hide a bottleneck."""
    said, paused = doubts(seen), pauses.pauses_ms(seen)
    rest = share_pct(seen, max(0.0, (part_ms(seen, "unexplained") or 0.0) - paused)) or 0.0
    if rest >= WORTH_NAMING_PCT:
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


def doubts(seen: Measurement) -> list[str]:
    """What no part of the step accounts for: a GPU that was idle, uneven steps, trials that were too fast."""
    split = inside(seen)
    if split is None or not split.unseen:
        said = []
    else:
        active, source = activity(seen)
        said = [f"the GPU was idle for another {per_step(seen, split.unseen)} (a kernel ran {active:.0f} % of the time"
                f"{', says NVML' if source == 'nvml' else ''}), and what it waited for was not seen"]  # fmt: skip
    said += [words] if (words := pauses.uneven(seen)) is not None else []
    fast = [f"{number(seen.ceilings.get(name)):,.0f} {name}" for name in CEILINGS if is_beyond(seen, name)]
    if fast:
        said.append(f"{number(seen.samples_per_s):,.0f} samples/s as it is, {' and '.join(fast)}, which no part of the"
                    " step accounts for: the run, or the machine, was disturbed: run it again")  # fmt: skip
    return said
