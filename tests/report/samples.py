"""Whole records of made-up runs, for looking at reports. The figures say nothing about any device."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastloop.records.measurement import PARTS, Measurement
from fastloop.records.plan import Change, Finding, Plan, Step, Verdict
from fastloop.records.run_files import Environment
from fastloop.records.store import decode

ENVIRONMENT: dict[str, Any] = {
    "schema": 1,
    "commit": "0123abc",
    "dirty": True,
    "driver": "580.159.04",
    "versions": {"python": "3.11.9", "torch": "2.11.0", "lightning": "2.6.6"},
    "hardware": {"usable_cpus": 16, "cpu_model": "Some CPU", "gpus": [{"name": "NVIDIA H200"}]},
    "torch_flags": {"float32_matmul_precision": "highest"},
}
ENVIRONMENT_RECORD = decode(ENVIRONMENT, Environment) or Environment()
CHANGED = "rungs:\n  workers:\n    enabled: true\nrun:\n  max_steps: 250\n"
HOSTILE = (
    "</title></style></pre></svg><script>alert('x')</script> \"quoted\" & $\\frac{1$ {{ 7 * 7 }} {% raw %} \x01\x00 "
)
"""Everything that could end an element, start another, or be taken for a template or a formula."""


class Run(NamedTuple):
    """What a report is made from."""

    seen: Measurement
    findings: tuple[Finding, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    plan: Plan = Plan()
    name: str = ""


def parts(**ms: float) -> dict[str, float | None]:
    """Parts of a step, 0 where nothing is said."""
    return {part: ms.get(part, 0.0) for part in PARTS}


def timeline(seconds: int, **means: float) -> tuple[Mapping[str, Any], ...]:
    """Readings that swing about their means, with one second in which nothing could be read."""
    wave = [1 + 0.06 * math.sin(second / 3) + 0.03 * math.sin(2.1 * second) for second in range(seconds)]
    rows = [
        {
            "t_s": float(second),
            **{
                name: round(min(mean * wave[second], 100.0 if "pct" in name else 1e9), 2)
                for name, mean in means.items()
            },
        }
        for second in range(seconds)
    ]
    if seconds > 8:
        rows[seconds // 2] = {"t_s": float(seconds // 2), **dict.fromkeys(means)}
    return tuple(rows)


def falling(count: int, start: float, end: float) -> tuple[float, ...]:
    return tuple(
        end + (start - end) * math.exp(-4 * step / count) * (1 + 0.05 * math.sin(7.3 * step)) for step in range(count)
    )


def resnet50() -> Run:
    """Naive, starved by its loader: the issue's first screen."""
    readings = {
        "nvml_busy_pct": 13.0,
        "sm_active_pct": 9.5,
        "tensor_active_pct": 2.0,
        "dram_active_pct": 4.4,
        "watts": 187.0,
    }
    seen = Measurement(
        steps=200,
        total_steps=250,
        warmup_steps=50,
        samples_per_s=324.0,
        window_too_short=False,
        wall_ms=39500.0,
        step_ms={"mean": 197.5, "median": 196.1, "p10": 188.4, "p90": 209.9},
        lead_ms=0.02,
        trail_ms=11.2,
        parts_ms=parts(
            data_wait=169.6, h2d=3.9, forward=7.6, backward=14.4, optimizer=1.6, callbacks_logging=0.3, unexplained=0.1
        ),
        host_ms=parts(data_wait=169.8, h2d=4.1, forward=9.1, backward=6.0, optimizer=2.2, callbacks_logging=0.6),
        blocked_ms=0.4,
        hooks_ms={"LearningRateMonitor.on_train_batch_start": 0.11, "ProgressBar": 0.42},
        loss=falling(250, 7.0, 3.1),
        peak_gib=5.5,
        gpu={
            **readings,
            "gr_active_pct": 13.2,
            "pcie_rx_gb_per_s": 0.21,
            "pcie_tx_gb_per_s": 0.01,
            "sm_clock_mhz": 1980.0,
            "sm_clock_max_mhz": 1980.0,
            "throttle": [],
        },
        timeline=timeline(40, **readings),
        tflop_per_s=7.9,
        joule_per_sample=0.577,
        usd_per_million_samples=3.43,
        mfu={"datasheet": 0.008, "measured_peak": 0.0105, "dtype_in_use": 0.118},
        peaks={
            "dtype": "fp32",
            "datasheet_tflop_per_s": 989.0,
            "dtype_tflop_per_s": 67.0,
            "measured_tflop_per_s": 751.0,
            "dram_tb_per_s": 4.8,
            "measured_copy_tb_per_s": 4.02,
        },
        flops={"per_sample": 24.5e9, "at_least": False, "source": "FlopCounterMode, eager"},
        ceilings={"replayed": 2310.0, "resident": 2697.0, "no_exchange": None},
        watch_us_per_step=18.0,
        global_batch=256,
        micro_batch=64,
        device="cuda",
        device_name="NVIDIA H200",
        precision="32-true",
        evidence={"loader": {"num_workers": 0, "usable_cpus": 16, "queued_batches": 0}},
    )
    finding = Finding(
        bottleneck="data_wait",
        title="STARVED BY DATA",
        share_pct=85.9,
        ceiling_gain_pct=732.4,
        ceiling_is_estimate=False,
        why="the GPU was idle for 86 % of each step: Python was decoding JPEGs",
        patch={"rungs": {"workers": {"enabled": True}}},
    )
    return Run(seen, (finding,), name="resnet50")


