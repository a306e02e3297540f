"""Measurements of one run, on one rank or all of them. Free of torch and Lightning; ``None`` = not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

PARTS = (
    "data_wait",
    "h2d",
    "forward",
    "backward",
    "optimizer",
    "comm_exposed",
    "callbacks_logging",
    "validation",
    "checkpoint",
    "epoch_gap",
    "host_other",
    "unexplained",
)
GAPS = ("validation", "checkpoint", "epoch_gap")
"""Parts that do not occur in every step."""
COMPILE, VALIDATION_COMPILE, AUTOTUNE = "compile", "validation_compile", "autotune"
WORKERS, REHEARSAL, FIRST_CALLS, CACHE_FILL = "workers", "rehearsal", "first_calls", "cache_fill"
ONE_TIME = (COMPILE, VALIDATION_COMPILE, AUTOTUNE, WORKERS, REHEARSAL, FIRST_CALLS, CACHE_FILL)
"""Causes of costs that occur once per fit, in the order in which reports list them."""
MEMORY = "memory"
"""Key of the evidence on memory growth: its pace, the steps left, what keeps the tensors; absent if none."""
STEP_TIMES = ("mean", "median", "p10", "p90")
GPU_READINGS = (
    "nvml_busy_pct",
    "sm_active_pct",
    "tensor_active_pct",
    "dram_active_pct",
    "watts",
    "gr_active_pct",
    "pcie_rx_gb_per_s",
    "pcie_tx_gb_per_s",
    "sm_clock_mhz",
    "sm_clock_max_mhz",
    "throttle",
)
"""Means over the window. ``nvml_busy_pct``: share of time with any kernel running; ``gr_active_pct``: the same from the
GPM counters; ``throttle``: reasons that occurred, a list of names."""
MFU_PEAKS = ("datasheet", "measured_peak", "dtype_in_use")
FAMILIES = ("gemm", "attention", "convolution", "elementwise", "normalisation", "optimizer", "copy", "nccl", "other")
CEILINGS: tuple[Literal["replayed", "resident", "no_exchange"], ...] = ("replayed", "resident", "no_exchange")
DISTURBED = 0.9
"""Share of the run's rate: a trial that is slower than this, although it does less work, did not have the machine to
itself."""
UNEVEN = 2.0
"""If the mean step is at least this many times the median, a few long steps dominate it."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The steady part of a run. A step is one optimizer step with all its micro-batches."""

    schema: ClassVar[int] = 1
    steps: int = 0
    """Optimizer steps inside the window."""
    samples_per_s: float | None = None
    """Sum over all ranks."""
    step_ms: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(STEP_TIMES))
    wall_ms: float | None = None
    """Length of the window, without one-time costs."""
    lead_ms: float | None = None
    """Work still queued on the device when the host got its batch (median); None on the CPU: only one clock."""
    trail_ms: float | None = None
    """Work still queued on the device after the host issued the whole step (median): about 0 if launch-bound."""
    window_too_short: bool = True
    queue_error_pct: float | None = None
    """Percent by which ``samples_per_s`` may be too high, at most: batches used in the window and begun before it."""
    parts_ms: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(PARTS))
    """Means per optimizer step, on the device's timeline: they add up to ``step_ms.mean``."""
    host_ms: Mapping[str, float | None] = field(default_factory=dict)
    """Host time for the same parts, per optimizer step. Never add it to ``parts_ms``."""
    blocked_ms: float | None = None
    """Host time of forward, backward and optimizer spent off the CPU: sleeping, waiting, reading."""
    forward_blocked_ms: float | None = None
    """The forward's part of ``blocked_ms``."""
    hooks_ms: Mapping[str, float] = field(default_factory=dict)
    """Host time per optimizer step of the slowest hooks, by name."""
    loss: tuple[float, ...] = ()
    """One value per optimizer step, thinned evenly above 10,000."""
    loss_every: int = 1
    """Optimizer steps between two points of ``loss``."""
    peak_gib: float | None = None
    gpu: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(GPU_READINGS))
    timeline: tuple[Mapping[str, Any], ...] = ()
    """The GPU once a second: ``t_s`` since the window began and the numbers of ``gpu``; at most 600 rows."""
    flops: Mapping[str, Any] = field(default_factory=dict)
    """Work per sample, counted eager: ``per_sample``, of which ``matmul``, ``convolution``, ``attention``;
    ``recomputed``, not part of it; ``at_least``: some operators could not be counted, and ``uncounted``: which;
    ``misaligned``, if there is any: the part of ``matmul`` in products of 16-bit matrices of which one has rows of
    ``misaligned_size`` elements, no multiple of 8; ``source``; ``why`` if there is no count."""
    peaks: Mapping[str, Any] = field(default_factory=dict)
    """The capabilities of this GPU: ``dtype`` in use, ``datasheet_tflop_per_s`` (bf16), ``dtype_tflop_per_s``,
    ``measured_tflop_per_s`` (a bf16 product on it), ``dram_tb_per_s``, ``measured_copy_tb_per_s``; and whether float32
    work may run in TF32: ``matmul_tf32``, ``convolution_tf32``."""
    tflop_per_s: float | None = None
    """Rate per device."""
    mfu: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(MFU_PEAKS))
    tokens_per_s: float | None = None
    """Including padding."""
    unpadded_tokens_per_s: float | None = None
    """According to the attention mask; None if there is none."""
    joule_per_sample: float | None = None
    usd_per_million_samples: float | None = None
    kernels: Mapping[str, Any] | None = None
    """From a trace window outside the timed steps, per step: ``families_ms`` (unions over streams), ``idle_ms`` {data,
    launch, sync, other}, ``busy_ms``, ``step_ms``, ``nccl_overlapped_ms``, ``comm_exposed_ms``,
    ``attention_by_hand_ms`` (products and softmax of attention that no fused kernel computes, at least), ``launches``,
    ``steps`` of ``asked_steps``, ``cost_s``, ``top`` [{name, ms}]; or ``skipped``: why there is no trace."""
    syncs: tuple[Mapping[str, Any], ...] = ()
    """Device synchronizations: ``where`` (file:line), ``what``, ``per_step``, ``ms_per_step``, ``instead``, most
    expensive first. ``evidence["syncs"]``: ``hunted_steps``, the number of steps searched, if every step was
    searched."""
    ceilings: Mapping[str, float | None] = field(default_factory=dict)
    """Samples per second with costs removed, each from a trial. ``replayed``: no loader, the same few host batches;
    ``resident``: no copies either; ``no_exchange``: as ``replayed``, without the exchange of gradients. To get the cost
    of the exchange, compare ``replayed`` with ``no_exchange``, never with the unchanged run."""
    ranks: tuple[Mapping[str, Any], ...] = ()
    """Per rank: ``rank``, ``host``, and its own measurements, such as ``step_ms`` and ``parts_ms``, as above;
    ``ended_by`` and ``died_of``: the exception its fit ended with. Empty for one rank."""
    drift: tuple[Mapping[str, Any], ...] = ()
    """Later measurements of the step: ``at_s``, ``step``, ``step_ms``, ``change_pct``, ``why``."""
    state: tuple[str, ...] = ()
    """Conditions of the machine that make these figures vary over time: throttling, other processes on the GPU."""
    watch_us_per_step: float | None = None
    one_time_s: Mapping[str, float | None] = field(default_factory=dict)
    """Seconds of the whole fit, warm-up included, that later steps do not pay again, by cause: `ONE_TIME`. Not part of
    any figure of the step, unless they recurred, see ``evidence["compilation"]``."""
    world_size: int = 1
    total_steps: int | None = 0
    """Optimizer steps of the whole fit, warm-up included; None if they were not counted."""
    first_step: int | None = None
    """The optimizer step in which the window began, counted from 1; not itself included in ``steps``."""
    warmup_steps: int = 0
    global_batch: int | None = None
    """Samples per optimizer step, all ranks (median)."""
    micro_batch: int | None = None
    """Samples in one loader batch on one rank (median)."""
    device: str = "cpu"
    device_name: str | None = None
    precision: str | None = None
    """Lightning's name for it."""
    partial: bool = False
    """The fit ended by an exception or an interrupt."""
    died_of: str | None = None
    """The exception that ended it, with the first line of its message; None if it was interrupted or ended normally."""
    evidence: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def measure_unevenness(seen: Measurement, known_ms: float = 0.0) -> float | None:
    """Ratio of the mean step to the median, if a few long steps dominate the mean; else None.

    Args:
        known_ms: the part of the mean step that is known to be occasional, besides the `GAPS`.
    """
    mean, median = seen.step_ms.get("mean"), seen.step_ms.get("median")
    if not mean or not median:
        return None
    known_ms += sum(seen.parts_ms.get(part) or 0.0 for part in GAPS)
    return mean / median if mean - known_ms >= UNEVEN * median else None
