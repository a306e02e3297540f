"""Off the processor: asleep counts, computing does not."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from fastloop.evidence.clock import off_cpu
from fastloop.evidence.clock.off_cpu import read_off_cpu_s

there = pytest.mark.skipif(read_off_cpu_s() is None, reason="no scheduler statistics here")


def spent(what: Any) -> float:
    before = read_off_cpu_s()
    what()
    after = read_off_cpu_s()
    assert before is not None and after is not None
    return after - before


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@there
def test_sleep_counts_and_work_does_not() -> None:
    asleep = spent(lambda: time.sleep(0.2))
    busy = min(spent(lambda: compute(0.2)) for _ in range(3))  # a machine that stands still counts, too
    assert asleep > 0.15 and busy < 0.6 * asleep


def test_without_statistics_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(off_cpu, "_own", type(off_cpu._own)())

    def refuse(*_: Any, **__: Any) -> int:
        raise FileNotFoundError(2, "no such file")

    monkeypatch.setattr(os, "open", refuse)
    assert read_off_cpu_s() is None and read_off_cpu_s() is None