def gpt2() -> Run:
    """Naive, busy with fp32 arithmetic; traced, and its work only counted from below."""
    run = resnet50()
    readings = {
        "nvml_busy_pct": 99.7,
        "sm_active_pct": 96.0,
        "tensor_active_pct": 0.0,
        "dram_active_pct": 31.0,
        "watts": 640.0,
    }
    seen = dataclasses.replace(
        run.seen,
        samples_per_s=40.5,
        tokens_per_s=41472.0,
        global_batch=64,
        micro_batch=8,
        lead_ms=182.0,
        step_ms={"mean": 1579.0, "median": 1578.8, "p10": 1577.0, "p90": 1582.0},
        trail_ms=171.0,
        blocked_ms=12.0,
        parts_ms=parts(forward=488.0, backward=1051.0, optimizer=36.5, h2d=0.1, callbacks_logging=0.4, unexplained=3.0),
        host_ms=parts(data_wait=1.1, forward=61.0, backward=48.0, optimizer=22.0, callbacks_logging=0.8),
        gpu={**run.seen.gpu, **readings, "throttle": ["sw_power_cap"]},
        timeline=timeline(120, **readings),
        tflop_per_s=36.2,
        mfu={"datasheet": 0.0366, "measured_peak": 0.048, "dtype_in_use": 0.54},
        flops={"per_sample": 875e9, "at_least": True, "source": "FlopCounterMode, eager"},
        loss=falling(250, 10.9, 6.2),
        kernels={
            "families_ms": {
                "gemm": 1102.0,
                "attention": 211.0,
                "elementwise": 164.0,
                "normalisation": 51.0,
                "optimizer": 35.0,
                "copy": 2.1,
                "other": 9.0,
            },
            "idle_ms": {"data": 0.0, "launch": 3.1, "sync": 1.2, "other": 0.4},
            "busy_ms": 1574.0,
            "step_ms": 1580.2,
            "nccl_overlapped_ms": None,
            "comm_exposed_ms": None,
            "launches": 9120,
            "steps": 3,
            "cost_s": 6.4,
            "top": [
                {
                    "name": f"void cutlass::Kernel<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>({'a' * 200})",
                    "ms": 611.0,
                },
                {"name": "void at::native::vectorized_elementwise_kernel<4, $x>", "ms": 80.2},
            ],
        },
        syncs=(
            {
                "where": "gpt2.py:88",
                "what": "Tensor.item()",
                "per_step": 8.0,
                "ms_per_step": 0.9,
                "instead": "log every 50 steps",
            },
        ),
        ceilings={"replayed": 40.5, "resident": 40.5},
        evidence={"loader": {"num_workers": 0, "usable_cpus": 16}},
        state=("the board is at its power limit",),
        drift=(
            {"at_s": 900.0, "step": 590, "step_ms": 1771.0, "change_pct": 12.2, "why": "SM clock 1,980 to 1,760 MHz"},
        ),
    )
    why = "tensor cores 0 % active; 36 TFLOP/s is 54 % of fp32's 67 and 3.7 % of bf16's 989; not workers, not pin"
    findings = (
        Finding(
            bottleneck="fp32_math",
            title="BUSY, NOT FAST: FP32 MATH",
            share_pct=97.0,
            why=why,
            patch={"rungs": {"amp": {"enabled": True, "mode": "bf16-mixed"}}},
        ),
        Finding(
            bottleneck="memory_bound",
            title="BUSY, NOT FAST: MEMORY-BOUND",
            share_pct=11.0,
            why="elementwise kernels move 3.9 TB/s",
        ),
    )
    return Run(seen, findings, name="gpt2")


