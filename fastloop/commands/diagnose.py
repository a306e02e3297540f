"""fastloop diagnose: explain why the GPU is idle, from a run directory or by running a configuration.

A configuration is trained once unchanged, and then in trials that each remove one cost: their rates replace estimates
in the findings. Everything goes into one run directory, laid out like that of ``fastloop run``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastloop import diagnose as rules
from fastloop.commands import rerun
from fastloop.commands.config import check_without_torch
from fastloop.commands.console import Answer, Request, attaching, read_text
from fastloop.commands.headspace import list_variations
from fastloop.config.loading import Config
from fastloop.config.shipped import find_shipped
from fastloop.errors import ConfigError
from fastloop.evidence.gpu.efficiency import add_work
from fastloop.experiments.ab.arms import Progress
from fastloop.experiments.trials.failures import make_failure, writing
from fastloop.experiments.trials.run_directories import ROOT, claim
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import UNWRITTEN, Job, clear, run_trial
from fastloop.ladder import collect_cards, list_left_out
from fastloop.records import store
from fastloop.records.measurement import CEILINGS, Measurement
from fastloop.records.plan import Finding, Plan, Verdict
from fastloop.records.run_files import (
    MEASUREMENT,
    PlanFile,
    RunRecord,
    load_environment,
    load_plan,
    load_run,
    load_verdicts,
)
from fastloop.records.store import is_file, load, read
from fastloop.records.trial import DeviceRates, FlopCounts, Trial
from fastloop.report.run import files, summary

TRIALS, TRACE = "trials", "trace.json.gz"
HUNTED_STEPS, LEAD_IN_STEPS = 5, 20
"""Steps that the hunt for syncs takes, and steps to refill the queues before a trace: enough for typical queues."""
REWRITTEN = ("measurement.json", "findings.json", "report.md", "report.html")


def diagnose(target: str, asked: Request, progress: Progress, *, syncs: bool, trace: int | None) -> Answer:
    """Diagnose a run directory, or a configuration by running it; the answer shows the findings first.

    Args:
        syncs: find the lines of the user's code that wait for the device.
        trace: optimizer steps to record after the timed ones.

    Raises:
        ConfigError: `target` is neither, or options do not fit it; nothing was trained.
        Failed: the unchanged training failed.
        FastLoopError: the run directory can no longer be written.
    """
    more, overrides, out = asked.more, asked.overrides, asked.out
    where = run_directory(target)
    if where is None:
        traced = () if trace is None else (f"watch.trace_steps={trace}",)
        job = Job(
            conf=target,
            more=more,
            overrides=(*overrides, "watch.enabled=true", *traced),
            hunt_syncs=syncs,
            further_steps=count_untimed_steps(syncs, trace),
        )
        return _run_configuration(job, asked, progress)
    given = {"--config": more, "KEY=VALUE": overrides, "--syncs": syncs, "--trace": trace, "--out": out}
    if wrong := [name for name, value in given.items() if value]:
        got = f"{', '.join(wrong)} with the run directory {where}"
        conf = rerun.find_configuration(where)
        options = [*(["--syncs"] if syncs else []), *([] if trace is None else ["--trace", str(trace)])]
        options += [] if out is None else ["--out", out]
        do = (
            rerun.explain_rerun(trace)
            if conf is None
            else f"run it again: fastloop diagnose {rerun.name_arguments(str(conf), more, [*overrides, *options])}"
        )
        raise ConfigError(got=got, why="a finished run cannot be changed", do=do)
    return _diagnose_run(where)


def run_directory(target: str) -> Path | None:
    """Return the run directory if `target` is one or a file in one; None for a configuration.

    Raises:
        ConfigError: a directory that contains no run.
    """
    path = Path(target)
    if path.name in ("report.md", "report.html", "measurement.json") and is_file(path):
        path = path.parent
    if ("/" not in target and target in find_shipped("recipes")) or not os.path.isdir(path):  # noqa: PTH112 (Path's raises)
        return None
    if not is_file(path / "measurement.json"):
        do = f"write a configuration, or the directory that fastloop run printed, below {ROOT}/"
        raise ConfigError(got=f"run directory {target}", why="it contains no measurement.json", do=do)
    return path


# -- an earlier run ---------------------------------------------------------------------------------------------------


def _diagnose_run(where: Path) -> Answer:
    read_text(where / MEASUREMENT)  # explains why a file cannot be read; for `load` it is then just missing
    seen = load(where / MEASUREMENT, Measurement)
    if seen is None:
        raise ConfigError(got=f"{where}/measurement.json", why="it is not a JSON object", do="run the training again")
    try:
        name = load_environment(where).name or ""
        return _answer(where, name, seen, load_plan(where), load_verdicts(where))
    except (AttributeError, TypeError, KeyError, ValueError) as error:  # edited by hand, or from another program
        why = f"it contains unexpected values: {type(error).__name__}: {error}"
        raise ConfigError(got=f"{where}/measurement.json", why=why, do="run the training again") from error


def _answer(
    where: Path,
    name: str,
    seen: Measurement,
    plan: Plan,
    verdicts: tuple[Verdict, ...],
    notes: Sequence[str] = (),
    **more: Any,
) -> Answer:
    """Make the answer from the records."""
    found, then, later = _find(seen, plan, verdicts)
    report, proof = store.report_in(where), rerun.to_prove(found, rerun.name_base(where))
    lines = summary.write_lines(seen, plan, verdicts, found, report, name, then, later, proof)
    lines += [f"TRACE    {where / TRACE}"] if is_file(where / TRACE) else []
    lines += [f"NOTE     {note}" for note in notes]
    record = RunRecord(run_dir=str(where), plan=PlanFile.of(plan), measurement=seen, verdicts=verdicts, findings=found)
    return Answer(text="\n".join(lines), json={**store.to_json(record), **more})


def _find(
    seen: Measurement, plan: Plan, verdicts: tuple[Verdict, ...]
) -> tuple[tuple[Finding, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the findings by the rules of this version, and the rungs to try next and later."""
    enabled = tuple(step.rung for step in plan.steps)
    found = rules.list_findings(seen, collect_cards(), enabled, verdicts)
    return found, *rules.list_next_steps(found, seen, collect_cards(), enabled)


