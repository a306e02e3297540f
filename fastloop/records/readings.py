"""Reads numbers from a measurement that may lack any of them; unknown values stay None."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastloop.records.measurement import DISTURBED, Measurement
from fastloop.records.store import decode

TENSOR_UNUSED_PCT = 2.0
BEYOND = 0.15
"""Share of the step: a trial that saves this much more than the parts it removes ran at a different speed."""
TAKES_AWAY = {
    "replayed": ("data_wait", "epoch_gap"),
    "resident": ("data_wait", "epoch_gap", "h2d"),
    "no_exchange": ("data_wait", "epoch_gap", "backward", "comm_exposed"),
}
"""The parts of the step in which each trial's savings lie. With several ranks also the backward, in which ranks wait
for the one that gets its data last."""
CPU_WORTH_PCT = 10.0
"""Share of the step above which host work is reported on the CPU, where few steps measure it and it competes with the
training: twenty healthy trainings that shared two cores with other work measured up to 9.6 %."""
OPTIMIZER = "optimizer"
"""Among the evidence: which optimizers are not torch's own or have no fused form, and what fusing the others would
save."""
ANOMALY_MODE = "anomaly_mode"
"""Among the evidence: the autograd engine looked for anomalies; absent if it did not."""
REQUESTED_GARBAGE = "requested_garbage_collection"
"""Among the evidence: the line whose explicit ``gc.collect()`` takes longest, and its host time per step."""
LITTLE_LOADING_PCT = 20.0
"""Share of validation below which faster loading is no remedy for it."""
VALIDATION = "validation"
"""Among the evidence: ``loading_ms`` per step, how long validation waited for its batches; absent if unknown."""
LINES = "lines"
"""Among the evidence: the user's lines that take the host's time, see `evidence/sync/line_samples.py`."""
LOADING = "loading"
"""The group of lines on which a loader of the training process makes batches."""
OFTEN = 0.5
"""Synchronizations per step above which a line counts as a cost of each step."""
FEW_WORKERS, MORE_WORTH = "few_workers", 1.25
"""The cause of a wait for data if there are too few workers; and the smallest factor by which more are proposed."""
HAND_OVER_MS, CROWDED_HAND_OVER_MS = 0.5, 3.0
"""Time the training process needs to take a batch from a worker: 0.2 to 0.5 ms, up to 3 if all CPUs are busy. A batch
that takes less time to make gains nothing from a worker."""
WORTH_SAVING = 0.05
"""Smallest share of the step that workers must save."""

Source = Literal["trace", "counters", "nvml", "bound"]
"""Source of an idle-time figure; `bound`: only an upper bound."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's own figures; None if it did not measure them."""

    rank: int | None = None
    host: str | None = None
    step_ms: Mapping[str, float | None] | None = None
    """Mean and spread."""
    parts_ms: Mapping[str, float | None] | None = field(default_factory=dict)
    partial: bool | None = None
    ended_by: str | None = None

    @property
    def mean_ms(self) -> float | None:
        """The mean step time in milliseconds."""
        mean = (self.step_ms or {}).get("mean")
        return mean if mean is not None and math.isfinite(mean) else None

    @property
    def end(self) -> str:
        """The exception that ended the fit; empty if it ended normally."""
        return self.ended_by or ("an exception" if self.partial else "")

    def part_ms(self, part: str) -> float | None:
        """Return the mean time of one part of the step."""
        found = (self.parts_ms or {}).get(part)
        return found if found is not None and math.isfinite(found) else None


def read_ranks(seen: Measurement) -> list[Rank]:
    """Return all ranks of a measurement."""
    return [decode(rank, Rank) or Rank() for rank in seen.ranks]


def to_number(value: Any) -> float | None:
    """A finite non-negative number; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def read_step_ms(seen: Measurement) -> float | None:
    """Mean time of a step; None if unknown."""
    return to_number(seen.step_ms.get("mean")) or None


def read_gpu(seen: Measurement, reading: str) -> float | None:
    """A reading of the GPU's own counters, a mean over the window."""
    return to_number(seen.gpu.get(reading))


def read_trace(seen: Measurement) -> Mapping[str, Any] | None:
    """The results of the trace window, if there was one."""
    traced = seen.kernels
    return traced if traced and not traced.get("skipped") and to_number(traced.get("busy_ms")) else None


def read_family_shares(seen: Measurement) -> dict[str, float]:
    """Kernel families as shares (0 to 1) of the device's busy time; empty without a trace."""
    traced = read_trace(seen) or {}
    busy, found = to_number(traced.get("busy_ms")), traced.get("families_ms") or {}
    return {name: min(1.0, ms / busy) for name, value in found.items() if busy and (ms := to_number(value)) is not None}


def count_micro_batches(seen: Measurement) -> int:
    """Batches per optimizer step on one rank; 1 if unknown."""
    if not seen.global_batch or not seen.micro_batch:
        return 1
    return max(1, round(seen.global_batch / max(1, seen.world_size) / seen.micro_batch))


