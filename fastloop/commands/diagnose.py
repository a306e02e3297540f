"""fastloop diagnose: why the GPU is idle. Of a run there was, from its files; of a configuration, by running it.

A configuration is trained once as it is, and then in trials that take one cost away each: what they reach stands in the
findings in place of estimates. All of it ends in one run directory, which reads like that of ``fastloop run``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastloop import diagnose as rules
from fastloop.commands import again
from fastloop.commands.answer import Answer
from fastloop.commands.disk import writing
from fastloop.commands.headspace import failed, wanted
from fastloop.commands.outdir import ROOT, claim
from fastloop.commands.readback import measurement_from, plan_from, read, verdicts_from
from fastloop.commands.recipe_keys import check_recipe_keys
from fastloop.commands.supervise import Limits
from fastloop.commands.trial import UNWRITTEN, Job, Trial, clear, run_trial
from fastloop.config import Config
from fastloop.errors import ConfigError
from fastloop.ladder import left_out
from fastloop.measurement import CEILINGS, Measurement
from fastloop.records import Finding, Plan, Verdict
from fastloop.report import files, summary
from fastloop.shipped import is_file, shipped
from fastloop.worked import worked

TRIALS = "trials"
HUNTED_STEPS, LEAD_IN_STEPS = 5, 20
"""Steps the hunt takes, and those that pass before a trace while queues fill again: about as many, for usual queues."""
REWRITTEN = ("measurement.json", "findings.json", "report.md", "report.html")

Progress = Callable[[str], None]


def diagnose(target: str, *, more: Sequence[str], overrides: Sequence[str], syncs: bool, trace: int | None,
             out: str | None, force: bool, limit_s: float, progress: Progress) -> Answer:  # fmt: skip
    """Findings first, of a run directory or of a configuration that is run for it.

    Args:
        syncs: find the user's lines at which the device is waited for.
        trace: optimizer steps to record after the timed ones.

    Raises:
        ConfigError: `target` is neither, or options do not go with it; nothing was trained.
        Failed: the training as it is failed.
        FastLoopError: the run directory cannot be written any more.
    """
    where = run_directory(target)
    if where is None:
        return _of_configuration(target, tuple(more), tuple(overrides), syncs, trace, out, force, limit_s, progress)
    given = {"--config": more, "KEY=VALUE": overrides, "--syncs": syncs, "--trace": trace, "--out": out}
    if wrong := [name for name, value in given.items() if value]:
        got = f"{', '.join(wrong)} with the run directory {where}"
        conf = again.configuration(where)
        do = again.by_script(trace) if conf is None else f"run it again: fastloop diagnose {conf}"
        raise ConfigError(got=got, why="a run that is over stays as it was", do=do)
    return _of_run(where)


def run_directory(target: str) -> Path | None:
    """The directory of a run, if `target` is one, or one of the files in it; None for a configuration.

    Raises:
        ConfigError: a directory without a run in it.
    """
    path = Path(target)
    if path.name in ("report.md", "report.html", "measurement.json") and is_file(path):
        path = path.parent
    if ("/" not in target and target in shipped("recipes")) or not os.path.isdir(path):  # noqa: PTH112 (Path's raises)
        return None
    if not is_file(path / "measurement.json"):
        do = f"write a configuration, or the directory that fastloop run printed, below {ROOT}/"
        raise ConfigError(got=f"run directory {target}", why="it holds no measurement.json", do=do)
    return path


# -- a run there was --------------------------------------------------------------------------------------------------


def _of_run(where: Path) -> Answer:
    content = read(where / "measurement.json")
    if content is None:
        raise ConfigError(got=f"{where}/measurement.json", why="it is no JSON object", do="run the training again")
    seen, plan = measurement_from(content), plan_from(read(where / "plan.json") or {})
    try:
        name = str((read(where / "env.json") or {}).get("name") or "")
        return _told(where, name, seen, plan, verdicts_from(read(where / "verdicts.json") or {}))
    except (AttributeError, TypeError, KeyError, ValueError) as error:  # edited by hand, or of some other program
        why = f"its values are not what they should be: {type(error).__name__}: {error}"
        raise ConfigError(got=f"{where}/measurement.json", why=why, do="run the training again") from error


def _told(where: Path, name: str, seen: Measurement, plan: Plan, verdicts: tuple[Verdict, ...],
          notes: Sequence[str] = (), **more: Any) -> Answer:  # fmt: skip
    """The answer from the records; findings are made anew, by the rules of this version."""
    enabled = tuple(step.rung for step in plan.steps)
    found = rules.findings(seen, enabled)
    then, later = rules.next_steps(found, seen, enabled)
    report = files.report_in(where)
    lines = summary.lines(seen, plan, verdicts, found, None if report is None else str(report), name, then, later)
    content = files.run_json(
        str(where), plan=files.plan_json(plan), measurement=files.measurement_json(seen),
        verdicts=files.verdicts_json(verdicts), findings=files.findings_json(found),
    )  # fmt: skip
    if patch := next((finding.patch for finding in found if finding.patch), None):
        lines.insert(len(lines) - (report is not None), f"PROVE    {again.to_prove(where, patch)}")
    return Answer(text="\n".join([*lines, *(f"NOTE     {note}" for note in notes)]), json={**content, **more})


# -- a configuration --------------------------------------------------------------------------------------------------


def _of_configuration(conf: str, more: tuple[str, ...], overrides: tuple[str, ...], syncs: bool, trace: int | None,
                      out: str | None, force: bool, limit_s: float, progress: Progress) -> Answer:  # fmt: skip
    asked = (*overrides, "watch.enabled=true", *([] if trace is None else [f"watch.trace_steps={trace}"]))
    job = Job(conf=conf, more=more, overrides=asked, hunt_syncs=syncs)
    config, limits = job.config(), Limits(total_s=limit_s)
    check_recipe_keys(config)
    place = claim(config.name, out, force=force)
    try:
        with writing(place.path):
            longer = job.but(further_steps=beyond(syncs, trace))
            base = run_trial("as it is", longer, place.path, limits=limits, progress=progress)
            if not base.ok:
                if base.code == 2:
                    clear(place.path)
                raise failed(base)
            seen = measurement_from(base.measurement or {})
            trials = []
            for name, asks in _further(job, config, seen):
                trials.append(run_trial(name, asks, place.path / TRIALS / name, limits=limits, progress=progress))
                seen = with_trial(seen, trials[-1])
    finally:
        place.give_back()
    plan = plan_from(read(place.path / "plan.json") or {})
    verdicts = verdicts_from(read(place.path / "verdicts.json") or {})
    with writing(place.path):
        rewrite(place.path, config, seen, plan, verdicts)
    notes = [*([UNWRITTEN] if any(trial.unsaved for trial in (base, *trials)) else []),
             *(f"{trial.name} could not be measured: {trial.cause}" for trial in trials if not trial.ok)]
    return _told(place.path, config.name, seen, plan, verdicts, notes, trials=[each.row() for each in (base, *trials)])


def beyond(syncs: bool, trace: int | None) -> int:
    """Steps for what is not timed, so that the timed ones are those that were asked for."""
    return (HUNTED_STEPS if syncs else 0) + (trace + LEAD_IN_STEPS if trace else 0)


def _further(job: Job, config: Config, seen: Measurement) -> list[tuple[str, Job]]:
    """The trials after the first: ceilings, and what the run itself could not tell."""
    plain = job.but("watch.trace_steps=0", hunt_syncs=False)
    asked = [(name, plain.but(variation=name)) for name in wanted(config)]
    if seen.flops.get("per_sample") is None:
        asked.append(("flops", plain.counted()))
    if seen.device == "cuda" and seen.peaks.get("measured_tflop_per_s") is None:
        asked.append(("rates", plain.but(variation="rates")))
    return asked


def with_trial(seen: Measurement, trial: Trial) -> Measurement:
    """The measurement with what a trial found in it; one that failed changes nothing."""
    if trial.name in CEILINGS:
        return dataclasses.replace(seen, ceilings={**seen.ceilings, trial.name: trial.samples_per_s})
    answer = {key: value for key, value in (trial.answer or {}).items() if key != "schema"}
    if not trial.ok or not answer:
        return seen
    if trial.name == "flops":
        return worked(seen, flops=answer)
    return worked(seen, gemm_tflop_per_s=answer.get("gemm_tflop_per_s"), copy_tb_per_s=answer.get("copy_tb_per_s"))


def rewrite(where: Path, config: Config, seen: Measurement, plan: Plan, verdicts: tuple[Verdict, ...]) -> None:
    """Write the files of a run that depend on its measurement, anew."""
    enabled = tuple(step.rung for step in plan.steps)
    found: tuple[Finding, ...] = rules.findings(seen, enabled)
    then, later = rules.next_steps(found, seen, enabled)
    contents = files.run_files(
        config_yaml="", changed_yaml=(where / "config.diff.yaml").read_text(encoding="utf-8"),
        environment=read(where / "env.json") or {}, plan=plan, seen=seen, verdicts=verdicts, findings=found,
        left_out=left_out(config.ladder), name=config.name, then=then, later=later,
    )  # fmt: skip
    files.write(where, {name: text for name, text in contents.items() if name in REWRITTEN})
