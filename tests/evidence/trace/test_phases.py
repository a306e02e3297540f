"""Phases of the host, and when the device reaches them."""

from __future__ import annotations

import pytest

from fastloop.evidence.trace.chrome import load
from fastloop.evidence.trace.phases import Phases, Reached, list_phases
from tests.evidence.trace.made import ADD, ALL_REDUCE, GEMM, MAIN, Recording


def phases(made: Recording) -> Phases:
    return list_phases(load(made.trace()), MAIN)


def test_the_innermost_phase_owns_a_moment() -> None:
    made = Recording()
    made.phase("optimizer", 0, 100)
    made.phase("forward", 10, 40)
    made.phase("backward", 40, 80)
    made.phase("rung/prefetch", 15, 20)
    found = phases(made)
    assert [found.at(moment) for moment in (5, 10, 17, 39, 40, 90, 100, -1)] == [
        "optimizer",
        "forward",
        "forward",
        "forward",
        "backward",
        "optimizer",
        None,
        None,
    ]
    assert found.spans("optimizer") == [(0, 10), (80, 100)]
    assert list(found.between(30, 50)) == [(30, 40, "forward"), (40, 50, "backward")]
    assert (found.end_at(17), found.end_at(-5), found.end_at(200)) == (40, 0, float("inf"))


def test_a_loader_s_thread_has_no_phases() -> None:
    made = Recording()
    made.phase("forward", 0, 10)
    made.host("user_annotation", "fastloop/data_wait", 0, 10, thread=5)
    assert phases(made).spans("data_wait") == []


@pytest.mark.parametrize(("host", "reached"), [(5, 30), (49, 49), (51, 150), (120, 150), (500, 500)])
def test_a_mark_is_reached_when_the_work_before_it_is_done(host: float, reached: float) -> None:
    made = Recording()
    made.kernel(GEMM, 10, 30)  # launched before the recording
    made.kernel(GEMM, 60, 150, launched=50)
    assert Reached(load(made.trace()))(host) == reached


def test_side_streams_hold_nothing_up_but_exchanges_do() -> None:
    made = Recording()
    made.kernel(GEMM, 10, 100, launched=1)
    made.kernel("Memcpy HtoD (Pinned -> Device)", 20, 400, launched=2, stream=20, category="gpu_memcpy")
    made.kernel(ADD, 20, 90, launched=3, stream=21)
    assert Reached(load(made.trace()))(10) == 100
    made.kernel(ALL_REDUCE, 50, 130, launched=4, stream=22)
    assert Reached(load(made.trace()))(10) == 130


def test_without_a_device_both_clocks_are_one() -> None:
    made = Recording()
    made.host("cpu_op", "aten::mm", 0, 50)
    assert Reached(load(made.trace()))(20) == 20
