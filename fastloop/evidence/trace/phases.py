"""The phases of a traced step on the host, and when the device reached them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from fastloop.evidence.trace.chrome import ChromeTrace, DeviceSpan, HostSpan
from fastloop.evidence.trace.families import classify_kernel
from fastloop.evidence.trace.host_ranges import list_own_time
from fastloop.evidence.trace.intervals import Span

Segment = tuple[float, float, str]
"""Begin, end and phase: disjoint; each moment belongs to its innermost phase."""


def list_phases(trace: ChromeTrace, thread: Any) -> Phases:
    """The phases that ran in a thread. Names with a further slash are ranges inside phases."""
    return Phases([row for row in trace.ranges if row.thread == thread and "/" not in row.name], thread)


class Phases:
    """The phases of one thread, flattened."""

    def __init__(self, ranges: Sequence[HostSpan], thread: Any) -> None:
        self.thread = thread
        self._segments: list[Segment] = sorted((begin, end, name) for name, begin, end in list_own_time(ranges))
        self._begins = [begin for begin, _, _ in self._segments]

    def at(self, moment: float) -> str | None:
        """The phase at a moment."""
        segment = self._find(moment)
        return segment[2] if segment else None

    def end_at(self, moment: float) -> float:
        """The end of the phase at a moment; outside of phases, the begin of the next one."""
        if segment := self._find(moment):
            return segment[1]
        place = bisect_right(self._begins, moment)
        return self._begins[place] if place < len(self._begins) else float("inf")

    def spans(self, name: str) -> list[Span]:
        return [(begin, end) for begin, end, phase in self._segments if phase == name]

    def between(self, begin: float, end: float) -> Iterator[Segment]:
        """The phases within an interval, clipped to it."""
        for first, last, name in self._segments:
            if first < end and last > begin:
                yield max(first, begin), min(last, end), name

    def _find(self, moment: float) -> Segment | None:
        place = bisect_right(self._begins, moment) - 1
        return self._segments[place] if place >= 0 and moment < self._segments[place][1] else None


class Reached:
    """When the device reaches a host mark: the time of a CUDA event, had one been recorded there.

    Counts the work of the busiest stream and the communication, which the backward makes that stream wait for. Copies
    and kernels on other streams delay an event only if something waits for them, which a trace does not show.
    """

    def __init__(self, trace: ChromeTrace) -> None:
        spent = defaultdict[Any, float](float)
        for work in trace.work:
            if not work.copy and not _exchanges(work):
                spent[work.stream] += work.end - work.begin
        main = max(spent, key=lambda stream: spent[stream], default=None)
        ordered = [work for work in trace.work if work.stream == main or main is None or _exchanges(work)]
        # Work launched before the recording began has no launch in the trace; it comes first on its stream.
        known = {work.stream: work.begin for work in reversed(ordered) if work.launched is not None}
        rows = sorted((_find_call(work, known.get(work.stream)), work.end) for work in ordered)
        self._called = [called for called, _ in rows]
        self._ends = list(accumulate((end for _, end in rows), max))

    def __call__(self, host: float) -> float:
        place = bisect_left(self._called, host)
        return max(host, self._ends[place - 1]) if place else host


def _exchanges(work: DeviceSpan) -> bool:
    return not work.copy and classify_kernel(work.name) == "nccl"


def _find_call(work: DeviceSpan, first_known: float | None) -> float:
    if work.launched is not None:
        return work.launched
    before = first_known is not None and work.begin < first_known
    return float("-inf") if before else work.begin
