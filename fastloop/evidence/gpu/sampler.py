"""Samples the GPU's board over a window: utilization of its units, power, throttling, other processes.

A daemon thread reads NVML once a second and makes no CUDA call: it does not synchronize the training, creates no
context, takes no device memory, and never waits for the training. No exception reaches the training. Energy and
counters belong to the whole board, so a MIG slice gets none, and energy is None if other processes compute on the same
GPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from fastloop.evidence.gpu.forks import no_fork
from fastloop.evidence.gpu.nvml import Gpu, Neighbors, Unreadable
from fastloop.evidence.gpu.series import EnergyCounter, Timeline
from fastloop.records.measurement import GPU_READINGS

PERIOD_S = 1.0
STOP_LIMIT_S = 2.0
"""``stop`` takes milliseconds, and never longer than this: it abandons a thread that is stuck in NVML."""
SHORTEST_ROW_S = 0.1
"""The GPM counters give no values for a shorter time."""
NEIGHBOURS_EVERY = 10
PARTITIONED = (
    "this GPU is partitioned (MIG): utilization, power and energy would be for the whole board, so they are left out"
)
_AVERAGED = ("nvml_busy_pct", "watts")
"""Readings that NVML averages over up to a second: in a shorter window they would include time before it."""

now = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class BoardSeen:
    """The board's readings between ``start`` and ``stop``."""

    means: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(GPU_READINGS))
    """The keys of ``measurement.GPU_READINGS``; each mean is weighted by time."""
    timeline: tuple[Mapping[str, Any], ...] = ()
    """At most 600 rows: ``t_s`` at the row's end, and the means of its time."""
    joule: float | None = None
    """Energy of the whole board over ``seconds``."""
    state: tuple[str, ...] = ()
    """Conditions that make these figures vary over time, in sentences."""
    seconds: float = 0.0


class Board:
    """Watches one GPU between ``start`` and ``stop``; may be started again. A forked child does not inherit the window.

    Args:
        uuid: of the GPU, as returned by ``nvml.find_uuid``; None: there is no GPU.
    """

    def __init__(self, uuid: str | None) -> None:
        self.uuid = uuid
        self.why: str | None = None
        """Why the last ``stop`` returned nothing."""
        self._sampler: _Sampler | None = None

    def start(self) -> None:
        """Begin a window. Returns at once: even NVML's initialization happens in the thread."""
        if self._sampler is not None and self._sampler.in_this_process():
            return
        self._sampler, self.why = None, None
        if self.uuid is None:
            self.why = "there is no GPU, or its UUID is unknown"
            return
        sampler = _Sampler(self.uuid)
        try:
            sampler.start()
        except RuntimeError as error:  # the process may have no more threads
            self.why = f"no thread could be started to read NVML ({error})"
            return
        self._sampler = sampler

    def note_step(self) -> None:
        """Note that a step of the training has ended. Time after the last one does not count in the means."""
        if self._sampler is not None:
            self._sampler.stepped_at = now()

    def stop(self) -> BoardSeen | None:
        """End the window, within two seconds; None if nothing could be read, and ``why`` gives the reason."""
        sampler, self._sampler = self._sampler, None
        if sampler is None or not sampler.in_this_process():
            self.why = self.why or "it was not started"
            return None
        sampler.ending.set()
        sampler.join(STOP_LIMIT_S)
        self.why = f"NVML did not answer within {STOP_LIMIT_S:g} s" if sampler.is_alive() else sampler.why
        return None if self.why else sampler.seen


class _Reading(NamedTuple):
    at: float
    millijoule: int | None
    seconds: float = 0.0
    """The time that the numbers cover; 0 if it was too short for them."""
    numbers: Mapping[str, float | None] = MappingProxyType({})
    limits: Sequence[str] | None = None
    """What held the clocks back; None if unknown."""


