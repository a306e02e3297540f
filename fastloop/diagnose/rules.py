"""All rules, and their combined result: bottlenecks by their share of the step, or nothing to gain."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence

from fastloop.diagnose import between_steps, device, host, memory, no_bottleneck, one_time, waits
from fastloop.diagnose.attribution import WORTH_NAMING_PCT, Attribution, attribute
from fastloop.diagnose.finding import compute_gain_bound_pct
from fastloop.diagnose.remedies import Rungs
from fastloop.records.card import Cards
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Verdict

Rule = Callable[[Attribution, Rungs], Finding | None]
RULES: Mapping[str, Rule] = {
    "straggler": waits.find_slow_rank,
    "data_wait": waits.find_data_wait,
    "h2d": waits.find_h2d,
    "sync": host.find_sync,
    "host_other": host.find_host_other,
    "launch_bound": host.find_launch_bound,
    "callbacks_logging": host.find_callbacks_logging,
    "comm_exposed": waits.find_comm_exposed,
    "fp32_math": device.find_fp32_math,
    "memory_bound": device.find_memory_bound,
    "compute_bound": device.find_compute_bound,
    "validation": between_steps.find_validation,
    "checkpoint": between_steps.find_checkpoint,
    "epoch_gap": between_steps.find_epoch_gap,
}
"""One rule per bottleneck. If shares are equal, the earlier one comes first."""


def list_findings(
    seen: Measurement, cards: Cards, enabled: tuple[str, ...] = (), verdicts: Sequence[Verdict] = ()
) -> tuple[Finding, ...]:
    """List findings with their headlines, by their share of the step, largest first; `none` if nothing is worth naming.
    Findings with the same patch are ranked by their combined share.

    Alarms come first: a fit that died, for which no patch is proposed; anomaly mode; repeated compiles; a rung that
    makes the run slower. Growing memory comes last, since it costs no time until it runs out.

    Args:
        seen: the measurement; ``evidence["loader"]`` describes how the data was loaded, and ``evidence["model"]``, if
            present, what the user's code does already (``compiled``, ``channels_last``, ``fused``, and its ``convs``).
        cards: all rungs' cards, as returned by ``fastloop.ladder.collect_cards``.
        enabled: enabled rungs, which no patch proposes again.
        verdicts: whether these took effect, and their rehearsals.
    """
    step = attribute(seen)
    rungs = Rungs(cards=cards, enabled=enabled, verdicts={verdict.rung: verdict for verdict in verdicts})
    found = [no_bottleneck.explain_no_step(seen)] if step is None else _apply_rules(step, rungs)
    debugging = None if step is None else host.find_anomaly_mode(step)
    alarms = [
        *filter(None, (debugging, one_time.find_storm(seen, rungs, step), one_time.find_slowdown(seen, verdicts)))
    ]
    if (death := no_bottleneck.explain_death(seen)) is not None:
        alarms, found = [death], [dataclasses.replace(each, patch=None, alarm="") for each in (*alarms, *found)]
    found = [*alarms, *(each for each in found if not alarms or each.bottleneck != "none")]
    found[0] = dataclasses.replace(found[0], detail=(*found[0].detail, *seen.state))
    creep = memory.find_memory_creep(seen)
    return (*found, *([] if creep is None else [creep]))


def _apply_rules(step: Attribution, rungs: Rungs) -> list[Finding]:
    named = [finding for rule in (*RULES.values(), device.find_padding) if (finding := rule(step, rungs))]
    each = between_steps.keep_costs_of_each_step(step, named)
    hidden = [finding for finding in named if finding not in each]
    has_died = no_bottleneck.explain_death(step.measured) is not None
    found = _join_by_patch(_fit_into_the_step(each), has_died=has_died)
    if len(found) > 1 and step.gpu_use == "well_used":  # good GPU use is no excuse for, say, a slow validation
        found = [one for one in found if one.bottleneck != "compute_bound" or one.share_pct is None]  # padding stays
    if not found:
        return [no_bottleneck.explain_none(step, hidden)]
    if not step.is_limit and any(finding.patch for finding in found):  # what helps comes before what no rung helps
        found.sort(key=lambda each: each.title in device.HELPLESS)
    beside = filter(None, (between_steps.describe_pauses(step, hidden), *no_bottleneck.list_doubts(step)))
    found[0] = dataclasses.replace(found[0], detail=(*found[0].detail, *beside))
    return found


def _join_by_patch(found: list[Finding], *, has_died: bool) -> list[Finding]:
    """Sort by the combined share of the findings that have the same patch, which may save more than the patch of a
    larger finding. The first of them names the others, unless no patch is proposed because the fit died."""
    groups: dict[str, list[Finding]] = {}
    for number, finding in enumerate(found):
        key = str(number) if finding.patch is None else json.dumps(finding.patch, sort_keys=True)
        groups.setdefault(key, []).append(finding)
    joined: list[Finding] = []
    for first, *others in sorted(groups.values(), key=lambda group: -sum(each.share_pct or 0.0 for each in group)):
        same = ", ".join(f"{each.title} ({each.share_pct or 0:.0f} % of the step)" for each in others)
        notes = (f"the same patch also addresses {same}",) if others and not has_died else ()
        joined += [dataclasses.replace(first, detail=(*first.detail, *notes)), *others]
    return joined


def _fit_into_the_step(found: list[Finding]) -> list[Finding]:
    """Sort by share, and limit each finding to the part of the step that larger ones leave."""
    kept, left = [], 100.0
    for finding in sorted(found, key=lambda each: -(each.share_pct or 0.0)):
        share, gain = finding.share_pct, finding.ceiling_gain_pct
        if share is not None and share > left:
            share = left
            if share < WORTH_NAMING_PCT:
                continue
            if gain is not None and finding.ceiling_is_estimate:
                gain = min(gain, compute_gain_bound_pct(share) or gain)
            finding = dataclasses.replace(finding, share_pct=share, ceiling_gain_pct=gain)
        left -= share or 0.0
        kept.append(finding)
    return kept
