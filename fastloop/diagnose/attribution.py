"""Assigns every millisecond of a step to one owner, so that shares never add up to more than the step.

The measured parts are taken as they are. Inside forward, backward and optimizer the device may have been idle; that
time is divided in this order: waiting for another rank, for the gradient exchange, after a synchronization, for a host
that slept, for launches. The rest is the device's own work, unless its counters show that it was idle.

`attribute` computes this once; the rules read it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fastloop.diagnose.gpu_use import Use, classify_use
from fastloop.diagnose.straggler import Straggler, find_straggler
from fastloop.records.measurement import GAPS, PARTS, Measurement
from fastloop.records.readings import (
    Source,
    compute_gain_pct,
    count_micro_batches,
    is_crowded,
    list_syncing_lines,
    read_activity,
    read_garbage_ms,
    read_loader,
    read_step_ms,
    read_trace,
    to_number,
)

WORTH_NAMING_PCT = 5.0
"""Smallest share of the step that counts as a bottleneck."""
COMPUTE = ("forward", "backward", "optimizer")
STARVING = ("data_wait", "callbacks_logging", "host_other")
DRAINED_MS, DRAINED_SHARE = 0.2, 0.05
"""Remaining device work below the larger of these counts as none; the second is a share of a batch's time."""
BUSY_PCT = 90.0
"""The device counts as the limit if kernels run for at least this share of the time."""
STARVED_SHARE = 0.1
"""A device without work for this share of the step is not the limit, no matter what its kernels are."""
MOSTLY_BUSY = 0.5
"""Share of the step. If a device works for at least this share, and is idle only after the host has waited for it, or
for an unknown reason, then work and idle time alternate, so faster kernels still shorten the step."""


class Exchange(NamedTuple):
    """Cost of the gradient exchange in milliseconds a step, and how it was measured."""

    ms: float
    source: Literal["trials", "trace", "marks"]


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Milliseconds per step of forward, backward and optimizer, by owner. None: unknown."""

    sync: float | None = None
    blocked: float | None = None
    launch: float | None = None
    unseen: float = 0.0
    """The device was idle according to its counters, for an unknown reason."""
    busy: float = 0.0
    """The time without another owner, in which the device presumably worked."""
    source: Source | None = None


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A measured step and its parts."""

    measured: Measurement
    step_ms: float
    straggler: Straggler | None
    """The rank that the others wait for."""
    parts_ms: Mapping[str, float]
    """The measured parts, each at most the step; without the straggler's excess if this rank is the slow one."""

    @property
    def on_gpu(self) -> bool:
        return self.measured.device == "cuda"

    @property
    def device(self) -> str:
        """The device's name for messages."""
        return "GPU" if self.on_gpu else "device"

    @property
    def slow_here(self) -> Straggler | None:
        """The straggler if it is this rank, otherwise None."""
        return self.straggler if self.straggler is not None and self.straggler.rank == 0 else None

    @property
    def slow_elsewhere(self) -> Straggler | None:
        """The straggler if this rank waits for it, otherwise None."""
        return self.straggler if self.slow_here is None else None

    def sum_ms(self, *parts: str) -> float | None:
        """Return the sum of several parts; None if none of them was measured."""
        known = [self.parts_ms[part] for part in parts if part in self.parts_ms]
        return sum(known) if known else None

    def to_pct(self, ms: float) -> float:
        """Return the percentage of the step, at most 100."""
        return min(100.0, 100 * ms / self.step_ms)

    def format_ms(self, ms: float) -> str:
        """Format as ``60.0 of 100.0 ms a step``, with a second digit if steps are short."""
        digits = 1 if self.step_ms >= 10 else 2
        return f"{ms:.{digits}f} of {self.step_ms:.{digits}f} ms a step"


@dataclass(frozen=True, kw_only=True)
class Attribution(StepParts):
    """The owners of a step's milliseconds. The rules read this record."""

    inside: Inside | None
    """None if neither forward, backward nor optimizer was measured."""
    exchange: Exchange | None
    """Without the wait for a slow rank; None on one rank."""
    drained: bool | None
    """Whether the device had almost no work left when the host had issued all of it; None if unknown."""
    device_ms: float | None
    """The device's own work if faster kernels would shorten the step; None if something else hides it."""
    is_limit: bool
    """The device is a GPU, and almost nothing else makes the step wait."""
    gpu_use: Use | None
    """What a busy GPU spends its time on; None if unknown."""
    garbage_ms: float
    """Python's garbage collection, a part of ``host_other``."""
    compile_ms: float
    """Recompiles throughout the window, also a part of ``host_other``; 0 if compiling happened only once."""
    pauses_ms: float
    """The time that single long steps add to the mean step, without `GAPS` and garbage collection."""
    sync_lines: tuple[Mapping[str, Any], ...]
    """Lines that synchronize about every step or cost time, the most expensive first."""
    free_data_pct: float | None
    """Gain of a trial without the loader; None without a usable trial."""


