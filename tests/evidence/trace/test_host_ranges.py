"""Own time of nested stretches."""

from __future__ import annotations

from fastloop.evidence.trace.chrome import HostSpan
from fastloop.evidence.trace.host_ranges import list_own_time


def test_the_innermost_owns_the_time() -> None:
    rows = [
        HostSpan(0, 100, "linear", 1),
        HostSpan(10, 30, "t", 1),
        HostSpan(12, 20, "transpose", 1),
        HostSpan(40, 90, "addmm", 1),
    ]
    assert sorted(list_own_time(rows), key=lambda row: row[1]) == [
        ("linear", 0, 10),
        ("t", 10, 12),
        ("transpose", 12, 20),
        ("t", 20, 30),
        ("linear", 30, 40),
        ("addmm", 40, 90),
        ("linear", 90, 100),
    ]


def test_threads_do_not_nest_in_each_other() -> None:
    assert sorted(list_own_time([HostSpan(0, 10, "a", 1), HostSpan(2, 5, "b", 2)])) == [("a", 0, 10), ("b", 2, 5)]


def test_same_begin_and_broken_nesting() -> None:
    assert list(list_own_time([HostSpan(0, 10, "inner", 1), HostSpan(0, 20, "outer", 1)])) == [
        ("inner", 0, 10),
        ("outer", 10, 20),
    ]
    crossing = list(list_own_time([HostSpan(0, 10, "first", 1), HostSpan(5, 15, "second", 1)]))
    assert sum(end - begin for _, begin, end in crossing) == 15, "no moment is counted twice or lost"
