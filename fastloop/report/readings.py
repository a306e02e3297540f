"""Tables of what only some runs have: the GPU's counters, work and energy, a trace, synchronisations, ceilings, ranks.

A table is left out where nothing of it was measured; ``missing`` then says why, or what would measure it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.measurement import CEILINGS, PARTS, Measurement
from fastloop.report.summary import ended_by, flop_rate, number, short, steps
from fastloop.report.syncs import hunted_steps
from fastloop.report.tables import LABELS, Table, cut, share

GPU = {
    "nvml_busy_pct": ("busy by NVML: any kernel running", "%"), "gr_active_pct": ("busy by the GPM counters", "%"),
    "sm_active_pct": ("SMs active", "%"), "tensor_active_pct": ("tensor cores active", "%"),
    "dram_active_pct": ("DRAM active", "%"), "watts": ("board power", "W"),
    "pcie_rx_gb_per_s": ("PCIe, received", "GB/s"), "pcie_tx_gb_per_s": ("PCIe, sent", "GB/s"),
    "sm_clock_mhz": ("SM clock", "MHz"), "sm_clock_max_mhz": ("SM clock, highest possible", "MHz"),
}  # fmt: skip
"""The readings in words, with their units."""
CEILING = {
    "replayed": "host batches replayed: no loader", "resident": "one batch kept on the device: no loader, no copy",
    "no_exchange": "host batches replayed, no gradient exchange",
}  # fmt: skip
RANK_PARTS = ("data_wait", "forward", "backward", "optimizer", "comm_exposed", "host_other")


def tables(seen: Measurement) -> list[Table]:
    """All of them that have something to show."""
    made = [gpu(seen), work(seen), *kernels(seen), syncs(seen), ceilings(seen), hooks(seen), ranks(seen), drift(seen)]
    return [table for table in made if table.rows]


def gpu(seen: Measurement) -> Table:
    """Means of the GPU's counters over the window; no rows where none could be read."""
    head = ("reading", "mean over the window")
    if all(seen.gpu.get(name) in (None, [], ()) for name in (*GPU, "throttle")):
        return Table(title="The GPU", head=head, rows=())
    rows = [(label, short(real(seen.gpu.get(name)), unit)) for name, (label, unit) in GPU.items()]
    reasons = seen.gpu.get("throttle")
    rows.append(("throttle reasons seen", "n/a" if reasons is None else ", ".join(map(str, reasons)) or "none"))
    return Table(title="The GPU", head=head, rows=tuple(rows), numeric=(1,))


def work(seen: Measurement) -> Table:
    """Arithmetic, memory rate, energy, price: no rows where none is known."""
    least, where = ">= " if seen.flops.get("at_least") else "", " on the CPU" if seen.device == "cpu" else ""
    dtype = seen.peaks.get("dtype") or "the dtype in use"
    known = None not in (seen.joule_error_pct, seen.joule_per_sample)
    error = f" (within {short(seen.joule_error_pct)} %)" if known else ""
    per_sample = real(seen.flops.get("per_sample"))
    rows = [
        ("work per sample", _least(short(None if per_sample is None else per_sample / 1e9, "GFLOP"), least)),
        ("rate per device", _least(flop_rate(seen.tflop_per_s), least)),
        (f"MFU of {dtype}, as the data sheet has it", _mfu(seen, "dtype_in_use", "dtype_tflop_per_s", least)),
        ("MFU of bf16, as the data sheet has it", _mfu(seen, "datasheet", "datasheet_tflop_per_s", least)),
        ("MFU of a bf16 product measured here", _mfu(seen, "measured_peak", "measured_tflop_per_s", least)),
        ("DRAM rate by the data sheet", short(real(seen.peaks.get("dram_tb_per_s")), "TB/s")),
        ("DRAM rate of a copy measured here", short(real(seen.peaks.get("measured_copy_tb_per_s")), "TB/s")),
        ("tokens per second, all ranks", short(seen.tokens_per_s)),
        ("tokens per second without padding", short(seen.unpadded_tokens_per_s)),
        ("energy of the board per sample", short(seen.joule_per_sample, "J") + error),
        ("price of a million samples", _dollars(seen.usd_per_million_samples)),
    ]  # fmt: skip
    absent = [label for label, value in rows if value == "n/a"]
    rows = [(label, value) for label, value in rows if value != "n/a"]
    if rows and ("matmul_tf32" in seen.peaks or "convolution_tf32" in seen.peaks):
        tf32 = {True: "yes", False: "no", None: "n/a"}
        said = [tf32.get(seen.peaks.get(name), "n/a") for name in ("matmul_tf32", "convolution_tf32")]
        rows.append(("TF32 allowed: products, convolutions", ", ".join(said)))
    why = seen.flops.get("why")
    notes = [f"Counted by {seen.flops['source']}." if seen.flops.get("source") and not why else "",
            f"Not counted: {why}." if why else "",
            "At least: some operators could not be counted." if least else "",
            f"Not measured{where}: {'; '.join(absent)}." if rows and absent else ""]  # fmt: skip
    return Table(title="Work and energy", head=("what", "value"), rows=tuple(rows), numeric=(1,),
                 note=" ".join(filter(None, notes)))  # fmt: skip