def tuned() -> Run:
    """Nothing to gain: several rungs on, no advice."""
    run = gpt2()
    seen = dataclasses.replace(
        run.seen,
        samples_per_s=202.0,
        tokens_per_s=206848.0,
        precision="bf16-mixed",
        syncs=(),
        state=(),
        drift=(),
        step_ms={"mean": 317.0, "median": 316.8, "p10": 316.0, "p90": 318.2},
        lead_ms=288.0,
        global_batch=64,
        micro_batch=64,
        parts_ms=parts(forward=101.0, backward=205.0, optimizer=10.1, unexplained=0.9),
        host_ms=parts(data_wait=0.4, forward=6.0, backward=5.0, optimizer=3.0),
        kernels=None,
        tflop_per_s=181.0,
        mfu={"datasheet": 0.183, "measured_peak": 0.241, "dtype_in_use": 0.183},
        peaks={**run.seen.peaks, "dtype": "bf16"},
    )
    rungs = ("workers", "amp", "compile")
    verdicts = (
        Verdict(rung="workers", took=True, why="4 live workers fed the window"),
        Verdict(rung="amp", took=True, why="matrix products ran in bfloat16", parity_class="approximate"),
        Verdict(rung="compile", took=False, why="0 graphs compiled", parity_class="approximate"),
    )
    steps = tuple(
        Step(rung=rung, status="planned", change=Change(parity="approximate", notes=("mind the step",)))
        for rung in rungs
    )
    finding = Finding(
        bottleneck="none",
        title="NOTHING TO GAIN",
        share_pct=None,
        why="nothing to gain from any rung: the device is busy",
    )
    return Run(seen, (finding,), verdicts, Plan(steps=steps), "gpt2")


def handed_in(rank: int, seen: Measurement, raised: BaseException | None = None) -> Mapping[str, Any]:
    """A rank's record as rank 0 has it: made by the code that makes them, and through the store."""
    from fastloop.bridge.watch.rank_exchange import record_of_rank  # here: Lightning brings pyplot along

    record = {"rank": rank, "host": f"node-{'ab'[rank]}", **record_of_rank(seen, raised)}
    return dict(json.loads(json.dumps(record, default=dict)))


def straggler() -> Run:
    """Two ranks, one of them slow, and a loader that is slow as well: two findings."""
    base = resnet50().seen
    times = {"mean": 115.0, "median": 114.0, "p10": 110.0, "p90": 121.0}
    slow = parts(data_wait=60.0, forward=20.0, backward=31.0, optimizer=2.0, comm_exposed=1.0, unexplained=1.0)
    quick = parts(data_wait=9.0, forward=20.0, backward=31.0, optimizer=2.0, comm_exposed=52.0, unexplained=1.0)
    both = (
        dataclasses.replace(base, step_ms=times, parts_ms=quick, host_ms=quick),
        dataclasses.replace(base, step_ms={**times, "mean": 115.1}, parts_ms=slow, host_ms=slow),
    )
    seen = dataclasses.replace(
        base,
        world_size=2,
        samples_per_s=2226.0,
        step_ms=times,
        parts_ms=slow,
        host_ms=slow,
        timeline=base.timeline[:2],
        ranks=tuple(handed_in(rank, one) for rank, one in enumerate(both)),
    )
    findings = (
        Finding(
            bottleneck="straggler",
            title="WAITING FOR RANK 1",
            share_pct=45.2,
            ceiling_gain_pct=79.7,
            why="rank 1 on node-b comes 51.0 ms after rank 0",
        ),
        Finding(
            bottleneck="data_wait",
            title="STARVED BY DATA",
            share_pct=30.0,
            ceiling_gain_pct=43.0,
            why="its loader has 0 workers",
            patch={"rungs": {"workers": {"enabled": True, "count": 8}}},
        ),
    )
    return Run(seen, findings, name="resnet50")


