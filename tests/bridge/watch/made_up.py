"""A watch driven by hand, on a clock that goes on when told to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.bridge.watch.phases import BODY
from fastloop.bridge.watch.window import Watch
from fastloop.config.loading import WatchSettings
from fastloop.feeds.batch_tree import count_rows

CPU = torch.device("cpu")


class Time:
    """Everybody's clock, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 100.0

        def now() -> float:
            return self.s

        monkeypatch.setattr("fastloop.evidence.clock.step_clock.now", now)
        monkeypatch.setattr("fastloop.bridge.watch.drift_checks.now", now)
        for module in ("window", "phases", "log_marks"):
            clocks = SimpleNamespace(monotonic=now, perf_counter=now)
            monkeypatch.setattr(f"fastloop.bridge.watch.{module}.time", clocks)

    def passes(self, seconds: float) -> None:
        self.s += seconds


def forget_compiles() -> None:
    """Other tests of this process may have compiled something, and then no work is counted in it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()


def settings(warmup_steps: int = 2, **others: Any) -> WatchSettings:
    return WatchSettings(warmup_steps=warmup_steps, **others)


def run(
    watch: Watch,
    time: Time,
    steps: int,
    *,
    wait_s: float = 0.01,
    compute_s: float = 0.03,
    batches: int = 1,
    batch: Any = None,
    fetches_inside: bool = False,
    between: Callable[[], None] | None = None,
) -> None:
    """`steps` optimizer steps of `batches` batches of 4 samples, each waited for and computed."""

    def fetch() -> None:
        watch.note_batch_requested()
        time.passes(wait_s)
        watch.note_batch_received()

    for _ in range(steps):
        for number in range(batches):
            if not fetches_inside:
                fetch()
            with watch.marks.profile(BODY):
                if fetches_inside:
                    fetch()
                time.passes(compute_s)
            given = [torch.zeros(4, 2)] if batch is None else batch
            watch.batch_end(torch.tensor(1.0 / batches), given, count_rows(given), number == batches - 1, batches)
        if between is not None:
            between()
