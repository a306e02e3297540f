"""All rules, and the verdict they come to: bottlenecks by their share of the step, or nothing to gain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fastloop.diagnose import busy, comm, data, device, gaps, host, nothing, pauses
from fastloop.diagnose.headline import title
from fastloop.diagnose.naming import serial_gain_pct
from fastloop.diagnose.reading import number, step_ms
from fastloop.diagnose.split import WORTH_NAMING_PCT
from fastloop.measurement import PARTS, Measurement
from fastloop.records import Finding

Rule = Callable[[Measurement, tuple[str, ...]], Finding | None]
RULES: tuple[Rule, ...] = (
    comm.straggler, data.data_wait, data.h2d, host.sync, host.host_other, host.launch_bound, host.callbacks_logging,
    comm.comm_exposed, device.fp32_math, device.memory_bound, device.compute_bound, gaps.validation, gaps.checkpoint,
    gaps.epoch_gap,
)  # fmt: skip
"""One per bottleneck. Where shares are equal, the earlier comes first."""


def findings(seen: Measurement, enabled: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """Bottlenecks in order of their share of the step, each with its headline; `none` where there is nothing to name.

    Args:
        seen: the measurement; ``evidence["loader"]`` says how the data was loaded, ``evidence["model"]``, if there,
            what the user's own code does already (``compiled``, ``channels_last``, ``fused``, and its ``convs``).
        enabled: rungs that are switched on, which no patch proposes again.
    """
    if step_ms(seen) is None or not any(number(seen.parts_ms.get(part)) is not None for part in PARTS):
        found = [nothing.too_short(seen)]
    else:
        named = [finding for rule in RULES if (finding := rule(seen, enabled)) is not None]
        each = pauses.of_each_step(seen, named)
        hidden = [finding for finding in named if finding not in each]
        found = _within_the_step(each)
        if len(found) > 1 and busy.is_well_used(seen):  # no reason to leave a slow validation as it is
            found = [finding for finding in found if finding.bottleneck != "compute_bound"]
        if found:
            beside = filter(None, (pauses.told(seen, hidden), *nothing.doubts(seen)))
            found[0] = dataclasses.replace(found[0], detail=(*found[0].detail, *beside))
        found = found or [nothing.to_name(seen, hidden)]
    found[0] = dataclasses.replace(found[0], detail=(*found[0].detail, *seen.state))
    return tuple(dataclasses.replace(finding, title=finding.title or title(finding, seen)) for finding in found)


def _within_the_step(found: list[Finding]) -> list[Finding]:
    """By share, and no more of them than the step has: what is left over after the larger ones bounds the smaller."""
    kept, left = [], 100.0
    for finding in sorted(found, key=lambda each: -(each.share_pct or 0.0)):
        share, gain = finding.share_pct, finding.ceiling_gain_pct
        if share is not None and share > left:
            share = left
            if share < WORTH_NAMING_PCT:
                continue
            if gain is not None and finding.ceiling_is_estimate:
                gain = min(gain, serial_gain_pct(share) or gain)
            finding = dataclasses.replace(finding, share_pct=share, ceiling_gain_pct=gain)
        left -= share or 0.0
        kept.append(finding)
    return kept
