"""Whose milliseconds are they? Every millisecond of a step has one owner, so that shares never add up to more than it.

What the parts measured is taken as it is. Inside forward, backward and optimizer the device may have been idle; that
time is divided in this order: waiting for another rank, for the exchange of gradients, after a synchronisation, for a
host that slept, for launches. The rest is the device's own work, as far as its counters saw it work at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastloop.diagnose.reading import (
    Source,
    activity,
    kernels,
    micro_batches,
    number,
    step_ms,
    syncing_lines,
)
from fastloop.diagnose.straggler import straggler
from fastloop.measurement import GAPS, Measurement

WORTH_NAMING_PCT = 5.0
"""A share of the step below this is not called a bottleneck."""
COMPUTE = ("forward", "backward", "optimizer")
STARVING = ("data_wait", "callbacks_logging", "host_other")
DRAINED_MS, DRAINED_SHARE = 0.2, 0.05
"""Device work left that counts as none: the larger of these, the second as a share of a batch's time."""
BUSY_PCT = 90.0
"""Share of the time with kernels from which on the device is called the limit."""
STARVED_SHARE = 0.1
"""A device with nothing to do for this share of the step is not the limit, whatever its kernels are like."""
ExchangeSource = Literal["trials", "trace", "marks"]


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Milliseconds per step of forward, backward and optimizer, by owner. None: cannot be told."""

    waits: float = 0.0
    comm: float = 0.0
    sync: float | None = None
    blocked: float | None = None
    launch: float | None = None
    unseen: float = 0.0
    """The device was idle, say its counters, and nothing tells what it waited for."""
    busy: float = 0.0
    """What no owner claims: the device at work, as far as can be told."""
    source: Source | None = None


def part_ms(seen: Measurement, part: str) -> float | None:
    """A part, at most the step, less what is the straggler's where this rank is the slow one."""
    value, step, slow = number(seen.parts_ms.get(part)), step_ms(seen), straggler(seen)
    if value is None or step is None:
        return None
    if slow is not None and slow.rank == 0 and slow.part == part:
        value = max(0.0, value - slow.excess_ms)
    return min(value, step)


def total(seen: Measurement, parts: tuple[str, ...]) -> float | None:
    """Several parts together; None where not one of them was measured."""
    known = [value for part in parts if (value := part_ms(seen, part)) is not None]
    return sum(known) if known else None


def drained(seen: Measurement) -> bool | None:
    """Whether the device had next to nothing left when the host had issued all; None where that was not seen."""
    left, step = number(seen.lead_ms if seen.trail_ms is None else seen.trail_ms), step_ms(seen)
    if left is None or step is None:
        return None
    return left < max(DRAINED_MS, DRAINED_SHARE * step / micro_batches(seen))


def exchange_ms(seen: Measurement) -> tuple[float, ExchangeSource] | None:
    """What the exchange of gradients costs a step, and what says so: two trials, a trace, or the parts.

    The trials replay batches both, one with the exchange and one without. The run as it is would not do for the first:
    in its exchange quick ranks also wait for those whose data comes late.
    """
    step, samples = step_ms(seen), _samples_a_step(seen)
    having, lacking = (number(seen.ceilings.get(name)) for name in ("replayed", "no_exchange"))
    if step is None or seen.world_size < 2:
        return None
    if having and lacking and samples:
        return min(step, max(0.0, 1000 * samples * (1 / having - 1 / lacking))), "trials"
    if (traced := number((kernels(seen) or {}).get("comm_exposed_ms"))) is not None:
        return min(traced, step), "trace"
    marked = part_ms(seen, "comm_exposed")
    return None if marked is None else (marked, "marks")


def skew_ms(seen: Measurement, source: ExchangeSource) -> float:
    """The wait for a slow rank that this source takes for exchange. Trials have none where that rank's data is slow."""
    slow = straggler(seen)
    if slow is None or slow.rank == 0 or (source == "trials" and slow.part == "data_wait"):
        return 0.0
    return slow.excess_ms


def _samples_a_step(seen: Measurement) -> float | None:
    step, rate = step_ms(seen), number(seen.samples_per_s)
    return number(seen.global_batch) or (rate * step / 1000 if rate and step else None)


def inside(seen: Measurement) -> Inside | None:
    """Who owns forward, backward and optimizer; None where not one of them was measured."""
    room = total(seen, COMPUTE)
    if room is None:
        return None
    slow, exchange = straggler(seen), exchange_ms(seen)
    waits = 0.0 if slow is None or slow.rank == 0 else min(room, slow.excess_ms)
    carved = number(seen.parts_ms.get("comm_exposed")) is not None  # then the backward is without it
    comm = 0.0 if exchange is None or carved else min(room - waits, max(0.0, exchange[0] - skew_ms(seen, exchange[1])))
    room -= waits + comm
    if seen.device != "cuda":
        off = _blocked(seen)
        blocked = None if off is None else min(room, off)
        return Inside(waits=waits, comm=comm, blocked=blocked, busy=room - (blocked or 0.0))
    idle = _traced(seen, room) or _counted(seen, room)
    if idle is None:
        return Inside(waits=waits, comm=comm, busy=room)
    sync, blocked, launch, source = idle
    rest = max(0.0, room - sync - (blocked or 0.0) - launch)
    unseen = _unseen(seen, rest)
    return Inside(waits=waits, comm=comm, sync=sync, blocked=blocked, launch=launch, source=source, unseen=unseen,
                  busy=rest - unseen)  # fmt: skip


