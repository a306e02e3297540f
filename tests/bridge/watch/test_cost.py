"""What watching costs is measured, and measured against what it stands in for."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch

from fastloop.bridge.watch import measurement
from fastloop.bridge.watch.phases import find_phase
from fastloop.bridge.watch.window import Watch

CPU = torch.device("cpu")


def test_the_actions_are_those_that_are_marked() -> None:
    assert {find_phase(name) for name in measurement.ACTIONS} >= {
        "h2d",
        "forward",
        "backward",
        "optimizer",
        "callbacks_logging",
    }


def test_microseconds_not_milliseconds() -> None:
    assert -300 < (measurement.measure_cost_us(CPU) or 1000) < 300


def test_a_watch_that_dawdles_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_end = Watch.batch_end

    def dawdle(self: Watch, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.001)
        batch_end(self, *args, **kwargs)

    monkeypatch.setattr(Watch, "batch_end", dawdle)
    assert (measurement.measure_cost_us(CPU, steps=80) or 0) > 900


def test_a_profiler_that_hears_every_call_would_be_what_is_measured() -> None:
    sys.setprofile(lambda *_: None)
    try:
        assert measurement.measure_cost_us(CPU) is None
    finally:
        sys.setprofile(None)