def _least(text: str, least: str) -> str:
    return text if text == "n/a" else f"{least}{text}"


def _mfu(seen: Measurement, kind: str, peak: str, least: str) -> str:
    part, whole = seen.mfu.get(kind), real(seen.peaks.get(peak))
    if part is None:
        return "n/a"
    return f"{least}{short(100 * part)} %{'' if whole is None else f' of {short(whole)} TFLOP/s'}"


def _dollars(value: float | None) -> str:
    return "n/a" if value is None else f"${value:,.2f}"


def kernels(seen: Measurement) -> list[Table]:
    """The trace window: families, idle time by its cause, the longest kernels."""
    traced = seen.kernels or {}
    if traced.get("skipped") or not traced:
        return []
    whole = real(traced.get("step_ms"))
    families = by_size(traced.get("families_ms"))
    idle = by_size(traced.get("idle_ms"))
    rows = [(str(name), number(ms, ",.3f"), share(ms, whole)) for name, ms in families]
    rows += [(f"idle: {name}", number(ms, ",.3f"), share(ms, whole)) for name, ms in idle]
    facts = [("steps traced", "steps", ",d", ""), ("step under the tracer", "step_ms", ",.1f", " ms"),
             ("launches per step", "launches", ",.0f", ""), ("NCCL overlapped", "nccl_overlapped_ms", ",.2f", " ms"),
             ("exchange exposed", "comm_exposed_ms", ",.2f", " ms"), ("the trace cost", "cost_s", ",.1f", " s")]
    note = "; ".join(f"{label} {number(traced[key], form)}{unit}" for label, key, form, unit in facts
                     if isinstance(traced.get(key), (int, float)))  # fmt: skip
    note = f"{note[:1].upper()}{note[1:]}. Families are unions over streams; those of no time are left out."
    longest = [(cut(str(kernel.get("name"))), number(real(kernel.get("ms")), ",.3f")) for kernel in
               traced.get("top") or () if isinstance(kernel, Mapping)]  # fmt: skip
    return [
        Table(title="Kernels, from the trace", head=("family", "ms a step", "% of step"), rows=tuple(rows),
              numeric=(1, 2), note=note),
        Table(title="The longest kernels", head=("kernel", "ms a step"), rows=tuple(longest), numeric=(1,)),
    ]  # fmt: skip


def by_size(sizes: Any) -> list[tuple[str, float]]:
    """Names and milliseconds of what took any time, the longest first."""
    found = [(str(name), real(ms)) for name, ms in (sizes or {}).items()]
    return sorted(((name, ms) for name, ms in found if ms), key=lambda entry: -entry[1])