def device_limits(seen: Measurement) -> bool:
    """Whether a GPU's own work is what the step waits for."""
    split, step = inside(seen), step_ms(seen)
    if seen.device != "cuda" or split is None or step is None:
        return False
    idle = (total(seen, STARVING) or 0.0) + sum(ms or 0.0 for ms in (split.sync, split.blocked, split.launch))
    active = activity(seen)[0] or 0.0
    idle += split.unseen + ((part_ms(seen, "unexplained") or 0.0) if active < BUSY_PCT else 0.0)
    if idle >= STARVED_SHARE * max(0.0, step - (total(seen, GAPS) or 0.0)):
        return False
    return drained(seen) is False or active >= BUSY_PCT


def _blocked(seen: Measurement) -> float | None:
    """Host time off the processor that is the user's: at least so much.

    In a backward the calling thread also sleeps for reasons of its own: on CUDA for autograd's thread, with several
    ranks for their gradients. So there the host's whole backward is taken to be that.
    """
    off, slow = number(seen.blocked_ms), straggler(seen)
    if off is not None and slow is not None and slow.rank == 0 and slow.part in COMPUTE:
        off = max(0.0, off - slow.excess_ms)
    if off is None or (seen.device == "cpu" and seen.world_size == 1):
        return off
    backward = number(seen.host_ms.get("backward"))
    return None if backward is None else max(0.0, off - backward)


_Idle = tuple[float, float | None, float, Source]


def _traced(seen: Measurement, room: float) -> _Idle | None:
    """Idle time as the trace divides it, scaled to the untraced step: tracing itself slows the host down."""
    traced, step, off = kernels(seen), step_ms(seen), _blocked(seen)
    if traced is None or step is None:
        return None
    idle = {kind: number(value) or 0.0 for kind, value in (traced.get("idle_ms") or {}).items()}
    free = max(0.0, step - (total(seen, GAPS) or 0.0) - (number(traced.get("busy_ms")) or 0.0))
    scale = min(1.0, free / sum(idle.values())) if any(idle.values()) else 0.0
    sync = min(room, scale * idle.get("sync", 0.0))
    launch, other = (scale * idle.get(kind, 0.0) for kind in ("launch", "other"))
    blocked = None if off is None else min(off, launch + other, room - sync)
    launch = max(0.0, launch - max(0.0, (blocked or 0.0) - other))
    return sync, blocked, min(launch, room - sync - (blocked or 0.0)), "trace"


def _counted(seen: Measurement, room: float) -> _Idle | None:
    """Idle time without a trace: what the counters call idle and no part owns."""
    idle, empty, off = _idle_ms(seen, room), drained(seen), _blocked(seen)
    if idle is None:
        return None
    left, source = idle
    lines = syncing_lines(seen) if empty else []
    waited = sum(number(line.get("ms_per_step")) or 0.0 for line in lines)
    sync = min(left, waited) if waited else left * bool(lines)
    left -= sync
    blocked = None if off is None else min(left, off)
    return sync, blocked, left - (blocked or 0.0) if empty else 0.0, source


def _unseen(seen: Measurement, rest: float) -> float:
    """How much of what no owner claims the device was idle for. A queue that is full in most steps tells of those only.

    Less than what is worth naming is the difference between a clock and a counter.
    """
    step, (active, source) = step_ms(seen), activity(seen)
    if step is None or active is None or (source == "nvml" and _starved(seen, step)):
        return 0.0
    idle = max(0.0, rest - step * min(100.0, active) / 100)
    return idle if 100 * idle >= WORTH_NAMING_PCT * step else 0.0


def _starved(seen: Measurement, step: float) -> bool:
    """NVML reads too little on a starved device: 4 % where it had work for 14 % of the time."""
    return (total(seen, STARVING) or 0.0) >= STARVED_SHARE * step


def _idle_ms(seen: Measurement, room: float) -> tuple[float, Source] | None:
    step, empty = step_ms(seen), drained(seen)
    active, source = activity(seen)
    if step is None or (empty is None and source != "counters"):
        return None
    if not empty and source != "counters":
        return 0.0, source  # a queue of work, and no finer reading
    if active is None:
        return room, "bound"
    if source == "nvml" and _starved(seen, step):
        return None
    elsewhere = total(seen, (*STARVING, *GAPS, "h2d")) or 0.0
    return min(room, max(0.0, step * (1 - min(100.0, active) / 100) - elsewhere)), source
