"""From a measurement to findings: what holds the loop up, how much, and the YAML that addresses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastloop.measurement import Measurement
from fastloop.records import Finding

WORTH_NAMING_PCT = 5.0
"""A share of the step below this is not called a bottleneck."""


def findings(seen: Measurement, enabled: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """Bottlenecks in order of their share of the step; a single `none` where there is nothing to name.

    Args:
        seen: the measurement; ``evidence["loader"]`` says how the data was loaded.
        enabled: rungs that are switched on, which no patch proposes again.
    """
    step, wait = seen.step_ms.get("mean"), seen.parts_ms.get("data_wait")
    if not step or wait is None:
        return (Finding(bottleneck="none", share_pct=None, why=_too_short(seen)),)
    share = min(100.0, 100 * wait / step)
    if share < WORTH_NAMING_PCT:
        why = f"no bottleneck that this version can name: waiting for data is {share:.1f} % of the step"
        return (Finding(bottleneck="none", share_pct=None, why=why),)
    patch, advice = _data_patch(seen.evidence.get("loader", {}), enabled)
    device = "GPU" if seen.device == "cuda" else "device"
    idle = f"the {device} had nothing to do for {wait:.1f} of {step:.1f} ms a step: the next batch was not there"
    return (Finding(bottleneck="data_wait", share_pct=share, why=f"{idle}; {advice}", patch=patch,
                    ceiling_gain_pct=_serial_gain(share)),)


def _serial_gain(share_pct: float) -> float | None:
    """Gain if a serial part were gone. An estimate: a trial with a replayed batch would measure it."""
    return 100 * share_pct / (100 - share_pct) if share_pct < 100 else None


def _too_short(seen: Measurement) -> str:
    return (f"too short to judge: {seen.total_steps} steps ran and the first {seen.warmup_steps} are warm-up;"
            " train longer or lower watch.warmup_steps")  # fmt: skip


def _data_patch(loader: Mapping[str, Any], enabled: tuple[str, ...]) -> tuple[Mapping[str, Any] | None, str]:
    workers, cpus = loader.get("num_workers"), loader.get("usable_cpus")
    if workers == 0 and loader.get("map_style") and "workers" not in enabled:
        return {"rungs": {"workers": {"enabled": True}}}, f"the loader has 0 workers, {cpus} CPUs are usable"
    if workers == 0 and "workers" in enabled:
        return None, "no rung helps: workers is on but could not apply (its verdict says why)"
    if workers is None:
        return None, "no rung helps: this loader is not a DataLoader; make its batches ahead of need"
    if workers == 0:
        return None, "no rung helps: an iterable dataset has to be sharded by its owner before it can have workers"
    advice = f"num_workers={workers} on {cpus} CPUs is not enough; cheapen the transforms"
    return None, f"no rung of this version helps: {advice}"
