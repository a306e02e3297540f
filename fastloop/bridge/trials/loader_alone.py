"""Measures how fast a train loader is without a training. For disposable processes only.

The Trainer is set up as for a fit, with its rungs and ranks, and stopped right before the first step. There batches are
taken from its loader and dropped; a device feed still copies them. The loader has all CPUs to itself, so a training can
only be slower.

Several worker counts are measured in one process, each with its own Trainer, because most of a trial's time goes into
starting Python, torch and the device.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from fastloop.bridge.fit import training
from fastloop.bridge.fit.callback import FastLoop
from fastloop.bridge.trials.heartbeat import Beats, drop_other_hooks
from fastloop.bridge.trials.no_checkpoints import Measured, train_until_measured
from fastloop.bridge.watch import loader_state
from fastloop.config.loading import Config
from fastloop.errors import FastLoopError
from fastloop.feeds.device_prefetcher import DeviceFeed
from fastloop.ladder import collect_cards

LEAST_S = 3.0
"""A window lasts at least this long."""
MOST_S = 20.0
"""A window, and the batches skipped before it, last at most this long each."""
FEWEST = 3
"""Fewest batches in a window; with queues, at least twice what they hold."""
FASTER = 0.9
"""Share of the time with the previous count: a count that needs more than this is not faster."""


@dataclass(frozen=True, kw_only=True)
class LoaderWindow:
    """The batches that a loader yielded in a time window, on one rank."""

    batches: int
    seconds: float
    made: int
    """Batches made in that time, without those that were ready before it."""
    drained: bool
    """Whether the queues were emptied first, and the number of ready batches at both ends is known."""


def measure(
    config: Config, beat: Path | None, counts: Sequence[int] = (), enough_ms: float | None = None
) -> Mapping[str, Any]:
    """Measure the speed of a configuration's train loader on its own. Trains nothing and writes no files.

    Args:
        beat: the file that gets the heartbeat, see `heartbeat.py`.
        counts: numbers of workers, ascending, to measure in this order; empty: the loader as it is.
        enough_ms: stop after a count with which the slowest rank takes less than this for a step. The measurement also
            stops after a count that is no faster than the previous one.

    Returns:
        One result: ``ms_per_step`` of this rank (all batches of an optimizer step) while all ranks load, ``batches``
        and ``workers``; ``queue_drained``: whether batches made before the window are excluded; ``inactive``: the rungs
        that do not apply, and why. With `counts`, instead ``counts``: such a result for each count that was measured,
        with its ``count``; and ``inactive`` of the first.

    Raises:
        FastLoopError: as in `training.train`; or this Lightning does not expose its train loader.
    """
    if not counts:
        return _time_alone(config, beat, goes_on=False).found
    found: list[dict[str, Any]] = []
    before_ms = math.inf
    tunables = ((name, card.tunes) for name, card in collect_cards().items() if card.tunes is not None)
    name, field = next((name, tunable.field) for name, tunable in tunables if tunable.trained == "loader")
    for count in counts:
        rung = dataclasses.replace(getattr(config.ladder, name), **{"enabled": True, field: count})
        ladder = dataclasses.replace(config.ladder, **{name: rung})
        alone = _time_alone(dataclasses.replace(config, ladder=ladder), beat, goes_on=True)
        found.append({"count": count, **alone.found})
        ms, last_ms, before_ms = alone.slowest_ms, before_ms, alone.slowest_ms
        if ms < (enough_ms or 0.0) or ms > FASTER * last_ms or name in alone.found["inactive"]:
            break
        del alone
        gc.collect()  # the previous Trainer, its model and its batches
    return {"counts": found, "inactive": found[0]["inactive"]}


def _time_alone(config: Config, beat: Path | None, *, goes_on: bool) -> _Alone:
    """Measure the loader of one configuration; `goes_on`: another may follow in this process."""
    alone = _Alone(goes_on=goes_on)

    def prepare(trainer: Any, loop: FastLoop) -> None:
        alone.loop = loop
        trainer.callbacks.append(alone)

    train_until_measured(config, beat, prepare)
    return alone


class _Alone(Callback):
    """Takes batches from the loader when it is ready for the first step."""

    def __init__(self, *, goes_on: bool) -> None:
        self.goes_on = goes_on
        self.found: dict[str, Any] = {}
        self.slowest_ms = math.inf
        """Time for the batches of an optimizer step on the slowest rank, so that all ranks decide alike."""
        self.loop: FastLoop | None = None
        drop_other_hooks(self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        combined = getattr(trainer.fit_loop, "_combined_loader", None)  # there is no public way to it
        if combined is None or not hasattr(type(combined), "__next__"):
            raise FastLoopError(
                got=f"{type(combined).__name__} as the train loader",
                do="use Lightning 2.5 or 2.6",
                why="this version of Lightning does not hand out its batches",
            )
        beats = [each for each in trainer.callbacks if isinstance(each, Beats)]

        def pulse() -> None:
            for each in beats:
                each.on_train_batch_end(trainer, pl_module, None, None, 0)

        trainer.strategy.barrier("fastloop loads")  # ranks compete for the CPUs, so they begin and end together
        self.found = self._answer(trainer, time_window(_make_take(combined), trainer, pulse))
        own = torch.tensor(self.found["ms_per_step"] or math.inf, device=trainer.strategy.root_device)
        self.slowest_ms = float(trainer.strategy.reduce(own, reduce_op="max"))
        trainer.strategy.barrier("fastloop has loaded")
        if self.goes_on:
            # A fit that raises ends the ranks it started, see `shutdown.py`; the next measurement needs them.
            getattr(trainer.strategy.launcher, "procs", []).clear()
        raise Measured

    def _answer(self, trainer: Any, seen: LoaderWindow) -> dict[str, Any]:
        ms = 1e3 * seen.seconds / seen.made if seen.made > 0 else None
        steps = () if self.loop is None else self.loop.plan.steps
        counts = (getattr(loader, "num_workers", 0) or 0 for loader in loader_state.find_loaders(trainer))
        return {
            "ms_per_step": None if ms is None else ms * trainer.accumulate_grad_batches,
            "batches": seen.batches,
            "workers": sum(map(int, counts)),
            "queue_drained": seen.drained,
            "inactive": {step.rung: step.reason for step in steps if step.status == "skipped"},
        }


def time_window(take: Callable[[], Any], trainer: Any, pulse: Callable[[], None]) -> LoaderWindow:
    """Take batches until the initial content of the queues is used up, and then for the time to be measured.

    Args:
        take: returns the next batch.
        pulse: called after every batch, as a sign of life.
    """
    held = loader_state.count_queued_batches(trainer)
    passed = _pass_over(take, max(1, held), pulse)
    batches = 0
    _settle(trainer)
    before, begun = loader_state.count_batches_ready(trainer), time.perf_counter()
    while True:
        take()
        batches += 1
        pulse()
        spent = time.perf_counter() - begun
        enough = spent >= (LEAST_S if held else LEAST_S / 3) and batches >= max(FEWEST, 2 * held)
        if enough or spent >= MOST_S:
            break
    _settle(trainer)
    seconds, after = time.perf_counter() - begun, loader_state.count_batches_ready(trainer)
    if before is None or after is None:
        return LoaderWindow(batches=batches, seconds=seconds, made=batches, drained=False)
    return LoaderWindow(batches=batches, seconds=seconds, made=batches + after - before, drained=passed >= held)


def _pass_over(take: Callable[[], Any], wanted: int, pulse: Callable[[], None]) -> int:
    """Take batches without counting them, as many as wanted or as time allows; returns their number."""
    end = time.perf_counter() + MOST_S
    for number in range(wanted):
        if number and time.perf_counter() > end:
            return number
        take()
        pulse()
    return wanted


def _make_take(combined: Any) -> Callable[[], Any]:
    """Return a function that gets the next batch, across epochs, from the iterator that Lightning made for its loop."""

    def take() -> Any:
        for _ in range(2):
            try:
                return next(combined)[0]
            except StopIteration:
                iter(combined)
        raise training.make_no_batches_error("a train loader without batches")

    return take


def _settle(trainer: Any) -> None:
    """Wait for copies in progress."""
    device = trainer.strategy.root_device
    if device.type == "cuda" and any(isinstance(loader, DeviceFeed) for loader in loader_state.find_loaders(trainer)):
        torch.cuda.synchronize(device)