# -- a configuration --------------------------------------------------------------------------------------------------


def _run_configuration(job: Job, asked: Request, progress: Progress) -> Answer:
    config, limits = job.config(), Limits(total_s=asked.limit_s)
    check_without_torch(config)
    with (
        claim(config.name, asked.out, force=asked.force) as path,
        attaching(lambda: load_run(path), path, progress),
        writing(path),
    ):
        base = run_trial("as it is", job, path, limits=limits, progress=progress)
        if not base.ok:
            if base.code == 2:
                clear(path)
            raise make_failure(base)
        seen = base.measurement or Measurement()
        trials = []
        for name, further in _list_further(job, config, seen):
            trials.append(run_trial(name, further, path / TRIALS / name, limits=limits, progress=progress))
            seen = add_trial(seen, trials[-1])
        plan, verdicts = load_plan(path), load_verdicts(path)
        rewrite(path, config, seen, plan, verdicts)
    notes = [
        *_describe_untimed(job, config),
        *([UNWRITTEN] if any(trial.unsaved for trial in (base, *trials)) else []),
        *(f"{trial.name} could not be measured: {trial.cause}" for trial in trials if not trial.ok),
    ]
    rows = [store.to_json(trial) for trial in (base, *trials)]
    return _answer(path, config.name, seen, plan, verdicts, notes, trials=rows)


def count_untimed_steps(syncs: bool, trace: int | None) -> int:
    """Return the extra steps for untimed work, so that the requested number of steps is still timed."""
    return (HUNTED_STEPS if syncs else 0) + (trace + LEAD_IN_STEPS if trace else 0)


def _describe_untimed(job: Job, config: Config) -> list[str]:
    if not job.further_steps:
        return []
    each = ["the trace"] if config.watch.trace_steps else []
    each += ["the search for synchronizations"] if job.hunt_syncs else []
    return [f"{job.further_steps} steps more than run.max_steps, for {' and '.join(each)}"]


def _list_further(job: Job, config: Config, seen: Measurement) -> list[tuple[str, Job]]:
    """List the trials after the first: ceilings, and measurements that the run itself could not make."""
    plain = dataclasses.replace(job.override("watch.trace_steps=0"), hunt_syncs=False, further_steps=0)
    further: list[tuple[str, Job]] = [
        (name, dataclasses.replace(plain, variation=name)) for name in list_variations(config)
    ]
    if seen.flops.get("per_sample") is None:
        further.append(("flops", plain.counted()))
    if seen.device == "cuda" and seen.peaks.get("measured_tflop_per_s") is None:
        further.append(("rates", dataclasses.replace(plain, variation="rates")))
    return further


def add_trial(seen: Measurement, trial: Trial) -> Measurement:
    """Add a trial's result to the measurement; a failed trial changes nothing."""
    if trial.name in CEILINGS:
        return dataclasses.replace(seen, ceilings={**seen.ceilings, trial.name: trial.samples_per_s})
    if trial.ok and isinstance(trial.answer, FlopCounts):
        return add_work(seen, flops=store.to_json(trial.answer))
    if trial.ok and isinstance(trial.answer, DeviceRates):
        return add_work(seen, rates=trial.answer)
    return seen


def rewrite(where: Path, config: Config, seen: Measurement, plan: Plan, verdicts: tuple[Verdict, ...]) -> None:
    """Rewrite the files of a run that depend on its measurement."""
    found, then, later = _find(seen, plan, verdicts)
    contents = files.run_files(
        config_yaml="",
        changed_yaml=(where / "config.diff.yaml").read_text(encoding="utf-8"),
        env_json=store.dump(read(where / "env.json") or {}),
        plan=plan,
        seen=seen,
        verdicts=verdicts,
        findings=found,
        left_out=list_left_out(config.ladder),
        name=config.name,
        then=then,
        later=later,
    )
    store.write(where, {name: text for name, text in contents.items() if name in REWRITTEN})