def read_activity(seen: Measurement) -> tuple[float | None, Source]:
    """Percent of the time with a kernel on the device, and the source of the reading."""
    if (active := read_gpu(seen, "gr_active_pct")) is not None:
        return active, "counters"
    return read_gpu(seen, "nvml_busy_pct"), "nvml"


def list_syncing_lines(seen: Measurement) -> list[Mapping[str, Any]]:
    """Lines that synchronize in about every step or cost time, most expensive first."""
    dear = [
        ((to_number(line.get("ms_per_step")) or 0.0, to_number(line.get("per_step")) or 0.0), line)
        for line in seen.syncs
    ]
    return [line for cost, line in sorted(dear, key=lambda pair: pair[0], reverse=True) if cost[0] or cost[1] >= OFTEN]


def waits_in_own_code(seen: Measurement) -> bool:
    """Whether a line of the user's code makes the host wait for the device in about every step."""
    return any(not str(line.get("where")).startswith("lightning/") for line in list_syncing_lines(seen))


def read_garbage_ms(seen: Measurement) -> float:
    """Time per step of Python's garbage collector, a part of ``host_other``; 0 if none was measured."""
    found = seen.evidence.get("garbage_collection") or {}
    return min(to_number(found.get("ms_per_step")) or 0.0, to_number(seen.parts_ms.get("host_other")) or 0.0)


def read_requested_garbage(seen: Measurement) -> tuple[str, float]:
    """Return the user's own garbage collection that takes longest, and its host time per step in ms; 0 without one."""
    found = seen.evidence.get(REQUESTED_GARBAGE) or {}
    return f"gc.collect() at {found.get('where')}", to_number(found.get("ms_per_step")) or 0.0


def name_hot_line(seen: Measurement, cost_pct: float | None, *of: str) -> str | None:
    """Name the user's line that takes at least half of a cost; None if none is known to.

    Args:
        cost_pct: the cost's share of the step.
        of: the groups to look in: `LOADING`, or functions that Lightning called.
    """
    for line in (seen.evidence.get(LINES) or {}).get("lines", ()):
        if line.get("of") in of:
            most = 2 * (to_number(line.get("share_pct")) or 0.0) >= (cost_pct or math.inf)
            return f"{line.get('where')} in {line.get('function')}" if most else None
    return None


def is_beyond(seen: Measurement, ceiling: str) -> bool:
    """Whether a trial beat the run by clearly more than the parts it removes can explain: at most T / (T - x)."""
    best, now, step = to_number(seen.ceilings.get(ceiling)), to_number(seen.samples_per_s), read_step_ms(seen)
    if not best or not now or step is None or to_number(seen.parts_ms.get("data_wait")) is None:
        return False
    parts = {*TAKES_AWAY[ceiling], *(TAKES_AWAY["no_exchange"] if seen.world_size > 1 else ())}
    return step * (1 - now / best) - sum(to_number(seen.parts_ms.get(part)) or 0.0 for part in parts) > BEYOND * step


def compute_gain_pct(seen: Measurement, ceiling: str, over: str | None = None) -> float | None:
    """Gain of a trial without one cost over this run, or over another trial. Small losses count as 0.

    None if there is no such trial, if a trial was so much slower than its reference or the run that something else must
    have disturbed it, or so much faster that something else must have disturbed the run.
    """
    best, now = to_number(seen.ceilings.get(ceiling)), to_number(seen.samples_per_s)
    if over is not None:
        disturbed = None in (compute_gain_pct(seen, ceiling), compute_gain_pct(seen, over))
        now = None if disturbed else to_number(seen.ceilings.get(over))
    if not best or not now or best < DISTURBED * now or is_beyond(seen, ceiling):
        return None
    return max(0.0, 100 * (best / now - 1))


def _compute_fp32_share(seen: Measurement) -> float:
    """Share of fp32 in the fp32 and TF32 work; 0 if the work was not counted."""
    convolutions = to_number(seen.flops.get("convolution")) or 0.0
    products = sum(to_number(seen.flops.get(kind)) or 0.0 for kind in ("matmul", "attention"))
    ours = convolutions if seen.peaks.get("matmul_tf32") else products
    return ours / (products + convolutions) if products + convolutions else 0.0


def read_precision(seen: Measurement) -> str | None:
    """The number format of most matrix products: fp32, tf32, fp64, or mixed for any shorter one; None if unknown."""
    if (dtype := seen.peaks.get("dtype")) is not None:
        if dtype == "fp32 + tf32":
            return "fp32" if _compute_fp32_share(seen) >= 0.5 else "tf32"
        return str(dtype) if dtype in ("fp32", "tf32", "fp64") else "mixed"
    if seen.precision is None or not seen.precision.startswith("32"):
        return None if seen.precision is None else "fp64" if seen.precision.startswith("64") else "mixed"
    may_tf32 = bool(seen.peaks.get("matmul_tf32") or seen.peaks.get("convolution_tf32"))
    tensor = read_gpu(seen, "tensor_active_pct")
    return "fp32" if not may_tf32 or (tensor is not None and tensor < TENSOR_UNUSED_PCT) else "tf32"


