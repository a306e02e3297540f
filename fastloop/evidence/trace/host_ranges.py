"""Self time of nested host intervals (operators or ranges), excluding the intervals inside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fastloop.evidence.trace.chrome import HostSpan


def list_own_time(nested: Sequence[HostSpan]) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of every interval in which an entry was the innermost of its thread."""
    threads = defaultdict[Any, list[HostSpan]](list)
    for row in nested:
        threads[row.thread].append(row)
    for rows in threads.values():
        yield from _list_innermost(sorted(rows, key=lambda row: (row.begin, -row.end)))


def _list_innermost(rows: Sequence[HostSpan]) -> Iterator[tuple[str, float, float]]:
    stack, at = list[HostSpan](), float("-inf")
    for row in [*rows, None]:
        begin = row.begin if row else float("inf")
        while stack and stack[-1].end <= begin:
            done = stack.pop()
            if at < done.end:
                yield done.name, at, done.end
                at = done.end
        if row:
            if stack and at < begin:
                yield stack[-1].name, at, begin
            at = max(at, begin)
            stack.append(row)