def attribute(seen: Measurement) -> Attribution | None:
    """Assign every millisecond of a step to an owner; returns None if no step or none of its parts was measured."""
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
        device_ms=inside.busy if inside is not None and (limits or _works_in_turns(step, inside, drained)) else None,
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
    return None if left is None else left < max(DRAINED_MS, DRAINED_SHARE * step.step_ms / count_micro_batches(seen))


def _find_exchange(step: StepParts) -> Exchange | None:
    """Find the cost of the gradient exchange, from two trials, a trace or the measured parts.

    Both trials replay batches, one with the exchange and one without. The unchanged run cannot replace the first: in
    its exchange, fast ranks also wait for those with late data. A wait for a slow rank is subtracted; trials have no
    such wait if that rank's data is what is slow.
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
    carved = "comm_exposed" in step.parts_ms  # then the backward part does not include it
    comm = 0.0 if exchange is None or carved else min(room - waits, exchange.ms)
    room -= waits + comm
    off = _find_blocked(step)
    if not step.on_gpu:
        blocked = None if off is None else min(room, off)
        return Inside(blocked=blocked, busy=room - (blocked or 0.0))
    idle = _divide_by_trace(step, room, off) or _divide_by_counters(step, room, off, drained)
    if idle is None:
        return Inside(busy=room)
    sync, blocked, launch, source = idle
    rest = max(0.0, room - sync - (blocked or 0.0) - launch)
    unseen = _find_unseen(step, rest)
    busy = rest - unseen
    if source != "trace" and not sync:  # the queue had work once the step was issued, but ran empty during it
        sync = _compute_explained_share(step, unseen)
        unseen -= sync
        source = read_activity(step.measured)[1] if sync else source
    owners = Inside(sync=sync, blocked=blocked, launch=launch, source=source)
    return dataclasses.replace(owners, unseen=unseen, busy=busy)


def _works_in_turns(step: StepParts, inside: Inside, drained: bool | None) -> bool:
    """Whether a GPU's own work takes most of a step, by its counters or a trace, and nothing else hides it.

    Worker processes, and a host that launches without pause, work in parallel with the GPU: if they do not keep up,
    faster kernels only wait longer. Callbacks, the loop and batches made in this process alternate with the GPU's work
    if it still has some when the host has launched everything.
    """
    known = read_activity(step.measured)[0] is not None or inside.source == "trace"
    if not step.on_gpu or not known or inside.busy < MOSTLY_BUSY * step.step_ms:
        return False
    in_turn = drained is False
    loads_here = in_turn and read_loader(step.measured).get("num_workers") == 0
    beside = 0.0 if loads_here else step.parts_ms.get("data_wait", 0.0)
    beside += 0.0 if in_turn else step.sum_ms("callbacks_logging", "host_other") or 0.0
    beside += (inside.blocked or 0.0) + (inside.launch or 0.0)
    return beside < STARVED_SHARE * max(0.0, step.step_ms - (step.sum_ms(*GAPS) or 0.0))


def _compute_explained_share(step: StepParts, idle: float) -> float:
    """Return the part of some idle time that synchronizing lines explain: their cost if measured, otherwise no more
    than the device works.

    The host waits for as long as the device works, so that is the most it would save by not waiting. If it would then
    still launch more slowly than the device works, the rest of the idle time is due to launches.
    """
    lines = list_syncing_lines(step.measured)
    if not lines:
        return 0.0
    waited = sum(to_number(line.get("ms_per_step")) or 0.0 for line in lines)
    active, source = read_activity(step.measured)
    if waited or active is None or (source == "nvml" and _is_starved(step)):
        return min(idle, waited or idle)
    return min(idle, step.step_ms * min(100.0, active) / 100)


def _is_device_limit(step: StepParts, inside: Inside, drained: bool | None) -> bool:
    """Whether the step mainly waits for the GPU's own work."""
    if not step.on_gpu:
        return False
    active = read_activity(step.measured)[0] or 0.0
    idle = (step.sum_ms(*STARVING) or 0.0) + sum(ms or 0.0 for ms in (inside.sync, inside.blocked, inside.launch))
    idle += inside.unseen + (step.parts_ms.get("unexplained", 0.0) if active < BUSY_PCT else 0.0)
    if idle >= STARVED_SHARE * max(0.0, step.step_ms - (step.sum_ms(*GAPS) or 0.0)):
        return False
    return drained is False or active >= BUSY_PCT


def _find_blocked(step: StepParts) -> float | None:
    """Return the host's time off the CPU that the user's code causes: a lower bound.

    During backward the calling thread also sleeps for other reasons: on CUDA for autograd's thread, with several ranks
    for their gradients. So in these cases the host's whole backward is assumed to be such sleep.
    """
    seen, slow = step.measured, step.slow_here
    off = to_number(seen.blocked_ms)
    if off is not None and slow is not None and slow.part in COMPUTE:
        off = max(0.0, off - slow.excess_ms)
    if off is None or (seen.device == "cpu" and seen.world_size == 1):
        return off if off is None else off - _find_thread_waits(step, off)
    backward = to_number(seen.host_ms.get("backward"))
    return None if backward is None else max(0.0, off - backward)


