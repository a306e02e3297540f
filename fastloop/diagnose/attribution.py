"""Whose milliseconds are they? Every millisecond of a step has one owner, so that shares never add up to more than it.

What the parts measured is taken as it is. Inside forward, backward and optimizer the device may have been idle; that
time is divided in this order: waiting for another rank, for the exchange of gradients, after a synchronisation, for a
host that slept, for launches. The rest is the device's own work, as far as its counters saw it work at all.

It is computed once, by `attribute`; the rules read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fastloop.diagnose.gpu_use import Use, classify_use
from fastloop.diagnose.straggler import Straggler, find_straggler
from fastloop.records.measurement import GAPS, PARTS, Measurement
from fastloop.records.readings import (
    Source,
    compute_gain_pct,
    list_syncing_lines,
    micro_batches,
    read_activity,
    read_garbage_ms,
    read_step_ms,
    read_trace,
    to_number,
)

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
MOSTLY_BUSY = 0.5
"""Of the step. A device that is at work for so much of it, and idle only after the host has waited for it, or for no
reason that is known, does both in turns: quicker kernels make the step shorter all the same."""


class Exchange(NamedTuple):
    """Cost of the gradient exchange in milliseconds a step, and how it was measured."""

    ms: float
    source: Literal["trials", "trace", "marks"]


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Milliseconds per step of forward, backward and optimizer, by owner. None: unknown."""

    waits: float = 0.0
    comm: float = 0.0
    sync: float | None = None
    blocked: float | None = None
    launch: float | None = None
    unseen: float = 0.0
    """The device was idle according to its counters, for an unknown reason."""
    busy: float = 0.0
    """What no other owner claims: the device at work, as far as is known."""
    source: Source | None = None


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A measured step and its parts."""

    measured: Measurement
    step_ms: float
    straggler: Straggler | None
    """The rank that the others wait for."""
    parts_ms: Mapping[str, float]
    """The measured parts, at most the step each; where this rank is the slow one, without the straggler's excess."""

    @property
    def on_gpu(self) -> bool:
        return self.measured.device == "cuda"

    @property
    def device(self) -> str:
        """The device's name in words."""
        return "GPU" if self.on_gpu else "device"

    @property
    def slow_here(self) -> Straggler | None:
        """The straggler, where it is this rank."""
        return self.straggler if self.straggler is not None and self.straggler.rank == 0 else None

    @property
    def slow_elsewhere(self) -> Straggler | None:
        """The straggler, where this rank waits for it."""
        return self.straggler if self.slow_here is None else None

    def sum_ms(self, *parts: str) -> float | None:
        """The sum of several parts; None where none of them was measured."""
        known = [self.parts_ms[part] for part in parts if part in self.parts_ms]
        return sum(known) if known else None

    def to_pct(self, ms: float) -> float:
        """Per cent of the step, at most 100."""
        return min(100.0, 100 * ms / self.step_ms)

    def format_ms(self, ms: float) -> str:
        """``60.0 of 100.0 ms a step``, with a second digit where steps are short."""
        digits = 1 if self.step_ms >= 10 else 2
        return f"{ms:.{digits}f} of {self.step_ms:.{digits}f} ms a step"


@dataclass(frozen=True, kw_only=True)
class Attribution(StepParts):
    """Who owns the milliseconds of a step. The rules read this record."""

    inside: Inside | None
    """None where neither forward, backward nor optimizer was measured."""
    exchange: Exchange | None
    """Without the wait for a slow rank; None on one rank."""
    drained: bool | None
    """Whether the device had next to nothing left when the host had issued all its work; None: unknown."""
    device_ms: float | None
    """The device's own work where quicker kernels would make the step shorter; None where something else hides it."""
    is_limit: bool
    """The device is a GPU, and next to nothing else makes the step wait."""
    gpu_use: Use | None
    """What a busy GPU is busy with; None: unknown."""
    garbage_ms: float
    """Python's garbage collection, a part of ``host_other``."""
    compile_ms: float
    """Compiles that went on through the window, likewise; 0 where they came once."""
    pauses_ms: float
    """What single long steps add to the mean step, without `GAPS` and garbage collection."""
    sync_lines: tuple[Mapping[str, Any], ...]
    """Lines that synchronise about every step or cost time, the most expensive first."""
    free_data_pct: float | None
    """Gain of a trial without the loader; None without a usable trial."""


def attribute(seen: Measurement) -> Attribution | None:
    """Give every millisecond of a step its owner; None where there is no step, or nothing of it was measured."""
    step = _measure_parts(seen)
    if step is None or not step.parts_ms:
        return None
    exchange, drained = _find_exchange(step), _is_drained(step)
    inside = _divide(step, exchange, drained)
    limits = inside is not None and _is_device_limit(step, inside, drained)
    gain = compute_gain_pct(seen, "replayed")
    return Attribution(
        **vars(step),
        inside=inside,
        exchange=exchange,
        drained=drained,
        device_ms=inside.busy if inside is not None and (limits or _works_in_turns(step, inside)) else None,
        is_limit=limits,
        gpu_use=classify_use(seen, 1.0 if limits or inside is None else inside.busy / step.step_ms),
        garbage_ms=read_garbage_ms(seen),
        compile_ms=to_number((seen.evidence.get("compilation") or {}).get("ms_per_step")) or 0.0,
        pauses_ms=_find_pauses(step),
        sync_lines=tuple(list_syncing_lines(seen)),
        free_data_pct=compute_gain_pct(seen, "resident") if gain is None else gain,
    )


