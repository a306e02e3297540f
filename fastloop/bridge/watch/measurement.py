"""Builds a Measurement from a watch. Every number that could not be measured is None."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.profilers import PassThroughProfiler

from fastloop.bridge.watch.log_marks import SELF_LOG
from fastloop.bridge.watch.phases import BODY, NEXT
from fastloop.bridge.watch.profiler_proxy import WatchingProfiler
from fastloop.bridge.watch.window import Watch
from fastloop.config.loading import WatchSettings
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.clock.sampling import find_pauses
from fastloop.evidence.clock.step_account import COMPUTE
from fastloop.evidence.clock.step_clock import EVERY, FIRST_IN_DETAIL, Window
from fastloop.evidence.gpu import efficiency
from fastloop.records.measurement import GPU_READINGS, PARTS, Measurement
from fastloop.records.readings import REQUESTED_GARBAGE, VALIDATION

SAMPLED = ("h2d", *COMPUTE)
"""Parts that are known only from steps marked in detail."""
MOST_HOOKS = 5
GARBAGE = "garbage_collection"
"""Key in the evidence: what passes of Python's garbage collector cost per step (part of ``host_other``), and their
number."""
COMPILATION = "compilation"
"""Likewise: how often this fit compiled; ``ms_per_step`` if compiles continued through the window, and so belong to
``host_other``."""
FEW_STEPS = 3
"""Most steps of a window that may have one-time costs other than our own trials. If more have them, the costs recur,
and stay in the figures."""
PAUSES = "pauses"
"""Likewise: the number of single long steps, and what they add to the mean step, whichever part they fall in."""
IN_THE_BODY = ("on_train_batch_start", "on_before_", "on_after_", SELF_LOG)


def build_measurement(watch: Watch, about: Mapping[str, Any], evidence: Mapping[str, Mapping[str, Any]]) -> Measurement:
    """Build the measurement of a closed watch.

    Args:
        about: ``world_size``, ``precision``, ``device_name``, and the probes' results: ``flops``, ``syncs``,
            ``kernels``, ``rates``.
    """
    on_cuda, window = watch.device.type == "cuda", watch.window
    common: dict[str, Any] = {
        "loss": watch.losses.values(),
        "loss_every": watch.losses.every,
        "evidence": evidence,
        # Read before our own code allocates memory for the last figures.
        "peak_gib": torch.cuda.max_memory_allocated(watch.device) / 2**30 if on_cuda else None,
        "total_steps": watch.clock.total_steps,
        "warmup_steps": watch.settings.warmup_steps,
        "device": watch.device.type,
        "watch_us_per_step": measure_cost_us(watch.device) if watch.clock.total_steps else None,
        **{key: value for key, value in about.items() if key != "rates"},
    }
    if window is None:
        return Measurement(**common)
    if window.steps_with_recurring > FEW_STEPS:
        window, once_ms = window.put_back(), 1e3 * window.recurring_total_s / window.steps
        evidence = {**evidence, COMPILATION: {**evidence.get(COMPILATION, {}), "ms_per_step": once_ms}}
    world_size, traced = int(about.get("world_size", 1)), about.get("kernels") or {}
    timed = {
        "first_step": watch.clock.opened_at + 1,
        **_read_rates(watch, window, world_size),
        **_read_times(window, traced.get("comm_exposed_ms") if world_size > 1 else None),
    }
    if watch.garbage.passes:
        evidence = {**evidence, GARBAGE: {"ms_per_step": 1e3 * window.garbage_s, "passes": watch.garbage.passes}}
    if asked := watch.garbage.requested_s:
        where = max(asked, key=asked.__getitem__)
        ms = 1e3 * asked[where] / window.steps
        evidence = {**evidence, REQUESTED_GARBAGE: {"where": where, "ms_per_step": ms}}
    if watch.marks.validation_loading_s:
        evidence = {**evidence, VALIDATION: {"loading_ms": 1e3 * watch.marks.validation_loading_s / window.steps}}
    if (long := find_pauses(window.step_s)) is not None:
        evidence = {**evidence, PAUSES: {"ms_per_step": 1e3 * long.s_per_step, "steps": long.steps}}
    common["evidence"] = evidence
    seen = Measurement(**{**common, **timed, **_read_board(watch, timed["samples_per_s"], world_size)})
    return efficiency.add_work(seen, rates=about.get("rates"))


def _read_times(window: Window, comm_exposed_ms: float | None) -> dict[str, Any]:
    step_ms = 1e3 * window.wall_s / window.steps
    several = len(window.step_s) > 1
    deciles = statistics.quantiles(window.step_s, n=10, method="inclusive") if several else window.step_s
    parts: dict[str, float | None] = {
        part: 1e3 * seconds if (seconds := window.parts_s.get(part)) is not None else _fill_missing(part, window)
        for part in PARTS
    }
    if comm_exposed_ms is not None and (backward := parts["backward"]) is not None:
        # Events cannot separate the exchange from the backward that waits for it; the trace of later steps can.
        parts["comm_exposed"] = exposed = min(comm_exposed_ms, backward)
        parts["backward"] = backward - exposed
    known = [value for value in parts.values() if value is not None]
    parts["unexplained"] = step_ms - sum(known) if window.detailed_steps else None
    return {
        "steps": window.steps,
        "wall_ms": 1e3 * window.wall_s,
        "parts_ms": parts,
        "step_ms": {
            "mean": step_ms,
            "median": 1e3 * statistics.median(window.step_s),
            "p10": 1e3 * deciles[0],
            "p90": 1e3 * deciles[-1],
        },
        "host_ms": {part: 1e3 * seconds for part, seconds in window.host_s.items()},
        "blocked_ms": None if window.blocked_s is None else 1e3 * window.blocked_s,
        "forward_blocked_ms": None if window.forward_blocked_s is None else 1e3 * window.forward_blocked_s,
        "lead_ms": None if window.lead_s is None else 1e3 * window.lead_s,
        "trail_ms": None if window.trail_s is None else 1e3 * window.trail_s,
    }


def _fill_missing(part: str, window: Window) -> float | None:
    """Return 0.0 for a part that never occurred, None for one that could not be measured."""
    if part in ("comm_exposed", "unexplained") or (part in SAMPLED and not window.detailed_steps):
        return None
    return 0.0


def _read_rates(watch: Watch, window: Window, world_size: int) -> dict[str, Any]:
    rate, drained = window.samples / window.wall_s, False
    queued = watch.clock.queued_batches
    at_start, at_end = watch.owed
    begun_before = queued
    if at_start is not None and at_end is not None and window.batches:
        # Batches made before the window and used in it are not the pipeline's work in the window. If instead the queue
        # filled up, the loader was faster than the training, and the training's rate counts.
        rate *= 1 - max(0, at_end - at_start) / window.batches
        drained, begun_before = True, min(at_start, queued)
    # Workers fill their queues while the loop compiles: each time, a full queue is made outside the counted time.
    enough = window.batches >= 10 * queued * (1 + window.steps_with_once) or (drained and not queued)
    tokens, real = watch.tokens.per_sample()
    usd_per_hour = watch.settings.usd_per_gpu_hour if watch.device.type == "cuda" else None
    found = {
        "samples_per_s": rate * world_size if window.samples else None,
        "tokens_per_s": rate * world_size * tokens if window.samples and tokens else None,
        "window_too_short": window.steps < 10 or not enough,
        "queue_error_pct": 100 * min(1.0, begun_before / window.batches) if window.batches else None,
        "usd_per_million_samples": efficiency.compute_usd_per_million_samples(usd_per_hour, rate or None),
        "global_batch": int(statistics.median(window.step_samples)) * world_size or None,
        "micro_batch": int(statistics.median(window.batch_samples)) or None if window.batch_samples else None,
        "hooks_ms": _list_slow_hooks(watch, window),
    }
    if real is not None and tokens:
        found["unpadded_tokens_per_s"] = rate * world_size * real
    return found


def _list_slow_hooks(watch: Watch, window: Window) -> dict[str, float]:
    """Return the slowest hooks with their milliseconds per step."""
    per_step: defaultdict[str, float] = defaultdict(float)
    for name, seconds in watch.marks.hooks_s.items():
        hook = name if name == SELF_LOG else name.rpartition(".")[2]
        inside = hook.startswith(IN_THE_BODY)
        steps, scale = (window.detailed_steps, window.of_detailed) if inside else (window.steps, 1.0)
        per_step[_shorten_action(name)] += scale * 1e3 * seconds / max(1, steps)
    slowest = sorted(per_step.items(), key=lambda item: -item[1])[:MOST_HOOKS]
    return {name: ms for name, ms in slowest if ms > 0.01}


def _shorten_action(action: str) -> str:
    """Shorten ``[Callback]ModelCheckpoint{'monitor': None}.on_train_batch_end`` for people."""
    owner, _, hook = re.sub(r"^\[\w+\]|\{.*\}", "", action).rpartition(".")
    return f"{owner}.{hook}" if owner else hook


def _read_board(watch: Watch, samples_per_s: float | None, world_size: int) -> dict[str, Any]:
    """Return readings of the GPU's own counters; energy is that of one GPU board, for its share of the samples."""
    flags = {}
    if watch.device.type == "cuda":
        products, convolutions = read_tf32()
        flags["peaks"] = {"matmul_tf32": products, "convolution_tf32": convolutions}
    seen = watch.board_seen
    if seen is None:
        return flags
    own_rate = None if samples_per_s is None else samples_per_s / world_size
    return {
        **flags,
        "gpu": {**dict.fromkeys(GPU_READINGS), **seen.means},
        "timeline": seen.timeline,
        "state": seen.state,
        "joule_per_sample": efficiency.compute_joule_per_sample(seen.joule, seen.seconds, own_rate),
    }


