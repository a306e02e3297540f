"""Measurements as real runs have them: H200 figures of the fact sheet and of benchmarks/results, and CPU runs.

Where only a step and its wait are on record, the rest is split into forward, backward and optimizer by rule of thumb.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from fastloop import diagnose
from fastloop.ladder import collect_cards
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Verdict

NO_WORKERS = {"kind": "DataLoader", "num_workers": 0, "map_style": True, "usable_cpus": 16}
H200 = {
    "datasheet_tflop_per_s": 989.0,
    "dtype_tflop_per_s": 67.0,
    "dtype": "fp32",
    "dram_tb_per_s": 4.8,
    "measured_copy_tb_per_s": 4.3,
}
BF16 = {**H200, "dtype": "bf16", "dtype_tflop_per_s": 989.0}


def findings(
    seen: Measurement, enabled: tuple[str, ...] = (), verdicts: tuple[Verdict, ...] = ()
) -> tuple[Finding, ...]:
    """What diagnosis finds with the rungs of the ladder."""
    return diagnose.list_findings(seen, collect_cards(), enabled, verdicts)


def scene(
    step: float,
    *,
    device: str = "cuda",
    gpu: dict[str, float] | None = None,
    trail: float | None = None,
    loader: dict[str, Any] | None = None,
    **rest: Any,
) -> Measurement:
    """A run whose parts are the keyword arguments that are parts; what they leave is the work, 1 : 2 : 0.2."""
    parts = {
        name: rest.pop(name)
        for name in (
            "data_wait",
            "h2d",
            "callbacks_logging",
            "validation",
            "checkpoint",
            "epoch_gap",
            "host_other",
            "comm_exposed",
            "unexplained",
        )
        if name in rest
    }
    work = step - sum(value or 0.0 for value in parts.values())
    for name, share in (("forward", 1 / 3.2), ("backward", 2 / 3.2), ("optimizer", 0.2 / 3.2)):
        parts[name] = rest.pop(name, work * share)
    none = {"data_wait": 0.0, "callbacks_logging": 0.0, "validation": 0.0, "checkpoint": 0.0, "epoch_gap": 0.0}
    evidence = {"loader": NO_WORKERS if loader is None else loader} | rest.pop("evidence", {})
    return Measurement(
        steps=200,
        total_steps=220,
        warmup_steps=20,
        window_too_short=False,
        step_ms={"mean": step},
        parts_ms=none | parts,
        gpu=gpu or {},
        trail_ms=trail,
        device=device,
        evidence=evidence,
        precision=rest.pop("precision", "32-true"),
        **rest,
    )


resnet50_naive = partial(
    scene,
    step=197.5,
    data_wait=170.0,
    h2d=4.0,
    trail=17.0,
    lead_ms=0.0,
    samples_per_s=324.0,
    peaks=H200,
    flops={"convolution": 24e9},
    gpu={"nvml_busy_pct": 4.1, "gr_active_pct": 12.0, "tensor_active_pct": 1.0},
)
"""324 img/s: one Python thread decodes."""


gpt2_naive = partial(
    scene,
    step=1578.8,
    trail=190.0,
    lead_ms=196.3,
    samples_per_s=40.5,
    tflop_per_s=36.3,
    gpu={
        "nvml_busy_pct": 99.7,
        "gr_active_pct": 99.8,
        "tensor_active_pct": 0.0,
        "dram_active_pct": 31.0,
        "sm_active_pct": 97.0,
    },
    mfu={"datasheet": 0.037, "dtype_in_use": 0.54},
    peaks=H200,
    micro_batch=8,
    global_batch=64,
    flops={"matmul": 8e11},
)
"""fp32 on the ordinary cores: NVML says busy, the tensor cores do nothing."""


gpt2_tuned = partial(
    scene,
    step=122.9,
    trail=118.0,
    lead_ms=119.0,
    samples_per_s=520.8,
    tflop_per_s=459.0,
    gpu={"nvml_busy_pct": 99.0, "gr_active_pct": 99.6, "tensor_active_pct": 45.0, "dram_active_pct": 48.0},
    mfu={"datasheet": 0.464, "dtype_in_use": 0.464},
    peaks=BF16,
    precision="bf16-mixed",
)
"""bf16, fused attention, compiled: 533,306 tokens a second, 46.4 % of the peak."""


resnet50_resident = partial(
    scene,
    step=37.3,
    trail=36.0,
    lead_ms=44.9,
    samples_per_s=6864.0,
    tflop_per_s=168.0,
    gpu={
        "nvml_busy_pct": 100.0,
        "gr_active_pct": 99.9,
        "sm_active_pct": 91.0,
        "tensor_active_pct": 20.0,
        "dram_active_pct": 55.0,
    },
    mfu={"datasheet": 0.17, "dtype_in_use": 0.17},
    peaks=BF16,
    precision="bf16-mixed",
    flops={"convolution": 24e9},
)
"""bf16, channels_last, compiled: the limit of the card, which is its memory."""


cifar10_launches = partial(
    scene,
    step=6.1,
    trail=0.02,
    lead_ms=0.03,
    samples_per_s=21036.0,
    gpu={"nvml_busy_pct": 53.0, "gr_active_pct": 54.0},
    peaks=BF16,
    precision="bf16-mixed",
    micro_batch=128,
    global_batch=128,
)
"""A resident batch of 128 in eager mode: the host cannot launch fast enough."""


on_cpu = partial(
    scene,
    step=40.0,
    device="cpu",
    data_wait=0.6,
    h2d=0.05,
    callbacks_logging=0.5,
    host_other=0.4,
    unexplained=0.05,
    blocked_ms=0.7,
    samples_per_s=800.0,
)
"""A plain run on a CPU without a fault."""


def with_trace(
    seen: Measurement, busy: float, idle: dict[str, float], families: dict[str, float], **more: Any
) -> Measurement:
    """The same run with a trace window."""
    traced = {
        "busy_ms": busy,
        "idle_ms": idle,
        "families_ms": families,
        "step_ms": busy + sum(idle.values()),
        "steps": 10,
        **more,
    }
    return dataclasses.replace(seen, kernels=traced)


def ranks(*parts: dict[str, float], step: float = 100.0, host: str = "node-{}") -> tuple[dict[str, Any], ...]:
    """One record per rank with these parts."""
    return tuple(
        {"rank": rank, "host": host.format(rank // 2), "step_ms": {"mean": step}, "parts_ms": own}
        for rank, own in enumerate(parts)
    )