def _measure_parts(seen: Measurement) -> StepParts | None:
    step, slow = read_step_ms(seen), find_straggler(seen)
    if step is None:
        return None
    parts = {part: ms for part in PARTS if (ms := to_number(seen.parts_ms.get(part))) is not None}
    if slow is not None and slow.rank == 0 and slow.part in parts:
        parts[slow.part] = max(0.0, parts[slow.part] - slow.excess_ms)
    parts = {part: min(ms, step) for part, ms in parts.items()}
    return StepParts(measured=seen, step_ms=step, straggler=slow, parts_ms=parts)


def _is_drained(step: StepParts) -> bool | None:
    seen = step.measured
    left = to_number(seen.lead_ms if seen.trail_ms is None else seen.trail_ms)
    return None if left is None else left < max(DRAINED_MS, DRAINED_SHARE * step.step_ms / micro_batches(seen))


def _find_exchange(step: StepParts) -> Exchange | None:
    """What the exchange of gradients costs, as two trials, a trace or the parts have it.

    The trials replay batches both, one with the exchange and one without. The run as it is would not do for the first:
    in its exchange quick ranks also wait for those whose data comes late. A wait for a slow rank is taken off; trials
    have none where it is that rank's data that is slow.
    """
    seen, slow = step.measured, step.slow_elsewhere
    if seen.world_size < 2:
        return None
    having, lacking = (to_number(seen.ceilings.get(name)) for name in ("replayed", "no_exchange"))
    samples = to_number(seen.global_batch) or (to_number(seen.samples_per_s) or 0.0) * step.step_ms / 1000
    skew = 0.0 if slow is None else slow.excess_ms
    if having and lacking and samples:
        ms = min(step.step_ms, max(0.0, 1000 * samples * (1 / having - 1 / lacking)))
        skew = 0.0 if slow is not None and slow.part == "data_wait" else skew
        return Exchange(max(0.0, ms - skew), "trials")
    if (traced := to_number((read_trace(seen) or {}).get("comm_exposed_ms"))) is not None:
        return Exchange(max(0.0, min(traced, step.step_ms) - skew), "trace")
    marked = step.parts_ms.get("comm_exposed")
    return None if marked is None else Exchange(max(0.0, marked - skew), "marks")


def _divide(step: StepParts, exchange: Exchange | None, drained: bool | None) -> Inside | None:
    """Divide forward, backward and optimizer among their owners."""
    room = step.sum_ms(*COMPUTE)
    if room is None:
        return None
    waits = 0.0 if step.slow_elsewhere is None else min(room, step.slow_elsewhere.excess_ms)
    carved = "comm_exposed" in step.parts_ms  # then the backward is without it
    comm = 0.0 if exchange is None or carved else min(room - waits, exchange.ms)
    room -= waits + comm
    off = _find_blocked(step)
    if not step.on_gpu:
        blocked = None if off is None else min(room, off)
        return Inside(waits=waits, comm=comm, blocked=blocked, busy=room - (blocked or 0.0))
    idle = _divide_by_trace(step, room, off) or _divide_by_counters(step, room, off, drained)
    if idle is None:
        return Inside(waits=waits, comm=comm, busy=room)
    sync, blocked, launch, source = idle
    rest = max(0.0, room - sync - (blocked or 0.0) - launch)
    unseen = _find_unseen(step, rest)
    busy = rest - unseen
    if source != "trace" and not sync:  # a queue that is full when the step is issued ran empty within it
        sync = _share_with_lines(step, unseen)
        unseen -= sync
        source = read_activity(step.measured)[1] if sync else source
    owners = Inside(waits=waits, comm=comm, sync=sync, blocked=blocked, launch=launch, source=source)
    return dataclasses.replace(owners, unseen=unseen, busy=busy)


def _works_in_turns(step: StepParts, inside: Inside) -> bool:
    """Whether a GPU's own work takes most of a step, as its counters or a trace say, and is hidden behind nothing."""
    known = read_activity(step.measured)[0] is not None or inside.source == "trace"
    if not step.on_gpu or not known or inside.busy < MOSTLY_BUSY * step.step_ms:
        return False
    beside = (step.sum_ms(*STARVING) or 0.0) + (inside.blocked or 0.0) + (inside.launch or 0.0)
    return beside < STARVED_SHARE * max(0.0, step.step_ms - (step.sum_ms(*GAPS) or 0.0))


def _share_with_lines(step: StepParts, idle: float) -> float:
    """What of some idle time lines that synchronise account for: what they cost where that was measured, else all."""
    lines = list_syncing_lines(step.measured)
    waited = sum(to_number(line.get("ms_per_step")) or 0.0 for line in lines)
    return min(idle, waited) if waited else idle * bool(lines)


