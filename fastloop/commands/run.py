"""fastloop run and fastloop plan: train a configuration, or show what each rung would do."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fastloop.commands.config import check_without_torch
from fastloop.commands.console import Answer, attach, telling_if_slow
from fastloop.commands.rerun import name_arguments, to_prove
from fastloop.config.loading import load
from fastloop.errors import FastLoopError
from fastloop.experiments.trials.failures import Failed, explained, is_first_rank
from fastloop.experiments.trials.run_directories import ClaimedDirectory, claim, name_unclaimed
from fastloop.numbers import format_number
from fastloop.records import store
from fastloop.records.plan import Plan
from fastloop.records.run_files import PlanFile, RunRecord, load_run
from fastloop.report.run import summary


def run(
    conf: str, *, more: Sequence[str], overrides: Sequence[str], out: str | None, force: bool, trust_checkpoint: bool
) -> Answer:
    """Train, measure, verify the rungs and diagnose.

    Raises:
        ConfigError: the configuration or the command line is wrong; nothing was trained.
        Failed: the training raised or was stopped.
    """
    config = load(conf, more=more, overrides=overrides)
    check_without_torch(config)
    place = (
        claim(config.name, out, force=force) if is_first_rank() else ClaimedDirectory(name_unclaimed(config.name, out))
    )
    with place as path:
        try:
            with explained(config, path):
                with telling_if_slow("starting: importing torch and Lightning", partial(print, file=sys.stderr)):
                    from fastloop.bridge.fit.training import train  # here: a wrong key needs no torch to be reported

                loop = train(config, path, trust_checkpoint=trust_checkpoint)
        except Failed as error:
            if is_first_rank():
                attach(error, load_run(path))
            raise
    if not is_first_rank():
        return Answer(text="")
    if loop.measurement is None:
        return Answer(
            text="fastloop: nothing was measured: FASTLOOP_DISABLE is set",
            json=store.to_json(RunRecord(run_dir=str(path))),
        )
    record = RunRecord(
        run_dir=str(path),
        plan=PlanFile.of(loop.plan),
        measurement=loop.measurement,
        verdicts=loop.verdicts,
        findings=loop.findings,
    )
    report = store.report_in(path)
    extras = {**loop.report_extras, "proof": to_prove(loop.findings, name_arguments(conf, more, overrides))}
    lines = summary.write_lines(loop.measurement, loop.plan, loop.verdicts, loop.findings, report, **extras)
    if loop.unwritten is not None:
        do = f"free some space, or choose --out on another disk; {path} is incomplete"
        full = FastLoopError(got=f"run directory {path}", why=f"it cannot be written: {loop.unwritten}", do=do)
        lines.append(f"fastloop: {full}")
    return Answer(text="\n".join(lines), json=store.to_json(record), exit_code=0 if loop.unwritten is None else 1)


def plan(conf: str, *, more: Sequence[str], overrides: Sequence[str]) -> Answer:
    """Show what each rung would do, without training."""
    config = load(conf, more=more, overrides=overrides)
    check_without_torch(config)
    with explained(config, Path(os.devnull)):
        from fastloop.bridge.fit.dry_run import plan_dry

        dry = plan_dry(config)
    facts, batches, flight = dry.facts, dry.batches_in_flight, dry.bytes_in_flight
    size = facts.loader.batch_size if facts.loader else None
    ranks = "1 rank" if facts.world_size == 1 else f"{facts.world_size} ranks"
    head = [
        f"{config.name}: {facts.world_size}x {facts.device_name or facts.device}, {facts.strategy}, {facts.precision},"
        f" {facts.cpu_count} CPUs usable",
        f"samples per optimizer step: {format_number(dry.samples_per_step, ',d')}"
        f" (batch {format_number(size, 'd')} x accumulate {facts.accumulate} x {ranks})",
        f"batches in flight: {format_number(batches, 'd')} per rank,"
        f" {format_number(None if flight is None else flight / 2**20)} MiB",
        f"parity class of the plan: {dry.plan.parity}",
    ]
    content = {
        **store.to_json(PlanFile.of(dry.plan)),
        "run_dir": None,
        "samples_per_step": dry.samples_per_step,
        "batches_in_flight": batches,
        "bytes_in_flight": flight,
    }
    return Answer(text="\n".join([*head, "", *describe_plan(dry.plan)]), json=content)


def describe_plan(made: Plan) -> list[str]:
    """Describe each enabled rung in a block: the settings it would change and its notes, or why it does not apply."""
    if not made.steps:
        return ["no rung is enabled; try --config safe"]
    lines = []
    for step in made.steps:
        settings = step.change.wants.items()  # the notes describe what loads or wraps
        wants = [key if dataclasses.is_dataclass(value) else f"{key}={value}" for key, value in settings]
        wants += [key for action in step.change.actions for key in action.keys]
        planned = step.status == "planned"
        does = f"{', '.join(wants)}  [{step.change.parity}]" if planned else step.reason
        lines.append(f"{step.status:<8} {step.rung:<9} {does}")
        lines += [f"{'':<18} note: {note}" for note in step.change.notes]
    return lines
