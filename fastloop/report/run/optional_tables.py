"""Tables that only some runs have: GPU counters, work and energy, a trace, synchronizations, ceilings, ranks.

A table is left out if nothing in it was measured; ``list_missing`` then says why, or what would measure it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastloop.numbers import format_flop_rate, format_number, format_short
from fastloop.records.measurement import CEILINGS, Measurement
from fastloop.records.plan import say_count
from fastloop.records.readings import LINES, read_ranks
from fastloop.report.drawing.document import Table
from fastloop.report.run.caveats import count_hunted_steps
from fastloop.report.run.summary import STYLES
from fastloop.report.run.tables import cut, format_percent

GPU = {
    "nvml_busy_pct": ("busy per NVML: any kernel running", "%"),
    "gr_active_pct": ("busy per GPM counters", "%"),
    "sm_active_pct": ("SMs active", "%"),
    "tensor_active_pct": ("tensor cores active", "%"),
    "dram_active_pct": ("DRAM active", "%"),
    "watts": ("board power", "W"),
    "pcie_rx_gb_per_s": ("PCIe, received", "GB/s"),
    "pcie_tx_gb_per_s": ("PCIe, sent", "GB/s"),
    "sm_clock_mhz": ("SM clock", "MHz"),
    "sm_clock_max_mhz": ("SM clock, highest possible", "MHz"),
}
"""Labels and units of the readings."""
CEILING = {
    "replayed": "host batches replayed: no loader",
    "resident": "one batch kept on the device: no loader, no copy",
    "no_exchange": "host batches replayed, no gradient exchange",
}
RANK_PARTS = ("data_wait", "forward", "backward", "optimizer", "comm_exposed", "host_other")


def tabulate_all(seen: Measurement) -> list[Table]:
    """Return all tables that are not empty."""
    made = [
        tabulate_gpu(seen),
        tabulate_work(seen),
        *tabulate_kernels(seen),
        tabulate_syncs(seen),
        tabulate_ceilings(seen),
        tabulate_hooks(seen),
        tabulate_lines(seen),
        tabulate_ranks(seen),
        tabulate_drift(seen),
    ]
    return [table for table in made if table.rows]


def tabulate_gpu(seen: Measurement) -> Table:
    """Tabulate the means of the GPU's counters over the window; no rows if none could be read."""
    head = ("reading", "mean over the window")
    if all(seen.gpu.get(name) in (None, [], ()) for name in (*GPU, "throttle")):
        return Table("The GPU", head, ())
    rows = [(label, format_short(seen.gpu.get(name), unit)) for name, (label, unit) in GPU.items()]
    reasons = seen.gpu.get("throttle")
    rows.append(("throttle reasons", "n/a" if reasons is None else ", ".join(map(str, reasons)) or "none"))
    return Table("The GPU", head, rows, numeric=(1,))


def tabulate_work(seen: Measurement) -> Table:
    """Tabulate arithmetic, memory rate, energy and price; no rows if none is known."""
    least, where = ">= " if seen.flops.get("at_least") else "", " on the CPU" if seen.device == "cpu" else ""
    dtype = seen.peaks.get("dtype") or "the dtype in use"
    per_sample, usd = to_finite_float(seen.flops.get("per_sample")), seen.usd_per_million_samples
    rows = [
        ("work per sample", _add_bound(format_short(None if per_sample is None else per_sample / 1e9, "GFLOP"), least)),
        ("rate per device", _add_bound(format_flop_rate(seen.tflop_per_s), least)),
        (f"MFU of {dtype}, by the data sheet", _format_mfu(seen, "dtype_in_use", "dtype_tflop_per_s", least)),
        ("MFU of bf16, by the data sheet", _format_mfu(seen, "datasheet", "datasheet_tflop_per_s", least)),
        ("MFU of a bf16 product measured here", _format_mfu(seen, "measured_peak", "measured_tflop_per_s", least)),
        ("DRAM rate by the data sheet", format_short(seen.peaks.get("dram_tb_per_s"), "TB/s")),
        ("DRAM rate of a copy measured here", format_short(seen.peaks.get("measured_copy_tb_per_s"), "TB/s")),
        ("tokens per second, all ranks", format_short(seen.tokens_per_s)),
        ("tokens per second without padding", format_short(seen.unpadded_tokens_per_s)),
        ("energy of the board per sample", format_short(seen.joule_per_sample, "J")),
        ("cost of a million samples", "n/a" if usd is None else f"${usd:,.2f}"),
    ]
    rows = list(dict.fromkeys(rows))  # the dtype in use may be bf16
    absent = [label for label, value in rows if value == "n/a"]
    rows = [(label, value) for label, value in rows if value != "n/a"]
    if rows and ("matmul_tf32" in seen.peaks or "convolution_tf32" in seen.peaks):
        tf32 = {True: "yes", False: "no", None: "n/a"}
        allowed = [tf32.get(seen.peaks.get(name), "n/a") for name in ("matmul_tf32", "convolution_tf32")]
        rows.append(("TF32 allowed: products, convolutions", ", ".join(allowed)))
    why = seen.flops.get("why")
    notes = [
        f"Counted by {seen.flops['source']}." if seen.flops.get("source") and not why else "",
        f"Not counted: {why}." if why else "",
        "At least: some operators could not be counted." if least else "",
        f"Not measured{where}: {'; '.join(absent)}." if rows and absent else "",
    ]
    return Table("Work and energy", ("what", "value"), rows, numeric=(1,), note=" ".join(filter(None, notes)))