def _is_device_limit(step: StepParts, inside: Inside, drained: bool | None) -> bool:
    """Whether a GPU's own work is what the step waits for."""
    if not step.on_gpu:
        return False
    active = read_activity(step.measured)[0] or 0.0
    idle = (step.sum_ms(*STARVING) or 0.0) + sum(ms or 0.0 for ms in (inside.sync, inside.blocked, inside.launch))
    idle += inside.unseen + (step.parts_ms.get("unexplained", 0.0) if active < BUSY_PCT else 0.0)
    if idle >= STARVED_SHARE * max(0.0, step.step_ms - (step.sum_ms(*GAPS) or 0.0)):
        return False
    return drained is False or active >= BUSY_PCT


def _find_blocked(step: StepParts) -> float | None:
    """Host time off the CPU for the user's reasons: a lower bound.

    In a backward the calling thread also sleeps for reasons of its own: on CUDA for autograd's thread, with several
    ranks for their gradients. So there the host's whole backward is taken to be that.
    """
    seen, slow = step.measured, step.slow_here
    off = to_number(seen.blocked_ms)
    if off is not None and slow is not None and slow.part in COMPUTE:
        off = max(0.0, off - slow.excess_ms)
    if off is None or (seen.device == "cpu" and seen.world_size == 1):
        return off
    backward = to_number(seen.host_ms.get("backward"))
    return None if backward is None else max(0.0, off - backward)


_Idle = tuple[float, float | None, float, Source]
"""Idle milliseconds after synchronisations, for a sleeping host and for launches; where they were read."""


def _divide_by_trace(step: StepParts, room: float, off: float | None) -> _Idle | None:
    """Idle time as the trace divides it, scaled to the untraced step: tracing itself slows the host down."""
    traced = read_trace(step.measured)
    if traced is None:
        return None
    idle = {kind: to_number(value) or 0.0 for kind, value in (traced.get("idle_ms") or {}).items()}
    free = max(0.0, step.step_ms - (step.sum_ms(*GAPS) or 0.0) - (to_number(traced.get("busy_ms")) or 0.0))
    scale = min(1.0, free / sum(idle.values())) if any(idle.values()) else 0.0
    sync = min(room, scale * idle.get("sync", 0.0))
    launch, other = (scale * idle.get(kind, 0.0) for kind in ("launch", "other"))
    blocked = None if off is None else min(off, launch + other, room - sync)
    launch = max(0.0, launch - max(0.0, (blocked or 0.0) - other))
    return sync, blocked, min(launch, room - sync - (blocked or 0.0)), "trace"


def _divide_by_counters(step: StepParts, room: float, off: float | None, drained: bool | None) -> _Idle | None:
    """Idle time without a trace: what the counters call idle and no part owns."""
    idle = _find_idle(step, room, drained)
    if idle is None:
        return None
    left, source = idle
    sync = _share_with_lines(step, left) if drained else 0.0
    left -= sync
    blocked = None if off is None else min(left, off)
    return sync, blocked, left - (blocked or 0.0) if drained else 0.0, source


def _find_idle(step: StepParts, room: float, drained: bool | None) -> tuple[float, Source] | None:
    active, source = read_activity(step.measured)
    if drained is None and source != "counters":
        return None
    if not drained and source != "counters":
        return 0.0, source  # a queue of work, and no finer reading
    if active is None:
        return room, "bound"
    if source == "nvml" and _is_starved(step):
        return None
    elsewhere = step.sum_ms(*STARVING, *GAPS, "h2d") or 0.0
    return min(room, max(0.0, step.step_ms * (1 - min(100.0, active) / 100) - elsewhere)), source


def _find_unseen(step: StepParts, rest: float) -> float:
    """How long the device was idle in the time that no owner claims. A queue full in most steps hides the others.

    Below `WORTH_NAMING_PCT` it is the difference between a clock and a counter.
    """
    active, source = read_activity(step.measured)
    if active is None or (source == "nvml" and _is_starved(step)):
        return 0.0
    idle = max(0.0, rest - step.step_ms * min(100.0, active) / 100)
    return idle if 100 * idle >= WORTH_NAMING_PCT * step.step_ms else 0.0


def _is_starved(step: StepParts) -> bool:
    """NVML reads too little on a starved device: 4 % where it had work for 14 % of the time."""
    return (step.sum_ms(*STARVING) or 0.0) >= STARVED_SHARE * step.step_ms


def _find_pauses(step: StepParts) -> float:
    """Milliseconds that single long steps add to the mean step, without `GAPS` and garbage collection."""
    added = to_number((step.measured.evidence.get("pauses") or {}).get("ms_per_step")) or 0.0
    return max(0.0, added - find_garbage(step.measured) - (step.sum_ms(*GAPS) or 0.0))


def find_garbage(seen: Measurement) -> float:
    """Milliseconds a step of garbage collection, on whichever rank it took longest."""
    return max([read_garbage_ms(seen), *(to_number(rank.get("garbage_ms")) or 0.0 for rank in seen.ranks)])