def cpu() -> Run:
    """A laptop's run: no GPU, no host column, most things null."""
    seen = Measurement(
        steps=40,
        total_steps=60,
        warmup_steps=20,
        samples_per_s=143.5,
        window_too_short=False,
        watch_us_per_step=3.1,
        step_ms={"mean": 223.0, "median": 221.0, "p10": 215.0, "p90": 240.0},
        parts_ms={"data_wait": 52.8},
        loss=falling(60, 2.3, 1.9),
        evidence={"loader": {"num_workers": 0, "usable_cpus": 2}},
        micro_batch=32,
        global_batch=32,
        precision="32-true",
    )
    finding = Finding(
        bottleneck="data_wait",
        title="STARVED BY DATA",
        share_pct=23.7,
        ceiling_gain_pct=31.0,
        why="the device was idle for 52.8 of 223.0 ms a step: the next batch was not ready",
        patch={"rungs": {"workers": {"enabled": True}}},
    )
    return Run(seen, (finding,), name="cifar10")


def partial() -> Run:
    """Stopped by an exception after six steps of the window, its losses gone to NaN."""
    run = resnet50()
    losses = (2.0, 1.9, float("nan"), 1.7, float("inf"), float("nan"))
    return run._replace(
        seen=dataclasses.replace(
            run.seen,
            steps=6,
            total_steps=26,
            partial=True,
            loss=losses,
            window_too_short=True,
            timeline=run.seen.timeline[:2],
        )
    )


def died() -> Run:
    """Two ranks, of which the second raised, whereupon the first lost it."""
    run = straggler()
    ends = (RuntimeError("Connection closed by peer"), ValueError("boom"))
    seen = [
        dataclasses.replace(run.seen, partial=True, ranks=(), step_ms={**run.seen.step_ms, "mean": mean})
        for mean in (115.0, 115.1)
    ]
    ranks = tuple(handed_in(rank, one, end) for rank, (one, end) in enumerate(zip(seen, ends, strict=True)))
    return run._replace(seen=dataclasses.replace(seen[0], ranks=ranks))


def empty() -> Run:
    """A fit that ended before anything could be measured."""
    return Run(Measurement())


def hostile() -> Run:
    """Every text that comes from outside is an attack, every number is not finite, and much is very long."""
    nan, long = float("nan"), HOSTILE + "x" * 20_000
    seen = dataclasses.replace(
        gpt2().seen,
        samples_per_s=nan,
        tokens_per_s=nan,
        tflop_per_s=float("inf"),
        peak_gib=nan,
        precision=HOSTILE,
        device_name=HOSTILE,
        hooks_ms={long: nan, HOSTILE: 1.0},
        loss=(nan,) * 50,
        state=(HOSTILE, long),
        gpu={"watts": nan, "throttle": [HOSTILE]},
        timeline=({"t_s": nan, "watts": nan}, {"t_s": 1.0, "watts": 3.0}),
        kernels={
            "families_ms": {HOSTILE: 2.0, long: 1.0},
            "idle_ms": {HOSTILE: nan},
            "step_ms": nan,
            "top": [{"name": long, "ms": 1.0}, {}],
        },
        flops={"source": HOSTILE, "why": HOSTILE},
        peaks={"dtype": HOSTILE},
        syncs=({"where": HOSTILE, "what": long}, {}),
        drift=({"why": HOSTILE, "change_pct": 99.0}, {}),
        ranks=(
            {"rank": 0, "host": HOSTILE, "step_ms": {"mean": nan}, "parts_ms": parts(forward=2.0)},
            {"rank": HOSTILE, "host": long, "step_ms": {"mean": 2.0}, "parts_ms": parts(forward=nan, backward=1.0)},
            {},
        ),
        evidence={"loader": {}},
    )
    finding = Finding(
        bottleneck=HOSTILE,
        title=HOSTILE,
        share_pct=nan,
        why=long,
        ceiling_gain_pct=float("inf"),
        patch={"rungs": {HOSTILE: {"enabled": HOSTILE}}},
    )
    verdict = Verdict(rung=HOSTILE, took=None, why=long)
    step = Step(rung=HOSTILE, status="planned", change=Change(notes=(HOSTILE,)))
    return Run(seen, (finding,), (verdict,), Plan(steps=(step,)), HOSTILE)


RUNS = {
    "resnet50": resnet50,
    "gpt2": gpt2,
    "tuned": tuned,
    "straggler": straggler,
    "died": died,
    "cpu": cpu,
    "partial": partial,
    "empty": empty,
    "hostile": hostile,
}
