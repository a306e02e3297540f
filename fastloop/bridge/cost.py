"""What watching costs a step: our marks against the calls of Lightning's own that they stand in for, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.profilers import PassThroughProfiler

from fastloop.bridge.marks import BODY, NEXT
from fastloop.bridge.profiler import WatchingProfiler
from fastloop.bridge.watch import Watch
from fastloop.config import WatchSettings

TURNS = 8


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


def cost_us(device: torch.device, steps: int = 400) -> float:
    """Microseconds that watching adds to a step of one batch; under zero where it saves more calls than it makes.

    Lightning opens some fifteen profiler actions a step, each a generator's context; while we watch, most of them cost
    less. Measured with the calls of a step and none of its work, ours and the Trainer's own in turns.
    """
    watch = Watch(device, WatchSettings(warmup_steps=0))
    ours: Any = WatchingProfiler(PassThroughProfiler(), watch.ask, watch.got, watch.marks.profile)
    loss, batch = torch.zeros((), device=device), [torch.zeros(1), torch.zeros(1)]
    cases = (_step(PassThroughProfiler(), lambda: None),
             _step(ours, lambda: watch.batch_end(loss, batch, step_ends=True, batches_per_step=1)))  # fmt: skip
    per_turn, differences = max(1, steps // TURNS), []
    for turn in range(TURNS + 1):
        plain_s, ours_s = (_spent(step, per_turn) for step in cases)
        if turn:  # the first warms both up, and begins the window
            differences.append((ours_s - plain_s) / per_turn)
    watch.close()
    return 1e6 * statistics.median(differences)


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


def _spent(step: Callable[[], None], steps: int) -> float:
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - begun