def syncs(seen: Measurement) -> Table:
    rows = [(str(sync.get("where") or "n/a"), str(sync.get("what") or "n/a"), short(real(sync.get("per_step"))),
             short(real(sync.get("ms_per_step"))), str(sync.get("instead") or "n/a"))
            for sync in seen.syncs]  # fmt: skip
    if not rows and (hunted := hunted_steps(seen)):
        rows = [("none found", f"in {steps(hunted)}", "0", "0", "-")]
    return Table(title="Synchronisations", head=("where", "what", "per step", "ms a step", "write instead"),
                 rows=tuple(rows), numeric=(2, 3))  # fmt: skip


def ceilings(seen: Measurement) -> Table:
    """Rates with a cost taken away, as trials measured them, and the rate of this run beside them."""
    found = [(CEILING[name], seen.ceilings.get(name)) for name in CEILINGS]
    rows = [(label, number(rate)) for label, rate in found if rate is not None]
    if rows:
        rows.insert(0, ("this run", number(seen.samples_per_s)))
    return Table(title="Ceilings", head=("if", "samples/s"), rows=tuple(rows), numeric=(1,),
                 note="Each from a trial in a fresh process: bounds, not promises." if rows else "")  # fmt: skip


def hooks(seen: Measurement) -> Table:
    rows = [(cut(name), number(ms, ",.3f")) for name, ms in by_size(seen.hooks_ms)]
    return Table(title="The slowest hooks", head=("hook", "host ms a step"), rows=tuple(rows), numeric=(1,))


def ranks(seen: Measurement) -> Table:
    """One row per rank, with those parts that some rank has; and how each ended, where one did not end well."""
    shown = [part for part in RANK_PARTS if any(_part(rank, part) is not None for rank in seen.ranks)]
    ends = [ended_by(rank) or "normally" for rank in seen.ranks]
    told = any(map(ended_by, seen.ranks))
    rows = [(str(rank.get("rank", "n/a")), str(rank.get("host") or "n/a"), number(mean_ms(rank), ",.2f"),
             *(number(_part(rank, part), ",.2f") for part in shown), *([end] if told else []))
            for rank, end in zip(seen.ranks, ends, strict=True)]  # fmt: skip
    head = ("rank", "host", "step ms", *(LABELS[part] for part in shown), *(["ended by"] if told else []))
    return Table(title="Ranks", head=head, rows=tuple(rows), numeric=tuple(range(2, 3 + len(shown))))


def mean_ms(rank: Mapping[str, Any]) -> float | None:
    """The mean step of one rank; older files may hold it alone, without its spread."""
    step = rank.get("step_ms")
    return real(step.get("mean") if isinstance(step, Mapping) else step)


def _part(rank: Mapping[str, Any], part: str) -> float | None:
    assert part in PARTS
    return real((rank.get("parts_ms") or {}).get(part))


def drift(seen: Measurement) -> Table:
    rows = [(short(real(look.get("at_s")), "s"), str(look.get("step", "n/a")),
             number(real(look.get("step_ms")), ",.2f"), number(real(look.get("change_pct")), "+,.1f"),
             str(look.get("why") or "")) for look in seen.drift]  # fmt: skip
    return Table(title="Later looks at the step", head=("after", "step", "step ms", "change %", "with"),
                 rows=tuple(rows), numeric=(1, 2, 3))  # fmt: skip


def missing(seen: Measurement) -> list[str]:
    """What was not measured, and why or how it would be."""
    skipped = (seen.kernels or {}).get("skipped")
    absent: Sequence[tuple[bool, str]] = (
        (not gpu(seen).rows, "GPU counters: no NVIDIA GPU that could be read"),
        (not work(seen).rows, f"work and energy: {seen.flops.get('why') or 'not counted in this run'}"),
        (not kernels(seen), f"kernel families and the idle split: {skipped or 'no trace window (watch.trace_steps)'}"),
        (not syncs(seen).rows, "synchronisations: none listed; fastloop diagnose --syncs looks for them"),
        (not ceilings(seen).rows, "ceilings: no trials; fastloop headspace runs them"),
    )
    return [text for is_absent, text in absent if is_absent]


def real(value: Any) -> float | None:
    """A finite number as a float; None for everything else."""
    counts = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if counts else None