def read_tf32() -> tuple[bool, bool]:
    """Return whether float32 matrix products, and convolutions, may run in TF32 in this process."""
    convolutions = torch.backends.cudnn
    try:
        products = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the user set it by its other name (torch 2.9)
        products = getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") == "tf32"
    try:
        return products, bool(convolutions.allow_tf32)
    except RuntimeError:
        return products, getattr(convolutions, "fp32_precision", "tf32") == "tf32"


# What watching costs per step: our marks compared with the calls of Lightning that they replace, alternating.

TURNS, NEVER = 10, 10**9
ACTIONS = (
    "[LightningModule]Module.on_before_batch_transfer",
    "[Strategy]Strategy.batch_to_device",
    "[LightningModule]Module.on_after_batch_transfer",
    "[LightningModule]Module.on_train_batch_start",
    BODY,
    "[LightningModule]Module.optimizer_step",
    "[Strategy]Strategy.training_step",
    "[LightningModule]Module.on_before_zero_grad",
    "[LightningModule]Module.optimizer_zero_grad",
    "[LightningModule]Module.on_before_backward",
    "[Strategy]Strategy.backward",
    "[LightningModule]Module.on_after_backward",
    "[LightningModule]Module.on_before_optimizer_step",
    "[LightningModule]Module.configure_gradient_clipping",
    "[LightningModule]Module.on_train_batch_end",
)
"""The actions of one batch as Lightning names them, without any callback."""


