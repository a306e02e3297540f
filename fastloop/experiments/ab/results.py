"""The results of an experiment: its files and its reports."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastloop.config.loading import diff
from fastloop.experiments.ab import passports
from fastloop.experiments.ab.experiment import Experiment, Side
from fastloop.experiments.ab.manifest import list_versions
from fastloop.experiments.trials.trial import UNWRITTEN
from fastloop.judge.verdict import exit_code as code_of
from fastloop.records import store
from fastloop.records.experiment import ArmResult, ExperimentResult, FailedRun, Hardware
from fastloop.records.measurement import Measurement
from fastloop.records.run_files import load_environment
from fastloop.records.trial import Trial
from fastloop.report.drawing.html import draw_reports
from fastloop.report.experiments import ab_report
from fastloop.report.run.summary import describe_short_window

COMPARISON = "comparison.json"
DEVICES = {"device_name": "device", "devices": "number of devices"}
"""Hardware properties that may differ between arms on purpose, and their names in messages."""
CHOOSE_DEVICES = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
VARIABLES = ("CUDA_", "NCCL_", "NVIDIA_", "TORCH_", "PYTORCH_", "OMP_", "MKL_")
"""Prefixes of the environment variables that change numbers or speed; others name, for example, a rank or a job."""
_SHARE = re.compile(r"about (\d+) %")


def write(experiment: Experiment, name: str, *, partial: bool) -> ExperimentResult:
    """Judge the runs so far and write ``comparison.json`` and the reports; returns the content of the former."""
    result = summarize(experiment, name, partial=partial)
    store.save(experiment.place, {COMPARISON: result})  # first: drawing the reports takes seconds
    store.write(experiment.place, draw_reports(ab_report.make_document(result)))
    on_already = experiment.base.arm.config().ladder.enabled()
    for side in experiment.sides[1:] if not partial else ():
        alone = len(side.changed_rungs) == 1 and not side.changed_keys and side.changed_rungs[0] not in on_already
        if alone and side.changed_rungs[0] in side.sample().active_rungs:
            passports.keep(
                side.changed_rungs[0],
                experiment.outcome(side),
                result.hardware,
                side.sample(),
                name=name,
                run_dir=experiment.place,
            )
    return result


def summarize(experiment: Experiment, name: str, *, partial: bool) -> ExperimentResult:
    """Return the content of ``comparison.json``."""
    sides, base = experiment.sides, experiment.base.arm.config()
    asked = experiment.base.steps or experiment.settings.steps
    ran = [trial.measurement.total_steps or 0 for trial in experiment.base.trials() if trial.ok and trial.measurement]
    return ExperimentResult(
        run_dir=str(experiment.place),
        name=name,
        steps=asked,
        ended_at=max(ran) if any(ran) and asked is not None and max(ran) < asked else None,
        warmup_steps=experiment.settings.warmup,
        band_pct=experiment.settings.band_pct,
        order=tuple(arm for arm, _ in experiment.order),
        config_diff={side.name: tuple(diff(base, side.arm.config())) for side in sides[1:]},
        arms=tuple(summarize_arm(side, experiment.pilots.get(side.name)) for side in sides),
        comparisons=tuple(experiment.comparisons()),
        hardware=read_hardware([trial for side in sides for trial in side.trials()]),
        flags=tuple(list_flags(sides)),
        failures=tuple(_describe_failure(side.name, side.failed) for side in sides if side.failed is not None),
        partial=partial,
        seconds=round(experiment.seconds, 1),
    )


def summarize_arm(side: Side, pilot: Trial | None = None) -> ArmResult:
    """Summarize an arm: its runs, the rungs that took effect, and the resources it needs. `pilot` is its run before
    those that count, whose compile may have been the first."""
    sample, trials = side.sample(), side.trials()
    kept = [trial.measurement for trial in trials if trial.measurement and trial.samples_per_s is not None]
    first = [pilot.measurement] if pilot is not None and pilot.measurement is not None else []

    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return ArmResult(
        name=side.name,
        runs=len(sample.samples_per_s),
        samples_per_s=sample.samples_per_s,
        places=sample.places,
        seeds=tuple(side.arm.config().run.seed + number for number in sorted(side.runs)),
        steps=side.steps or None,
        active_rungs=sample.active_rungs,
        inactive_rungs=tuple(sample.inactive_rungs),
        inactive_why=sample.inactive_rungs,
        step_ms=middle(seen.step_ms.get("mean") for seen in kept),
        peak_gib=middle(seen.peak_gib for seen in kept),
        global_batch=middle(seen.global_batch for seen in kept),
        compile_s=max((seen.one_time_s.get("compile") or 0.0 for seen in (*first, *kept)), default=None),
        planned_steps=side.arm.config().run.max_steps if side.arm.plans_alone else None,  # unknown for a script
        failed=None if side.failed is None else side.failed.cause,
    )


def _describe_failure(arm: str, trial: Trial) -> FailedRun:
    """Describe why an arm has no more runs."""
    return FailedRun(arm=arm, run=trial.run_dir.name, cause=trial.cause, last_step=trial.last_step, tail=trial.tail)


def list_flags(sides: Sequence[Side]) -> list[str]:
    """List reasons to doubt the figures: the machine's state, short windows, mixed environments, checkpoints."""
    found = [
        *list_mixed_environments(sides),
        *list_mixed_settings(sides),
        *_list_checkpoint_notes([trial for side in sides for trial in side.trials()]),
    ]
    total = sum(len(side.runs) for side in sides)
    said: dict[str, dict[str, list[int]]] = {}
    shares: dict[str, list[int]] = {}
    for side in sides:
        for number, trial in sorted(side.runs.items()):
            seen = trial.measurement or Measurement(window_too_short=False)
            for each in filter(None, (*seen.state, describe_short_window(seen), _describe_end(trial))):
                alike = _SHARE.sub("about {} %", each)  # one sentence for all runs, although the share differs
                shares.setdefault(alike, []).extend(map(int, _SHARE.findall(each)))
                said.setdefault(alike, {}).setdefault(side.name, []).append(number)
    for alike, runs in said.items():
        known = sorted(shares[alike])
        where = " and ".join(f"{name}, {format_spans(numbers)}" for name, numbers in runs.items())
        if sum(map(len, runs.values())) == total > 1:
            where = f"all {total} runs"
        share = " to ".join(map(str, dict.fromkeys((known[0], known[-1])))) if known else ""
        found.append(f"{where}: {alike.replace('{}', share)}")
    return found


