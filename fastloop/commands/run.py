"""fastloop run and fastloop plan: train a configuration, or say what it would do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from fastloop.commands.answer import Answer
from fastloop.commands.outdir import claim
from fastloop.config import load
from fastloop.errors import ConfigError
from fastloop.records import Plan
from fastloop.report import files, summary


def run(conf: str, *, more: Sequence[str], overrides: Sequence[str], out: str | None, force: bool,
        trust_checkpoint: bool) -> Answer:  # fmt: skip
    """Train, watch, verify, diagnose."""
    config = load(conf, more=more, overrides=overrides)
    # Lightning starts the other ranks by running this very command again; only the first one has a directory.
    first = os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"
    where = claim(config.name, out, force=force) if first else None

    from fastloop.bridge.training import train  # here, so that a wrong key is reported before torch is imported

    try:
        loop = train(config, where, trust_checkpoint=trust_checkpoint)
    except ConfigError:
        if where is not None:
            with contextlib.suppress(OSError):  # not empty: it was there before
                where.rmdir()
        raise
    if loop.measurement is None or not first:
        return Answer(text="")
    text = "\n".join(summary.lines(loop.measurement, loop.plan, loop.verdicts, loop.findings, report=f"{where}/report.md"))
    content = {
        "schema": files.SCHEMA, "run_dir": str(where), "plan": files.plan_json(loop.plan),
        "measurement": files.measurement_json(loop.measurement), **_of("verdicts", files.verdicts_json(loop.verdicts)),
        **_of("findings", files.findings_json(loop.findings)),
    }  # fmt: skip
    return Answer(text=text, json=content)


def _of(key: str, content: dict[str, Any]) -> dict[str, Any]:
    return {key: content[key]}


def plan(conf: str, *, more: Sequence[str], overrides: Sequence[str]) -> Answer:
    """A dry run: what each rung would do; trains nothing."""
    config = load(conf, more=more, overrides=overrides)
    from fastloop.bridge.training import dry_run

    dry = dry_run(config)
    facts, flight = dry.facts, dry.bytes_in_flight
    head = [
        f"{config.name}: {facts.world_size}x {facts.device_name or facts.device}, {facts.strategy}, {facts.precision},"
        f" {facts.cpu_count} CPUs usable",
        f"samples per optimizer step: {summary.number(dry.samples_per_step, ',d')}"
        f" (batch {facts.loader.batch_size if facts.loader else 'n/a'} x accumulate {facts.accumulate}"
        f" x {facts.world_size} ranks)",
        f"batches in flight: {'n/a' if flight is None else f'{flight / 2**20:,.1f} MiB of host memory per rank'}",
        f"parity class of the plan: {dry.plan.parity}",
    ]  # fmt: skip
    content = {**files.plan_json(dry.plan), "run_dir": None, "samples_per_step": dry.samples_per_step,
               "bytes_in_flight": flight}  # fmt: skip
    return Answer(text="\n".join([*head, "", *plan_lines(dry.plan)]), json=content)


def plan_lines(made: Plan) -> list[str]:
    """One block per enabled rung: what it would set, what to know, or why it would not apply."""
    if not made.steps:
        return ["no rung is switched on; try --config safe"]
    lines = []
    for step in made.steps:
        wants = [f"{key}={value}" for key, value in step.change.wants.items()]
        wants += [key for action in step.change.actions for key in action.keys]
        does = ", ".join(wants) if step.status == "planned" else step.reason
        lines.append(f"{step.status:<8} {step.rung:<9} {does}  [{step.change.parity}]" if step.status == "planned"
                     else f"{step.status:<8} {step.rung:<9} {does}")  # fmt: skip
        lines += [f"{'':<18} note: {note}" for note in step.change.notes]
    return lines
