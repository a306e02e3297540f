"""What an experiment found, as its files and as the answer for people."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.commands import gates, passports
from fastloop.commands.experiment import Experiment, Side
from fastloop.commands.readback import read
from fastloop.commands.surroundings import versions
from fastloop.commands.trial import UNWRITTEN, Trial
from fastloop.compare import exit_code as code_of
from fastloop.comparison import Comparison
from fastloop.config import diff
from fastloop.report import files, versus

COMPARISON = "comparison.json"
DEVICES = {"device_name": "device", "devices": "number of devices"}
"""What arms may differ in by intention, and what people call it."""
_TOLD_TO_END = re.compile(r"SIGTERM|terminated with code (-15|143)\b")


def write(experiment: Experiment, name: str, *, partial: bool) -> dict[str, Any]:
    """Judge the runs there are and write ``comparison.json`` and the reports; gives the former's content."""
    content = told(experiment, name, partial=partial)
    files.write(experiment.place, {COMPARISON: files.dump(content)})  # first: to draw the reports takes seconds
    files.write(experiment.place, versus.reports(content))
    on_already = experiment.base.arm.config().ladder.enabled()
    for side in experiment.sides[1:] if not partial else ():
        alone = len(side.changed_rungs) == 1 and not side.changed_keys and side.changed_rungs[0] not in on_already
        if alone and side.changed_rungs[0] in side.sample().active_rungs:
            passports.keep(side.changed_rungs[0], experiment.outcome(side), content["hardware"], side.sample(),
                           name=name, run_dir=experiment.place)  # fmt: skip
    return content


def told(experiment: Experiment, name: str, *, partial: bool) -> dict[str, Any]:
    """The content of ``comparison.json``."""
    sides, found = experiment.sides, experiment.comparisons()
    rows = [row(one) for one in found]
    first: Mapping[str, Any] = rows[0] if rows else {}
    base = experiment.base.arm.config()
    return {
        "schema": files.SCHEMA, "run_dir": str(experiment.place), "name": name,
        "steps": experiment.base.steps or experiment.settings.steps, "warmup_steps": experiment.settings.warmup,
        "band_pct": experiment.settings.band_pct, "order": [arm for arm, _ in experiment.order],
        "config_diff": {side.name: [list(each) for each in diff(base, side.arm.config())] for side in sides[1:]},
        "arms": [arm_row(side) for side in sides], "comparisons": rows,
        **{key: first.get(key) for key in ("ratio", "ci95", "verdict", "parity")},
        "hardware": hardware([trial for side in sides for trial in side.trials()]),
        "flags": flags(sides), "failures": [failure(side) for side in sides if side.failed is not None],
        "partial": partial, "seconds": round(experiment.seconds, 1),
    }  # fmt: skip


def row(one: Comparison) -> dict[str, Any]:
    """A comparison as it stands in the file."""
    return {"arm": one.arm, "ratio": one.ratio, "ci95": one.ci95 and list(one.ci95), "mde_pct": one.mde_pct,
            "verdict": one.verdict, "why": one.why, "alpha": one.alpha, "runs": one.runs,
            "parity": gates.outcome_json(one.parity)}  # fmt: skip


