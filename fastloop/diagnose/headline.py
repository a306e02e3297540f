"""The words a person sees first: a headline for a finding, and what to try next."""

from __future__ import annotations

from fastloop.diagnose import busy
from fastloop.diagnose.host import is_scheduler, is_transfer
from fastloop.diagnose.remedies import available
from fastloop.diagnose.straggler import straggler
from fastloop.measurement import Measurement
from fastloop.records import Finding

TITLES = {
    "data_wait": "STARVED BY DATA", "h2d": "WAITING FOR COPIES", "launch_bound": "LAUNCH-BOUND",
    "host_other": "HELD UP BY THE HOST", "callbacks_logging": "HELD UP BY CALLBACKS, LOGGING",
    "sync": "STOPPED BY SYNCHRONISATIONS", "comm_exposed": "WAITING FOR GRADIENT EXCHANGE",
    "straggler": "WAITING FOR A SLOW RANK", "memory_bound": "BUSY, NOT FAST: MEMORY-BOUND", "compute_bound": "BUSY",
    "fp32_math": "BUSY, NOT FAST: FP32 MATH", "validation": "HELD UP BY VALIDATION",
    "checkpoint": "HELD UP BY CHECKPOINTS", "epoch_gap": "HELD UP BETWEEN EPOCHS",
}  # fmt: skip
"""Short enough that the verdict's first words fit a terminal of 40 columns."""
THEN = {
    "data_wait": ("prefetch", "pin"), "h2d": ("prefetch", "pin"), "launch_bound": ("batch", "compile", "fused"),
    "memory_bound": ("compile", "layout", "amp", "fused", "batch"),
    "fp32_math": ("layout", "compile", "fused", "batch"), "compute_bound": ("compile", "layout", "fused", "batch"),
}  # fmt: skip
"""Rungs that address the same bottleneck once the first has."""
LATER = ("amp", "layout", "compile", "batch")
"""Rungs that pay once the device is the limit. All of them round differently."""
BEFORE_THE_DEVICE = ("data_wait", "h2d", "callbacks_logging", "sync", "host_other")


def title(finding: Finding, seen: Measurement) -> str:
    """The headline of a finding that names a bottleneck, in capitals."""
    kind = finding.bottleneck
    if kind == "straggler" and (slow := straggler(seen)) is not None:
        return f"WAITING FOR RANK {slow.rank}"
    if kind == "sync" and finding.share_pct is None:
        return "SYNCHRONISES: FREE ON THE CPU"
    if kind == "memory_bound" and finding.patch is None:
        return "BUSY: MEMORY-BOUND"
    if kind == "callbacks_logging" and is_transfer(seen):
        return "HELD UP BY A TRANSFER HOOK"
    if kind == "callbacks_logging" and is_scheduler(seen):
        return "HELD UP BY THE LR SCHEDULER"
    if kind == "launch_bound" and seen.device != "cuda":
        return "A STEP TOO SMALL FOR ITS LOOP"
    if kind == "compute_bound":
        if busy.is_well_used(seen):
            return "NOTHING TO GAIN: GPU WELL USED"
        cause = busy.culprit(seen)
        return "BUSY, NOT FAST" + ("" if cause is None else f": {cause.name.upper()}")
    return TITLES[kind]


def next_steps(findings: tuple[Finding, ...], seen: Measurement,
               enabled: tuple[str, ...] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:  # fmt: skip
    """Rungs to try after the patches (THEN), and once the device is the limit (LATER).

    None of them is on, all apply as far as was seen, and those of the patches are not repeated. Both are empty where
    no patch is proposed.
    """
    patched = [rung for finding in findings if finding.patch for rung in finding.patch.get("rungs", {})]
    if not patched:
        return (), ()
    wanted = [rung for finding in findings if finding.patch for rung in THEN.get(finding.bottleneck, ())]
    then = _free(wanted, seen, enabled, but=patched)
    starved = findings[0].bottleneck in BEFORE_THE_DEVICE
    return then, _free(LATER, seen, enabled, but=[*patched, *then]) if starved and seen.device == "cuda" else ()


def _free(rungs: list[str] | tuple[str, ...], seen: Measurement, enabled: tuple[str, ...],
          but: list[str]) -> tuple[str, ...]:  # fmt: skip
    return tuple(rung for rung in dict.fromkeys(rungs) if rung not in but and available(seen, enabled, rung))