def _add_bound(text: str, least: str) -> str:
    return text if text == "n/a" else f"{least}{text}"


def _format_mfu(seen: Measurement, kind: str, peak: str, least: str) -> str:
    part, whole = seen.mfu.get(kind), to_finite_float(seen.peaks.get(peak))
    if part is None:
        return "n/a"
    return f"{least}{format_short(100 * part)} %{'' if whole is None else f' of {format_short(whole)} TFLOP/s'}"


def tabulate_kernels(seen: Measurement) -> list[Table]:
    """Tabulate the trace window: kernel families, idle time by cause, the longest kernels."""
    traced = seen.kernels or {}
    if traced.get("skipped") or not traced:
        return []
    whole = to_finite_float(traced.get("step_ms"))
    families = sort_by_size(traced.get("families_ms"))
    idle = sort_by_size(traced.get("idle_ms"))
    rows = [(str(name), format_number(ms, ",.3f"), format_percent(ms, whole)) for name, ms in families]
    rows += [(f"idle: {name}", format_number(ms, ",.3f"), format_percent(ms, whole)) for name, ms in idle]
    facts = [
        ("steps traced", "steps", ",d", ""),
        ("traced step", "step_ms", ",.1f", " ms"),
        ("launches per step", "launches", ",.0f", ""),
        ("NCCL overlapped", "nccl_overlapped_ms", ",.2f", " ms"),
        ("exchange exposed", "comm_exposed_ms", ",.2f", " ms"),
        ("cost of the trace", "cost_s", ",.1f", " s"),
    ]
    note = "; ".join(
        f"{label} {format_number(traced[key], form)}{unit}"
        for label, key, form, unit in facts
        if isinstance(traced.get(key), (int, float))
    )
    note = f"{note[:1].upper()}{note[1:]}. Times are unions over streams; families that took no time are left out."
    longest = [
        (cut(str(kernel.get("name"))), format_number(kernel.get("ms"), ",.3f"))
        for kernel in traced.get("top") or ()
        if isinstance(kernel, Mapping)
    ]
    return [
        Table("Kernels, from the trace", ("family", "ms a step", "% of step"), rows, numeric=(1, 2), note=note),
        Table("Kernels with the most time", ("kernel", "ms a step"), longest, numeric=(1,)),
    ]


def sort_by_size(sizes: Mapping[str, float | None] | None) -> list[tuple[str, float]]:
    """Return names and milliseconds of all entries above 0, longest first."""
    found = [(str(name), to_finite_float(ms)) for name, ms in (sizes or {}).items()]
    return sorted(((name, ms) for name, ms in found if ms), key=lambda entry: -entry[1])