def _find_thread_waits(step: StepParts, off: float) -> float:
    """Return at most how much of the time off the CPU torch's other threads spent waiting for a crowded CPU.

    Such waits take about the same share of forward, backward and optimizer, but the user's code sleeps in the forward.
    """
    seen, in_forward = step.measured, to_number(step.measured.forward_blocked_ms)
    threads = to_number((seen.evidence.get("cpu") or {}).get("threads")) or 1
    if not is_crowded(seen) or threads < 2 or in_forward is None:
        return 0.0
    rest_ms = step.sum_ms("backward", "optimizer") or math.inf
    elsewhere = max(0.0, off - in_forward)
    return min(off, elsewhere * (1 + step.parts_ms.get("forward", 0.0) / rest_ms))


_Idle = tuple[float, float | None, float, Source]
"""Idle milliseconds after synchronizations, for a sleeping host and for launches, and their source."""


def _divide_by_trace(step: StepParts, room: float, off: float | None) -> _Idle | None:
    """Divide idle time by the trace, scaled to the untraced step, since tracing slows the host down."""
    traced = read_trace(step.measured)
    if traced is None:
        return None
    idle = {kind: to_number(value) or 0.0 for kind, value in (traced.get("idle_ms") or {}).items()}
    busy = to_number(traced.get("busy_ms")) or 0.0
    free = max(0.0, step.step_ms - (step.sum_ms(*GAPS) or 0.0) - busy)
    scale = min(1.0, free / sum(idle.values())) if any(idle.values()) else 0.0
    after_sync, launch, other = (scale * idle.get(kind, 0.0) for kind in ("sync", "launch", "other"))
    sync = min(room, after_sync, busy)  # see _compute_explained_share
    launch += max(0.0, after_sync - busy)
    blocked = None if off is None else min(off, launch + other, room - sync)
    launch = max(0.0, launch - max(0.0, (blocked or 0.0) - other))
    return sync, blocked, min(launch, room - sync - (blocked or 0.0)), "trace"


def _divide_by_counters(step: StepParts, room: float, off: float | None, drained: bool | None) -> _Idle | None:
    """Divide idle time without a trace: the time that the counters report as idle and that no part owns."""
    idle = _find_idle(step, room, drained)
    if idle is None:
        return None
    left, source = idle
    sync = _compute_explained_share(step, left) if drained else 0.0
    left -= sync
    blocked = None if off is None else min(left, off)
    return sync, blocked, left - (blocked or 0.0) if drained else 0.0, source


def _find_idle(step: StepParts, room: float, drained: bool | None) -> tuple[float, Source] | None:
    active, source = read_activity(step.measured)
    if drained is None and source != "counters":
        return None
    if not drained and source != "counters":
        return 0.0, source  # work is queued, and there is no finer reading
    if active is None:
        return room, "bound"
    if source == "nvml" and _is_starved(step):
        return None
    elsewhere = step.sum_ms(*STARVING, *GAPS, "h2d") or 0.0
    return min(room, max(0.0, step.step_ms * (1 - min(100.0, active) / 100) - elsewhere)), source


def _find_unseen(step: StepParts, rest: float) -> float:
    """Return how long the device was idle in the time without an owner. A queue that is full in most steps hides the
    steps in which it is not.

    Idle time below `WORTH_NAMING_PCT` counts as 0: it is only the difference between a clock and a counter.
    """
    active, source = read_activity(step.measured)
    if active is None or (source == "nvml" and _is_starved(step)):
        return 0.0
    idle = max(0.0, rest - step.step_ms * min(100.0, active) / 100)
    return idle if 100 * idle >= WORTH_NAMING_PCT * step.step_ms else 0.0


def _is_starved(step: StepParts) -> bool:
    """Whether the device is starved, so that NVML reads too little: 4 % when it had work for 14 % of the time."""
    return (step.sum_ms(*STARVING) or 0.0) >= STARVED_SHARE * step.step_ms


def _find_pauses(step: StepParts) -> float:
    """Return the milliseconds that single long steps add to the mean step, without `GAPS` and garbage collection."""
    added = to_number((step.measured.evidence.get("pauses") or {}).get("ms_per_step")) or 0.0
    return max(0.0, added - find_garbage(step.measured) - (step.sum_ms(*GAPS) or 0.0))


def find_garbage(seen: Measurement) -> float:
    """Return the milliseconds of garbage collection per step on the rank where it took longest."""
    return max([read_garbage_ms(seen), *(to_number(rank.get("garbage_ms")) or 0.0 for rank in seen.ranks)])