# -- properties of the run and the user's own code, for the cards of the rungs ----------------------------------------


def on_gpu(seen: Measurement) -> bool:
    return seen.device == "cuda"


def read_loader(seen: Measurement) -> Mapping[str, Any]:
    """How the data was loaded; empty if not recorded."""
    return seen.evidence.get("loader") or {}


def compute_validation_loading_pct(seen: Measurement) -> float | None:
    """Return the share of validation that is spent waiting for batches; None if unknown."""
    loading = to_number((seen.evidence.get(VALIDATION) or {}).get("loading_ms"))
    whole = to_number(seen.parts_ms.get("validation"))
    return 100 * min(1.0, loading / whole) if loading is not None and whole else None


def loads_little_for_validation(seen: Measurement) -> bool:
    """Whether validation is known to spend its time on something other than loading."""
    share = compute_validation_loading_pct(seen)
    return share is not None and share < LITTLE_LOADING_PCT


def count_possible_workers(seen: Measurement) -> int | None:
    """Return how many workers a rank can have if each rank keeps one CPU; None if the CPUs are unknown."""
    cpus, hosts = to_number(read_loader(seen).get("usable_cpus")), [rank.host for rank in read_ranks(seen)]
    local = hosts.count(hosts[0]) if hosts else seen.world_size
    return None if cpus is None else int(cpus) // max(1, local) - 1


def restarts_workers(seen: Measurement) -> bool:
    """Whether the loader's workers are started anew for each epoch."""
    loader = read_loader(seen)
    return bool(loader.get("num_workers")) and not loader.get("persistent_workers")


def is_gap_of_workers(seen: Measurement) -> bool:
    """Whether starting workers anew is at least half of the time between epochs."""
    loader, gap_ms = read_loader(seen), seen.parts_ms.get("epoch_gap")
    took_s, times = to_number(loader.get("worker_restart_s")), to_number(loader.get("worker_restarts"))
    if not gap_ms or not took_s or not times or not seen.total_steps:
        return False
    return 2e3 * took_s * times >= gap_ms * seen.total_steps


def does_already(seen: Measurement, what: str) -> bool:
    """Whether the user's own script already does this: ``compiled``, ``channels_last``, ``fused``."""
    return bool((seen.evidence.get("model") or {}).get(what))


def read_fusing_ms(seen: Measurement) -> float:
    """Milliseconds per step that fusing the optimizers would save on the CPU; 0 if that was not measured."""
    return to_number((seen.evidence.get(OPTIMIZER) or {}).get("fusing_saves_ms")) or 0.0


def compiles(seen: Measurement) -> bool:
    """Whether the user's own model is compiled."""
    names = [str(kernel.get("name")) for kernel in (read_trace(seen) or {}).get("top") or ()]
    return does_already(seen, "compiled") or any(name.startswith("triton") for name in names)


def convolves(seen: Measurement) -> bool:
    """Whether the model has 2-D convolutions."""
    counted = to_number(seen.flops.get("convolution")) or to_number((seen.evidence.get("model") or {}).get("convs"))
    return bool(counted or read_family_shares(seen).get("convolution"))


def attends_by_hand(seen: Measurement) -> bool:
    """Whether the model implements attention without a fused call."""
    return bool(to_number((seen.evidence.get("model") or {}).get("attends_by_hand")))


def read_batch_ms(seen: Measurement) -> float | None:
    """Host time to get a batch; on a GPU this exceeds the time the device waits for it."""
    spent = to_number(seen.host_ms.get("data_wait"))
    if spent is None and not on_gpu(seen):
        spent = min(to_number(seen.parts_ms.get("data_wait")) or 0.0, read_step_ms(seen) or 0.0)
    return None if spent is None else spent / count_micro_batches(seen)


def describe_decoding(seen: Measurement) -> str | None:
    """Cost of decoding an image file; None if the samples are not image files or it was not measured."""
    decode_ms = to_number(read_loader(seen).get("decode_ms"))
    return None if decode_ms is None else f"decoding takes {decode_ms:.1f} ms an image on one core"


def is_crowded(seen: Measurement) -> bool:
    """Whether the training waited long for a CPU."""
    return bool(seen.evidence.get("cpu", {}).get("crowded"))


def find_hand_over_ms(seen: Measurement) -> float:
    """Upper limit of the cost of taking a batch from a worker process on this machine."""
    return CROWDED_HAND_OVER_MS if is_crowded(seen) else HAND_OVER_MS


def is_worth_handing_over(seen: Measurement) -> bool:
    """Whether taking a batch from a worker process saves a worthwhile share of the step; True if unknown."""
    made, step_ms = read_batch_ms(seen), read_step_ms(seen) or 0.0
    return made is None or made - find_hand_over_ms(seen) >= WORTH_SAVING * step_ms / count_micro_batches(seen)


def may_hand_over(seen: Measurement) -> bool:
    """Whether the training's own thread makes the batches, and others could make them to advantage."""
    loader = read_loader(seen)
    return loader.get("num_workers") == 0 and bool(loader.get("map_style")) and is_worth_handing_over(seen)