def tabulate_syncs(seen: Measurement) -> Table:
    rows = [
        (
            str(sync.get("where") or "n/a"),
            str(sync.get("what") or "n/a"),
            format_short(sync.get("per_step")),
            format_short(sync.get("ms_per_step")),
            str(sync.get("instead") or "n/a"),
        )
        for sync in seen.syncs
    ]
    if not rows and (hunted := count_hunted_steps(seen)):
        rows = [("none found", f"in {say_count(hunted, 'step')}", "0", "0", "-")]
    return Table("Synchronizations", ("where", "what", "per step", "ms a step", "write instead"), rows, numeric=(2, 3))


def tabulate_ceilings(seen: Measurement) -> Table:
    """Tabulate the rates that trials measured with costs removed, and this run's rate for comparison."""
    found = [(CEILING[name], seen.ceilings.get(name)) for name in CEILINGS]
    rows = [(label, format_number(rate)) for label, rate in found if rate is not None]
    if rows:
        rows.insert(0, ("this run", format_number(seen.samples_per_s)))
    return Table(
        "Ceilings",
        ("if", "samples/s"),
        rows,
        numeric=(1,),
        note="Each from a trial in a fresh process; upper bounds." if rows else "",
    )


def tabulate_hooks(seen: Measurement) -> Table:
    rows = [(cut(name), format_number(ms, ",.3f")) for name, ms in sort_by_size(seen.hooks_ms)]
    return Table("The slowest hooks", ("hook", "host ms a step"), rows, numeric=(1,))


def tabulate_lines(seen: Measurement) -> Table:
    """Tabulate the user's lines that took most of the host's time, one for each of their functions that was called."""
    rows = [
        (
            cut(f"{line.get('where')} in {line.get('function')}"),
            str(line.get("of")),
            format_percent(to_finite_float(line.get("share_pct")), 100.0),
        )
        for line in (seen.evidence.get(LINES) or {}).get("lines") or ()
        if isinstance(line, Mapping)
    ]
    note = "Of the host's time in the steps of the warm-up." if rows else ""
    return Table("Your slowest lines", ("line", "during", "% of time"), rows, numeric=(2,), note=note)


def tabulate_ranks(seen: Measurement) -> Table:
    """Tabulate the ranks, with all parts that any rank has, and how each ended if any ended abnormally."""
    found = read_ranks(seen)
    shown = [part for part in RANK_PARTS if any(rank.part_ms(part) is not None for rank in found)]
    has_ends = any(rank.end for rank in found)
    rows = [
        (
            "n/a" if rank.rank is None else str(rank.rank),
            rank.host or "n/a",
            format_number(rank.mean_ms, ",.2f"),
            *(format_number(rank.part_ms(part), ",.2f") for part in shown),
            *([rank.end or "normally"] if has_ends else []),
        )
        for rank in found
    ]
    head = ("rank", "host", "step ms", *(STYLES[part].label for part in shown), *(["ended by"] if has_ends else []))
    return Table("Ranks", head, rows, numeric=tuple(range(2, 3 + len(shown))))


def tabulate_drift(seen: Measurement) -> Table:
    rows = [
        (
            format_short(check.get("at_s"), "s"),
            str(check.get("step", "n/a")),
            format_number(check.get("step_ms"), ",.2f"),
            format_number(check.get("change_pct"), "+,.1f"),
            str(check.get("why") or ""),
        )
        for check in seen.drift
    ]
    return Table("Later checks of the step", ("after", "step", "step ms", "change %", "with"), rows, numeric=(1, 2, 3))


def list_missing(seen: Measurement) -> list[str]:
    """List what was not measured, and why, or how to measure it."""
    skipped = (seen.kernels or {}).get("skipped")
    how = {
        "The GPU": "GPU counters: no NVIDIA GPU that could be read",
        "Work and energy": f"work and energy: {seen.flops.get('why') or 'not counted in this run'}",
        "Kernels, from the trace": f"kernel families and idle time: {skipped or 'no trace window (watch.trace_steps)'}",
        "Synchronizations": "synchronizations: none listed; fastloop diagnose --syncs looks for them",
        "Ceilings": "ceilings: no trials; fastloop headspace runs them",
    }
    shown = {table.title for table in tabulate_all(seen)}
    return [text for title, text in how.items() if title not in shown]


def to_finite_float(value: Any) -> float | None:
    """Return a finite number as a float; None for everything else."""
    counts = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if counts else None