def _describe_end(trial: Trial) -> str | None:
    """Describe how a script failed after its fit; None if it did not, or only lacked a checkpoint."""
    if not trial.after_fit or trial.lacked_checkpoint:
        return None
    return f"the script ended with exit code {trial.code} after its fit"


def _list_checkpoint_notes(trials: Sequence[Trial]) -> list[str]:
    """Describe how checkpoints affect these runs."""
    began = max((trial.began or 0 for trial in trials), default=0)
    loaded = [f"all runs began at step {began}, from a checkpoint that the script loads"] if began else []
    left = [f"{UNWRITTEN}, in all arms alike"] if any(trial.unsaved for trial in trials) else []
    return [*loaded, *left]


def format_spans(numbers: Sequence[int]) -> str:
    """Abbreviate ascending run numbers: run-0 to run-2, run-4."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(" to ".join(f"run-{number}" for number in dict.fromkeys((span[0], span[-1]))) for span in found)


def list_mixed_environments(sides: Sequence[Side]) -> list[str]:
    """Say whether the compared runs come from several environments, and what differs."""
    found: dict[tuple[str, str], dict[Any, None]] = {}
    for side in sides:
        own = side.name if any(key.startswith(("run.", "trainer.num_nodes")) for key in side.changed_keys) else ""
        for trial in side.trials():
            for key, value in vars(read_hardware([trial])).items():
                if value is not None:
                    found.setdefault((own if key in DEVICES else "", key), {})[value] = None
    several = [
        f"{DEVICES.get(key, key)} {' and '.join(map(str, values))}"
        for (_, key), values in found.items()
        if len(values) > 1
    ]
    return [f"the runs come from different environments: {', '.join(several)}"] if several else []


_Settings = tuple[str, int, Mapping[str, Any]]
"""Arm, number of the run, and its settings by name."""


def list_mixed_settings(sides: Sequence[Side]) -> list[str]:
    """Say which torch flags and environment variables differ between the runs, and which runs have which value: an
    arm's code may set TF32, and a resumed experiment may run with other variables."""
    flags, variables = list[_Settings](), list[_Settings]()
    for side in sides:
        for number, trial in sorted(side.runs.items()):
            known = load_environment(trial.run_dir)
            if known.torch_flags is not None:
                flags.append((side.name, number, vars(known.torch_flags)))
            if known.variables is not None:
                matter = {name for name in known.variables if name.startswith(VARIABLES)} - CHOOSE_DEVICES
                chosen = {name: value for name, value in known.variables.items() if name in matter}
                variables.append((side.name, number, chosen))
    found = [*_describe_differences(flags, absent=None), *_describe_differences(variables, absent="unset")]
    return [f"the runs have different settings: {'; '.join(found)}"] if found else []


def _describe_differences(runs: Sequence[_Settings], *, absent: str | None) -> list[str]:
    """Describe each setting with several values: ``cudnn_benchmark false (base) and true (amp, run-2)``; None is
    unknown."""
    counts, found = Counter(arm for arm, *_ in runs), list[str]()
    for name in dict.fromkeys(name for *_, settings in runs for name in settings):
        where: dict[Any, dict[str, list[int]]] = {}
        for arm, number, settings in runs:
            if (value := settings.get(name, absent)) is not None:
                where.setdefault(value, {}).setdefault(arm, []).append(number)
        if len(where) < 2:
            continue
        values = []
        for value, arms in where.items():
            said = [
                arm if len(numbers) == counts[arm] else f"{arm}, {format_spans(numbers)}"
                for arm, numbers in arms.items()
            ]
            values.append(f"{value if isinstance(value, str) else str(value).lower()} ({' and '.join(said)})")
        found.append(f"{name} {' and '.join(values)}")
    return found


def read_hardware(trials: Sequence[Trial]) -> Hardware:
    """Return the hardware and versions of the first run."""
    if not trials:
        return Hardware()
    seen, environment = trials[0].measurement or Measurement(), load_environment(trials[0].run_dir)
    cpu = None if environment.hardware is None else environment.hardware.cpu_model
    return Hardware(
        device_name=seen.device_name or cpu or seen.device, devices=seen.world_size, **list_versions(environment)
    )


def exit_code(experiment: Experiment) -> int:
    """Return 1 if a run failed, 3 if parity failed, 4 if inconclusive, otherwise 0."""
    return code_of(experiment.comparisons(), any(side.failed is not None for side in experiment.sides))
