"""Findings about occasional events between steps: validation, checkpoints, epoch ends, single pauses."""

from __future__ import annotations

from collections.abc import Sequence

from fastloop.diagnose.attribution import WORTH_NAMING_PCT, Attribution, find_garbage
from fastloop.diagnose.finding import weigh
from fastloop.diagnose.remedies import Rungs
from fastloop.numbers import format_short
from fastloop.records import measurement
from fastloop.records.measurement import GAPS
from fastloop.records.plan import Finding, say_count
from fastloop.records.readings import (
    compute_validation_loading_pct,
    loads_little_for_validation,
    name_hot_line,
    read_loader,
    restarts_workers,
    to_number,
)

AROUND_EPOCHS = ("on_train_epoch_end", "on_train_epoch_start")
MOSTLY = 0.5
"""A finding is a cost of each step only if at least this share of it remains without single pauses."""


def find_validation(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find validation inside fit, spread over the steps."""
    found = read_loader(step.measured)
    advice = "validate less often (check_val_every_n_epoch, val_check_interval) or on fewer batches (limit_val_batches)"
    workers, loading_pct = found.get("validation_workers"), compute_validation_loading_pct(step.measured)
    facts = "" if loading_pct is None else f"; {loading_pct:.0f} % of it is waiting for its batches"
    if workers == 0 and not loads_little_for_validation(step.measured) and "validation_obstacle" in found:
        obstacle = found["validation_obstacle"]
        if obstacle is not None:
            advice += f"; but leave the validation loader without workers: {obstacle}"
        elif not rungs.has_left_out("data_wait"):
            advice += ", and give the validation loader workers"
    elif workers and not found.get("validation_keeps_workers") and found.get("can_keep_for_validation") is not False:
        advice = (
            f"keep the validation loader's {workers} workers between validations (persistent_workers=True); {advice}"
        )
    return _spread(step, rungs, "validation", "validation took", advice, facts)


def find_checkpoint(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find checkpoint writes during which the device waits."""
    advice = (
        "save less often (ModelCheckpoint(every_n_train_steps=...)), or in the background"
        " (Trainer(plugins=[AsyncCheckpointIO()]))"
    )
    return _spread(step, rungs, "checkpoint", "saving checkpoints took", advice)


def find_epoch_gap(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find idle time at the end of an epoch, when loaders restart and hooks run."""
    advice, found, beside = "make epochs longer, or do less in end-of-epoch hooks", read_loader(step.measured), ""
    reloads = bool(every := found.get("reload_every_n_epochs")) and bool(found.get("num_workers"))
    if reloads:
        advice = (
            f"the Trainer recreates the loader and its workers every {'epoch' if every == 1 else f'{every} epochs'}:"
            " leave out reload_dataloaders_every_n_epochs if the data stays the same"
        )
    elif restarts_workers(step.measured) and found.get("can_keep_workers") is not False:
        advice = f"keep your loader's {found['num_workers']} workers between epochs: persistent_workers=True"
    took_s = to_number(found.get("worker_restart_s"))
    if took_s is not None and (reloads or restarts_workers(step.measured)):
        often = say_count(found.get("worker_restarts") or 1, "time")
        beside = f"; workers were restarted {often}, {format_short(took_s, 's', digits=2)} each until their first batch"
    gap_pct = step.to_pct(step.parts_ms.get("epoch_gap", 0.0))
    if (line := name_hot_line(step.measured, gap_pct, *AROUND_EPOCHS)) is not None:
        beside = f", most of it at {line}{beside}"
    return _spread(step, rungs, "epoch_gap", f"between epochs the {step.device} was idle for", advice, beside)


def _spread(step: Attribution, rungs: Rungs, part: str, facts: str, advice: str, beside: str = "") -> Finding | None:
    """Make the finding for a part that occurs occasionally."""
    cost = weigh(step, part, step.parts_ms.get(part))
    if cost is None:
        return None
    facts = f"{facts} {cost.time}, spread over all steps{beside}"
    return cost.explain(facts, rungs.choose(step.measured, part, advice))


# -- single pauses: a finding that may come mostly from a few long steps does not count as a cost of each step ---------


def keep_costs_of_each_step(step: Attribution, found: Sequence[Finding]) -> list[Finding]:
    """Drop the findings that may be mostly single pauses.

    It is unknown in which part of the step the pauses occurred, except for the unexplained part, so each finding is
    compared with all other pauses.
    """
    share = step.to_pct(max(0.0, step.pauses_ms - step.parts_ms.get("unexplained", 0.0)))
    return [
        finding
        for finding in found
        if not share
        or finding.bottleneck in GAPS
        or finding.share_pct is None
        or finding.share_pct - share >= max(WORTH_NAMING_PCT, MOSTLY * finding.share_pct)
    ]


def describe_pauses(step: Attribution, hidden: Sequence[Finding]) -> str | None:
    """Describe single pauses that explain the `hidden` findings or are worth naming themselves; otherwise None."""
    seen, names = step.measured, [finding.bottleneck for finding in hidden]
    if not names and step.to_pct(step.pauses_ms) < WORTH_NAMING_PCT:
        return None
    steps, median = (seen.evidence.get("pauses") or {}).get("steps"), to_number(seen.step_ms.get("median"))
    usual = "" if median is None else f" (the median step takes {median:.2f} ms)"
    most = f"they may explain most of {' and '.join(names)}, so no per-step cost is given; " if names else ""
    return (
        f"{steps} of {seen.steps} steps were so long that they add {step.format_ms(step.pauses_ms)}{usual}: {most}"
        "no rung helps with this: train longer, so that single pauses matter less"
    )


def describe_uneven_steps(step: Attribution) -> str | None:
    """Describe a mean step that a few long steps dominate, beyond single pauses; otherwise None."""
    seen = step.measured
    times = measurement.measure_unevenness(seen, find_garbage(seen) + step.pauses_ms)
    median = to_number(seen.step_ms.get("median"))
    if times is None or median is None:
        return None
    return f"the mean step is {times:.1f} times the median of {median:.2f} ms: a few long steps dominate it"