def measure_cost_us(device: torch.device, steps: int = 60) -> float | None:
    """Measure the microseconds that watching adds to a step of one batch; negative if it saves more than it costs.

    Lightning opens some fifteen profiler actions per step, each a generator's context; while we watch, most of them
    cost less. Measured with the calls of a step but none of its work: ours in detail, ours as in most steps, and the
    Trainer's own, alternating. The fastest turn of each counts, because other load can only make a turn longer. None
    while a profiler or a debugger traces every Python call, because that would be measured instead.
    """
    if sys.getprofile() is not None or sys.gettrace() is not None:
        return None
    watch = Watch(device, WatchSettings(warmup_steps=0), one_time=OneTime())
    ours: Any = WatchingProfiler(
        PassThroughProfiler(), watch.note_batch_requested, watch.note_batch_received, watch.marks.profile
    )
    loss, batch = torch.zeros((), device=device), [torch.zeros(1), torch.zeros(1)]

    def batch_end(until_detail: int) -> None:
        watch.clock.until_detail = until_detail
        watch.batch_end(loss, batch, 1, step_ends=True, batches_per_step=1)

    cases = (
        _step(PassThroughProfiler(), lambda: None),
        _step(ours, lambda: batch_end(1)),
        _step(ours, lambda: batch_end(NEVER)),
    )
    _time_step(cases[1], FIRST_IN_DETAIL + 2)  # the window begins
    per_turn = max(1, steps // TURNS)
    turns = [[_time_step(step, per_turn, lambda: watch.clock.account) for step in cases] for _ in range(TURNS)]
    watch.close()
    plain_s, detailed_s, usual_s = (min(turn[case] for turn in turns) for case in range(3))
    each_s = usual_s + (detailed_s - usual_s) / EVERY.get(device.type, 1)
    return 1e6 * (each_s - plain_s) / per_turn


def _step(profiler: Any, batch_end: Callable[[], None]) -> Callable[[], None]:
    body = ACTIONS.index(BODY)
    before, inside, after = ACTIONS[:body], ACTIONS[body + 1 : -1], ACTIONS[-1]

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


def _time_step(step: Callable[[], None], steps: int, settle: Callable[[], Any] = lambda: None) -> float:
    step()  # this one still runs in the mode that the last case set
    settle()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    settle()  # the clock would otherwise settle many steps at once
    return time.perf_counter() - begun
