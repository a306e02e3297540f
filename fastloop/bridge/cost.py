"""What watching costs a step: our marks against the calls of Lightning's own that they stand in for, in turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.profilers import PassThroughProfiler

from fastloop.bridge.marks import BODY, NEXT
from fastloop.bridge.profiler import WatchingProfiler
from fastloop.bridge.watch import Watch
from fastloop.config import WatchSettings
from fastloop.evidence.clock import EVERY, FIRST_IN_DETAIL

TURNS, NEVER = 10, 10**9


def actions(module: str = "LightningModule", strategy: str = "Strategy") -> Iterator[str]:
    """The actions of one batch as Lightning names them, without any callback."""
    yield from (f"[LightningModule]{module}.on_before_batch_transfer", f"[Strategy]{strategy}.batch_to_device",
                f"[LightningModule]{module}.on_after_batch_transfer",
                f"[LightningModule]{module}.on_train_batch_start", BODY,
                f"[LightningModule]{module}.optimizer_step", f"[Strategy]{strategy}.training_step",
                f"[LightningModule]{module}.on_before_zero_grad", f"[LightningModule]{module}.optimizer_zero_grad",
                f"[LightningModule]{module}.on_before_backward",
                f"[Strategy]{strategy}.backward", f"[LightningModule]{module}.on_after_backward",
                f"[LightningModule]{module}.on_before_optimizer_step",
                f"[LightningModule]{module}.configure_gradient_clipping",
                f"[LightningModule]{module}.on_train_batch_end")  # fmt: skip


def cost_us(device: torch.device, steps: int = 60) -> float | None:
    """Microseconds that watching adds to a step of one batch; under zero where it saves more calls than it makes.

    Lightning opens some fifteen profiler actions a step, each a generator's context; while we watch, most of them cost
    less. Measured with the calls of a step and none of its work: ours in detail, ours as most steps are, and the
    Trainer's own, in turns. The quickest turn of each counts, for what else the machine does only makes one longer.
    None while a profiler or a debugger hears every call of Python's, whose cost it would be.
    """
    if sys.getprofile() is not None or sys.gettrace() is not None:
        return None
    watch = Watch(device, WatchSettings(warmup_steps=0))
    ours: Any = WatchingProfiler(PassThroughProfiler(), watch.ask, watch.got, watch.marks.profile)
    loss, batch = torch.zeros((), device=device), [torch.zeros(1), torch.zeros(1)]

    def batch_end(until_detail: int) -> None:
        watch.clock.until_detail = until_detail
        watch.batch_end(loss, batch, 1, step_ends=True, batches_per_step=1)

    cases = (_step(PassThroughProfiler(), lambda: None), _step(ours, lambda: batch_end(1)),
             _step(ours, lambda: batch_end(NEVER)))  # fmt: skip
    _spent(cases[1], FIRST_IN_DETAIL + 2)  # the window begins
    per_turn = max(1, steps // TURNS)
    turns = [[_spent(step, per_turn, lambda: watch.clock.account) for step in cases] for _ in range(TURNS)]
    watch.close()
    plain_s, detailed_s, usual_s = (min(turn[case] for turn in turns) for case in range(3))
    each_s = usual_s + (detailed_s - usual_s) / EVERY.get(device.type, 1)
    return 1e6 * (each_s - plain_s) / per_turn


def _step(profiler: Any, batch_end: Callable[[], None]) -> Callable[[], None]:
    names = list(actions())
    before, inside, after = names[: names.index(BODY)], names[names.index(BODY) + 1 : -1], names[-1]

    def step() -> None:
        profiler.start(NEXT)
        profiler.stop(NEXT)
        for name in before:
            with profiler.profile(name):
                pass
        with profiler.profile(BODY):
            for name in inside:
                with profiler.profile(name):
                    pass
        with profiler.profile(after):
            pass
        batch_end()

    return step


def _spent(step: Callable[[], None], steps: int, settle: Callable[[], Any] = lambda: None) -> float:
    step()  # still of the kind that the last case made
    settle()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    settle()  # which is otherwise done for many steps at once
    return time.perf_counter() - begun