class _Sampler(threading.Thread):
    def __init__(self, uuid: str) -> None:
        super().__init__(name="fastloop-board", daemon=True)
        self.ending = threading.Event()
        self.seen: BoardSeen | None = None
        self.why: str | None = None
        self.stepped_at: float | None = None
        """When the last step ended; None if nobody has noted any."""
        self._uuid, self._process = uuid, os.getpid()
        self._waiting: list[_Reading] = []
        """Readings since the last step, which count once the next step has ended."""
        self._timeline, self._energy = Timeline(), EnergyCounter()
        self._limited_s: dict[str, float] = {}
        self._clocks_seen_s = 0.0
        self._crowd = Neighbors()
        self._crowded = self._uncounted = False

    def in_this_process(self) -> bool:
        return self._process == os.getpid()

    def run(self) -> None:
        try:
            with no_fork():
                gpu = Gpu.open(self._uuid)
            try:
                self._watch(gpu)
            finally:
                with no_fork():
                    gpu.close()
        except Unreadable as reason:
            self.why = str(reason)
        except Exception as error:
            self.why = f"reading NVML failed ({type(error).__name__}: {error})"

    def _watch(self, gpu: Gpu) -> None:
        with no_fork():
            self._count_neighbors(gpu)
            max_clock = gpu.sm_clock_max_mhz()
            gpu.open_counters()
            start = before = now()
            self._energy.add(start, gpu.energy_mj())
        self._began = self._counted_until = start
        readings = 0
        while not gpu.mig:
            next_s = start + (round((before - start) / PERIOD_S) + 1) * PERIOD_S
            ends = self.ending.wait(max(next_s - now(), SHORTEST_ROW_S))
            with no_fork():
                before = self._read(gpu, before)
                readings += 1
                if ends or readings % NEIGHBOURS_EVERY == 0:
                    self._count_neighbors(gpu)
            if ends:
                break
        if gpu.mig:
            self.ending.wait()
        self.seen = self._summarize((now() if gpu.mig else self._counted_until) - start, max_clock, gpu.mig)

    def _read(self, gpu: Gpu, before: float) -> float:
        """Take one reading; returns its time."""
        at, millijoule = now(), gpu.energy_mj()
        is_row = at - before >= SHORTEST_ROW_S
        self._waiting.append(
            _Reading(at, millijoule, at - before, gpu.numbers(), gpu.throttle()) if is_row else _Reading(at, millijoule)
        )
        if self.stepped_at is None or self.stepped_at >= self._counted_until:
            self._count()
        return at

    def _count(self) -> None:
        """Count the readings that waited for the end of a step."""
        for each in self._waiting:
            self._counted_until = each.at
            self._energy.add(each.at, each.millijoule)
            if not each.seconds:
                continue
            self._timeline.add(each.at - self._began, each.seconds, each.numbers)
            if each.limits is not None:
                self._clocks_seen_s += each.seconds
                for limit in each.limits:
                    self._limited_s[limit] = self._limited_s.get(limit, 0.0) + each.seconds
        self._waiting.clear()

    def _count_neighbors(self, gpu: Gpu) -> None:
        found = gpu.find_neighbors()
        self._uncounted = self._uncounted or found.processes is None
        if found.processes or not self._crowded:
            self._crowd = found
        self._crowded = self._crowded or bool(found.processes)

    def _summarize(self, seconds: float, max_clock: float | None, mig: bool) -> BoardSeen:
        if mig:
            return BoardSeen(seconds=seconds, state=(PARTITIONED,))
        means: dict[str, Any] = {**dict.fromkeys(GPU_READINGS), **self._timeline.mean.values()}
        if seconds < PERIOD_S:
            means.update(dict.fromkeys(_AVERAGED))
        means["sm_clock_max_mhz"] = max_clock
        means["throttle"] = sorted(self._limited_s) if self._clocks_seen_s else None
        joule = None if self._crowded else self._energy.joule()
        return BoardSeen(
            means=means,
            timeline=self._timeline.rows(),
            joule=joule,
            seconds=seconds,
            state=(
                *self._describe_limits(means),
                *_describe_neighbors(self._crowd, self._uncounted and joule is not None),
            ),
        )

    def _describe_limits(self, means: Mapping[str, Any]) -> list[str]:
        if not self._limited_s:
            return []
        limits = sorted(self._limited_s.items())
        shares = ", ".join(f"{name} {100 * held / self._clocks_seen_s:.0f} %" for name, held in limits)
        clock, most = means["sm_clock_mhz"], means["sm_clock_max_mhz"]
        clocks = "" if clock is None or most is None else f" (SM clock {clock:,.0f} of {most:,.0f} MHz)"
        return [f"the GPU's clocks were held back for part of the time: {shares}{clocks}"]


def _describe_neighbors(crowd: Neighbors, energy_in_doubt: bool) -> list[str]:
    """Sentences about other processes on the GPU."""
    if crowd.processes:
        count = "another process" if crowd.processes == 1 else f"{crowd.processes} other processes"
        facts = []
        if crowd.pids:
            facts.append(f"{'pid' if len(crowd.pids) == 1 else 'pids'} {', '.join(map(str, crowd.pids))}")
        if crowd.held_bytes is not None:
            facts.append(f"holding {crowd.held_bytes / 2**30:.1f} GiB")
        if crowd.memory_free_bytes is not None and crowd.memory_total_bytes is not None:
            facts.append(f"{crowd.memory_free_bytes / 2**30:.1f} of {crowd.memory_total_bytes / 2**30:.1f} GiB free")
        return [
            f"{count} computed on this GPU ({'; '.join(facts) or 'not listed'}): rates and utilization are not this"
            " run's alone, and energy is left out"
        ]
    if energy_in_doubt:
        return ["other processes on this GPU cannot be listed here; energy is assumed to be this run's alone"]
    return []
