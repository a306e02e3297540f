"""What was measured in one run, on one rank or all of them. Free of torch and Lightning; ``None`` = not measured."""

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
"""Parts that do not come with every step."""
COMPILE, VALIDATION_COMPILE, AUTOTUNE = "compile", "validation_compile", "autotune"
WORKERS, REHEARSAL, CACHE_FILL = "workers", "rehearsal", "cache_fill"
ONE_TIME = (COMPILE, VALIDATION_COMPILE, AUTOTUNE, WORKERS, REHEARSAL, CACHE_FILL)
"""Causes of costs that come once in a fit, in the order in which reports name them."""
MEMORY = "memory"
"""Among the evidence: how fast memory creeps, how many steps it lasts, what keeps the tensors; absent if none."""
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
GPM counters; ``throttle``: reasons seen, a list of names."""
MFU_PEAKS = ("datasheet", "measured_peak", "dtype_in_use")
FAMILIES = ("gemm", "attention", "convolution", "elementwise", "normalisation", "optimizer", "copy", "nccl", "other")
CEILINGS: tuple[Literal["replayed", "resident", "no_exchange"], ...] = ("replayed", "resident", "no_exchange")
DISTURBED = 0.9
"""Of the run's own rate: a trial that is slower than this although it has less to do was not alone on the machine."""
UNEVEN = 2.0
"""Times the median step, from which on the mean one is that of a few long steps."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The steady part of a run. A step is one optimizer step with all its micro-batches."""

    schema: ClassVar[int] = 1
    steps: int = 0
    """Optimizer steps inside the window."""
    samples_per_s: float | None = None
    """All ranks together."""
    step_ms: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(STEP_TIMES))
    wall_ms: float | None = None
    """Length of the window, without one-time costs."""
    lead_ms: float | None = None
    """Work the device still had when the host got its batch (median); None on the CPU, where both are one clock."""
    trail_ms: float | None = None
    """Work the device still had when the host had issued the whole step (median): about 0 where launches limit."""
    window_too_short: bool = True
    parts_ms: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(PARTS))
    """Means per optimizer step, on the device's time line: they add up to ``step_ms.mean``."""
    host_ms: Mapping[str, float | None] = field(default_factory=dict)
    """What the host spent on the same parts, per optimizer step. Never to be added to ``parts_ms``."""
    blocked_ms: float | None = None
    """Host time of forward, backward and optimizer that was spent off the processor: sleeping, waiting, reading."""
    hooks_ms: Mapping[str, float] = field(default_factory=dict)
    """Host time per optimizer step of the slowest hooks, by their names."""
    loss: tuple[float, ...] = ()
    """One per optimizer step, thinned evenly above 10,000."""
    loss_every: int = 1
    """Optimizer steps between two points of ``loss``."""
    peak_gib: float | None = None
    gpu: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(GPU_READINGS))
    timeline: tuple[Mapping[str, Any], ...] = ()
    """The GPU once a second: ``t_s`` since the window began and the numbers of ``gpu``; at most 600 rows."""
    flops: Mapping[str, Any] = field(default_factory=dict)
    """Work per sample, counted eager: ``per_sample``, of which ``matmul``, ``convolution``, ``attention``;
    ``recomputed`` beside them; ``at_least``: some operators could not be counted, and ``uncounted`` which;
    ``source``; ``why`` where there is no count."""
    peaks: Mapping[str, Any] = field(default_factory=dict)
    """What this GPU can do: ``dtype`` in use, ``datasheet_tflop_per_s`` (bf16), ``dtype_tflop_per_s``,
    ``measured_tflop_per_s`` (a bf16 product here), ``dram_tb_per_s``, ``measured_copy_tb_per_s``; and whether float32
    work may run in TF32 here: ``matmul_tf32``, ``convolution_tf32``."""
    tflop_per_s: float | None = None
    """Per device."""
    mfu: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(MFU_PEAKS))
    tokens_per_s: float | None = None
    """Padding included."""
    unpadded_tokens_per_s: float | None = None
    """As an attention mask tells; None where there is none."""
    joule_per_sample: float | None = None
    joule_error_pct: float | None = None
    usd_per_million_samples: float | None = None
    kernels: Mapping[str, Any] | None = None
    """From a trace window outside the timed steps, per step: ``families_ms`` (unions over streams), ``idle_ms``
    {data, launch, sync, other}, ``busy_ms``, ``step_ms``, ``nccl_overlapped_ms``, ``comm_exposed_ms``,
    ``attention_by_hand_ms`` (products and softmax of attention that no fused kernel computes, at least), ``launches``,
    ``steps`` of ``asked_steps``, ``cost_s``, ``top`` [{name, ms}]; or ``skipped``: why there is none."""
    syncs: tuple[Mapping[str, Any], ...] = ()
    """Device synchronisations: ``where`` (file:line), ``what``, ``per_step``, ``ms_per_step``, ``instead``, the dearest
    first. ``evidence["syncs"]``: ``hunted_steps``, where every one of so many steps was searched."""
    ceilings: Mapping[str, float | None] = field(default_factory=dict)
    """Samples per second with costs taken away, each from a trial. ``replayed``: no loader, the same few host batches;
    ``resident``: no copies either; ``no_exchange``: as ``replayed``, without the exchange of gradients. What the
    exchange costs is ``replayed`` against ``no_exchange``, never against the run as it is."""
    ranks: tuple[Mapping[str, Any], ...] = ()
    """Per rank: ``rank``, ``host``, and what it measured of itself, such as ``step_ms`` and ``parts_ms``, as above;
    ``ended_by``: the exception its fit ended with. Empty for one rank."""
    drift: tuple[Mapping[str, Any], ...] = ()
    """Later looks at the step: ``at_s``, ``step``, ``step_ms``, ``change_pct``, ``why``."""
    state: tuple[str, ...] = ()
    """What about the machine makes these figures depend on the hour: throttling, other processes on the GPU."""
    watch_us_per_step: float | None = None
    one_time_s: Mapping[str, float | None] = field(default_factory=dict)
    """Seconds of the whole fit, warm-up included, that no later step pays again, by cause: `ONE_TIME`. In none of the
    figures of the step, but where they came again and again, see ``evidence["compilation"]``."""
    world_size: int = 1
    total_steps: int | None = 0
    """Optimizer steps of the whole fit, warm-up included; None where nobody watched."""
    first_step: int | None = None
    """The optimizer step in which the window began, counted from 1; itself not one of ``steps``."""
    warmup_steps: int = 0
    global_batch: int | None = None
    """Samples per optimizer step, all ranks (median)."""
    micro_batch: int | None = None
    """Samples of one loader batch on one rank (median)."""
    device: str = "cpu"
    device_name: str | None = None
    precision: str | None = None
    """As Lightning names it."""
    partial: bool = False
    """The fit ended by an exception or an interrupt."""
    died_of: str | None = None
    """The exception that ended it, with the first line of its text; None where it was interrupted or ended well."""
    evidence: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def uneven(seen: Measurement, known_ms: float = 0.0) -> float | None:
    """How many times the median step the mean one is, where a few long steps make it so; None where they do not.

    Args:
        known_ms: of the mean step, what is known to come now and then besides the `GAPS`.
    """
    mean, median = seen.step_ms.get("mean"), seen.step_ms.get("median")
    if not mean or not median:
        return None
    known_ms += sum(seen.parts_ms.get(part) or 0.0 for part in GAPS)
    return mean / median if mean - known_ms >= UNEVEN * median else None