def arm_row(side: Side) -> dict[str, Any]:
    """An arm: its runs, what of it took, and what it needs."""
    sample, trials = side.sample(), side.trials()
    kept = [trial.measurement or {} for trial in trials if trial.samples_per_s is not None]

    def middle(values: Sequence[Any]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return {
        "name": side.name, "runs": len(sample.samples_per_s), "samples_per_s": list(sample.samples_per_s),
        "places": list(sample.places), "seeds": [side.arm.config().run.seed + number for number in sorted(side.runs)],
        "steps": side.steps or None, "active_rungs": list(sample.active_rungs),
        "inactive_rungs": list(sample.inactive_rungs), "inactive_why": dict(sample.inactive_rungs),
        "step_ms": middle([(seen.get("step_ms") or {}).get("mean") for seen in kept]),
        "peak_gib": middle([seen.get("peak_gib") for seen in kept]),
        "global_batch": middle([seen.get("global_batch") for seen in kept]),
        "failed": None if side.failed is None else side.failed.cause,
    }  # fmt: skip


def failure(side: Side) -> dict[str, Any]:
    """Why an arm has no more runs."""
    trial = side.failed
    assert trial is not None
    return {"arm": side.name, "run": trial.run_dir.name, "cause": trial.cause, "rank": rank_in(trial.tail),
            "last_step": trial.last_step, "tail": trial.tail}  # fmt: skip


def rank_in(tail: str) -> int | None:
    """The rank that a stderr blames, where that is exactly one.

    torchrun lists those that failed, and as the last of them the root cause. Otherwise it is the one with a traceback,
    or the only one that says anything. Ranks that were told to end, because another had failed, are not meant.
    """
    if listed := re.findall(r"^\s*rank\s*: (\d+) \(local_rank", tail, re.MULTILINE):
        return int(listed[-1])
    said = [(int(found[1]), line) for line in tail.splitlines()
            if (found := re.search(r"\[rank:?\s?(\d+)\]", line)) and not _TOLD_TO_END.search(line)]  # fmt: skip
    named = {rank for rank, line in said if "Traceback" in line} or {rank for rank, _ in said}
    return named.pop() if len(named) == 1 else None


def flags(sides: Sequence[Side]) -> list[str]:
    """What makes the figures depend on the hour, or on too short a window, or on where a run was made or began."""
    found = [*mixed(sides), *_of_checkpoints([trial for side in sides for trial in side.trials()])]
    for side in sides:
        said: dict[str, list[int]] = {}
        for number in sorted(side.runs):
            seen = side.runs[number].measurement or {}
            short = ["the window is too short for its queues"] if seen.get("window_too_short") else []
            for each in (*(seen.get("state") or ()), *short):
                said.setdefault(each, []).append(number + 1)
        found += [f"{side.name}, run{'s' if len(runs) > 1 else ''} {spans(runs)}: {each}"
                  for each, runs in said.items()]  # fmt: skip
    return found


def _of_checkpoints(trials: Sequence[Trial]) -> list[str]:
    """What checkpoints have to do with these runs."""
    began = max((trial.began or 0 for trial in trials), default=0)
    loaded = [f"all runs began at step {began}, from a checkpoint that the script loads"] if began else []
    left = [f"{UNWRITTEN}, in all arms alike"] if any(trial.unsaved for trial in trials) else []
    return [*loaded, *left]


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in few letters: 1-3, 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in found)


def mixed(sides: Sequence[Side]) -> list[str]:
    """That runs that are compared come from several environments, and what differs."""
    found: dict[tuple[str, str], dict[Any, None]] = {}
    for side in sides:
        own = side.name if any(key.startswith(("run.", "trainer.num_nodes")) for key in side.changed_keys) else ""
        for trial in side.trials():
            for key, value in hardware([trial]).items():
                if value is not None:
                    found.setdefault((own if key in DEVICES else "", key), {})[value] = None
    several = [f"{DEVICES.get(key, key)} {' and '.join(map(str, values))}" for (_, key), values in found.items()
               if len(values) > 1]  # fmt: skip
    return [f"the runs are not from one environment: {', '.join(several)}"] if several else []


def hardware(trials: Sequence[Trial]) -> dict[str, Any]:
    """What the runs ran on, from the first of them."""
    if not trials:
        return dict.fromkeys(("device_name", "devices", "torch", "lightning", "fastloop", "driver"))
    seen, environment = trials[0].measurement or {}, read(trials[0].run_dir / "env.json") or {}
    cpu = (environment.get("hardware") or {}).get("cpu_model")
    return {"device_name": seen.get("device_name") or cpu or seen.get("device"),
            "devices": seen.get("world_size"), **versions(environment)}  # fmt: skip


def lines(content: Mapping[str, Any]) -> list[str]:
    """The answer for people."""
    return versus.lines(content)


def exit_code(experiment: Experiment) -> int:
    """1 a run failed, 3 parity failed, 4 inconclusive, 0 otherwise."""
    return code_of(experiment.comparisons(), any(side.failed is not None for side in experiment.sides))
