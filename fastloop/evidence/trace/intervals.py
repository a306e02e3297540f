"""Arithmetic on time intervals: unions, intersections and differences. Plain floats, any one unit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[float, float]
"""Begin and end. The functions below take and return *sorted, disjoint* spans unless stated otherwise."""


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Sorted disjoint spans from any spans in any order; drops empty and backward ones."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def sum_lengths(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def intersect(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The time covered by both."""
    found, i, j = list[Span](), 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """The time covered by the first and not by the second."""
    left, j = list[Span](), 0
    for begin, end in spans:
        while j < len(taken) and taken[j][1] <= begin:
            j += 1
        at, k = begin, j
        while k < len(taken) and taken[k][0] < end:
            if at < taken[k][0]:
                left.append((at, taken[k][0]))
            at = max(at, taken[k][1])
            k += 1
        if at < end:
            left.append((at, end))
    return left


class Cover:
    """Sorted disjoint spans, for many queries of how much of an interval they cover."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._begins = [begin for begin, _ in spans]
        self._before = [0.0]
        for begin, end in spans:
            self._before.append(self._before[-1] + end - begin)

    def within(self, begin: float, end: float) -> float:
        """How much of `begin` to `end` is covered."""
        return self._sum_until(end) - self._sum_until(begin) if end > begin else 0.0

    def holds(self, at: float) -> bool:
        """Whether a point in time is covered."""
        place = bisect_right(self._begins, at) - 1
        return place >= 0 and at < self._spans[place][1]

    def _sum_until(self, at: float) -> float:
        place = bisect_right(self._begins, at) - 1
        if place < 0:
            return 0.0
        begin, end = self._spans[place]
        return self._before[place] + min(at, end) - begin
