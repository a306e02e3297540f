"""Numbers out of a measurement that may lack any of them: what is unknown stays None."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from fastloop.measurement import DISTURBED, Measurement

TENSOR_UNUSED_PCT = 2.0
BEYOND = 0.15
"""Of the step: a trial that saves more than what it took away cost, and this, was of another speed than the run."""
TAKES_AWAY = {"replayed": ("data_wait", "epoch_gap"), "resident": ("data_wait", "epoch_gap", "h2d"),
              "no_exchange": ("data_wait", "epoch_gap", "backward", "comm_exposed")}  # fmt: skip
"""The parts of the step in which each trial's savings lie. With several ranks also the backward, in which they wait for
the one whose data comes last."""
CPU_WORTH_PCT = 10.0
"""From here on the host's doings are named on the CPU, where they are seen of few steps and compete with the training:
twenty sound trainings beside other work on two cores read up to 9.6 %."""
OFTEN = 0.5
"""Synchronisations a step from which on a line is held against the step as such."""

Source = Literal["trace", "counters", "nvml", "bound"]
"""Where a figure for idle time comes from; `bound`: nothing but an upper bound."""


def number(value: Any) -> float | None:
    """A finite number that is not negative; None for all else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def step_ms(seen: Measurement) -> float | None:
    """Mean time of a step; None where there is none."""
    return number(seen.step_ms.get("mean")) or None


def gpu(seen: Measurement, reading: str) -> float | None:
    """A reading of the GPU's own counters, a mean over the window."""
    return number(seen.gpu.get(reading))


def kernels(seen: Measurement) -> Mapping[str, Any] | None:
    """What the trace window saw, if there was one."""
    traced = seen.kernels
    return traced if traced and not traced.get("skipped") and number(traced.get("busy_ms")) else None


def families(seen: Measurement) -> dict[str, float]:
    """Kernel families as shares (0 to 1) of the device's busy time; empty without a trace."""
    traced = kernels(seen) or {}
    busy, found = number(traced.get("busy_ms")), traced.get("families_ms") or {}
    return {name: min(1.0, ms / busy) for name, value in found.items() if busy and (ms := number(value)) is not None}


def micro_batches(seen: Measurement) -> int:
    """Batches of one optimizer step on one rank; 1 where that is not known."""
    if not seen.global_batch or not seen.micro_batch:
        return 1
    return max(1, round(seen.global_batch / max(1, seen.world_size) / seen.micro_batch))


def activity(seen: Measurement) -> tuple[float | None, Source]:
    """Per cent of the time with a kernel on the device, and whose reading it is."""
    if (active := gpu(seen, "gr_active_pct")) is not None:
        return active, "counters"
    return gpu(seen, "nvml_busy_pct"), "nvml"


def syncing_lines(seen: Measurement) -> list[Mapping[str, Any]]:
    """Lines that synchronise about every step or cost time, the dearest first."""
    dear = [((number(line.get("ms_per_step")) or 0.0, number(line.get("per_step")) or 0.0), line)
            for line in seen.syncs]  # fmt: skip
    return [line for cost, line in sorted(dear, key=lambda pair: pair[0], reverse=True) if cost[0] or cost[1] >= OFTEN]


def garbage_ms(seen: Measurement) -> float:
    """What passes of Python's garbage collector cost a step, a part of ``host_other``; 0 where none was seen."""
    found = seen.evidence.get("garbage_collection") or {}
    return min(number(found.get("ms_per_step")) or 0.0, number(seen.parts_ms.get("host_other")) or 0.0)


def is_beyond(seen: Measurement, ceiling: str) -> bool:
    """Whether a trial beat the run by clearly more than the parts that it takes away: T / (T - x) is all they allow."""
    best, now, step = number(seen.ceilings.get(ceiling)), number(seen.samples_per_s), step_ms(seen)
    if not best or not now or step is None or number(seen.parts_ms.get("data_wait")) is None:
        return False
    parts = {*TAKES_AWAY[ceiling], *(TAKES_AWAY["no_exchange"] if seen.world_size > 1 else ())}
    return step * (1 - now / best) - sum(number(seen.parts_ms.get(part)) or 0.0 for part in parts) > BEYOND * step


def measured_gain_pct(seen: Measurement, ceiling: str, over: str | None = None) -> float | None:
    """What a trial without one cost gained over this run, or over another trial. A little less than nothing is 0.

    None without such trials, and where one was so much slower than what it is held against, or than the run, that
    something else disturbed it, or so much faster that something else disturbed the run.
    """
    best, now = number(seen.ceilings.get(ceiling)), number(seen.samples_per_s)
    if over is not None:
        disturbed = None in (measured_gain_pct(seen, ceiling), measured_gain_pct(seen, over))
        now = None if disturbed else number(seen.ceilings.get(over))
    if not best or not now or best < DISTURBED * now or is_beyond(seen, ceiling):
        return None
    return max(0.0, 100 * (best / now - 1))


def _fp32_share(seen: Measurement) -> float:
    """Share of fp32 in work that is fp32 and TF32; 0 where the work was not counted."""
    convolutions = number(seen.flops.get("convolution")) or 0.0
    products = sum(number(seen.flops.get(kind)) or 0.0 for kind in ("matmul", "attention"))
    ours = convolutions if seen.peaks.get("matmul_tf32") else products
    return ours / (products + convolutions) if products + convolutions else 0.0


def precision(seen: Measurement) -> str | None:
    """The numbers that most products work in: fp32, tf32, fp64, or mixed for any shorter; None where unknown."""
    if (dtype := seen.peaks.get("dtype")) is not None:
        if dtype == "fp32 + tf32":
            return "fp32" if _fp32_share(seen) >= 0.5 else "tf32"
        return str(dtype) if dtype in ("fp32", "tf32", "fp64") else "mixed"
    if seen.precision is None or not seen.precision.startswith("32"):
        return None if seen.precision is None else "fp64" if seen.precision.startswith("64") else "mixed"
    may_tf32 = bool(seen.peaks.get("matmul_tf32") or seen.peaks.get("convolution_tf32"))
    tensor = gpu(seen, "tensor_active_pct")
    return "fp32" if not may_tf32 or (tensor is not None and tensor < TENSOR_UNUSED_PCT) else "tf32"
