"""fastloop climb: goes up the ladder by itself, and proves in the end where it came to.

Everything a climb finds on its way is a screen: winners of screens look better than they are. Its headline is a fresh
A/B of the start against the top, with all gates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastloop import facts as machine
from fastloop.commands.answer import Answer, Failed, leave
from fastloop.commands.ascent import Ascent
from fastloop.commands.attempt import BaseFailed
from fastloop.commands.bench import Bench
from fastloop.commands.budget import Budget, Spent
from fastloop.commands.candidates import Start
from fastloop.commands.disk import writing
from fastloop.commands.headspace import failed
from fastloop.commands.manifest import fingerprint, recipe_fingerprint
from fastloop.commands.outdir import claim_or_resume, hold, stands
from fastloop.commands.readback import read
from fastloop.commands.recipe_keys import check_recipe_keys
from fastloop.commands.surroundings import refuse_others
from fastloop.commands.trial import TRIAL, Job, forget
from fastloop.commands.verdict import hardware
from fastloop.config import Config
from fastloop.errors import ConfigError
from fastloop.report import files, staircase
from fastloop.shipped import shipped

NAME, LADDER = "climb.json", "ladder.yaml"
WRITTEN = (NAME, LADDER, "report.md", "report.html")
ALLOW = ("changes-training",)

Progress = Callable[[str], None]


def climb(conf: str, *, more: Sequence[str], overrides: Sequence[str], budget_s: float, allow: Sequence[str],
          out: str | None, force: bool, resume: str | None, limit_s: float, progress: Progress) -> Answer:  # fmt: skip
    """Find the fastest stack of rungs, and compare it with the start.

    Args:
        budget_s: of this call; a climb that it did not suffice for goes on with `resume`.
        allow: of `ALLOW`: what else than the same training may be tried.
        limit_s: for each training.

    Raises:
        ConfigError: nothing was trained, because of the configuration or the command line.
        Failed: the training as it is failed.
        KeyboardInterrupt, SystemExit: stopped; what there is stands in the directory, flagged as partial.
    """
    job = Job(conf=conf, more=tuple(more), overrides=(*overrides, "watch.enabled=true", "watch.trace_steps=0"))
    config = job.config()
    _check(config, budget_s, allow)
    check_recipe_keys(config)
    place = claim_or_resume(f"climb-{config.name}", out, force=force, resume=resume, holds=NAME)
    try:
        with writing(place.path, NAME), hold(place.path):
            before = _earlier(place.path, config, resume)
            record = Record(place.path, config, allow, budget_s, before)
            bench = Bench(job, place.path, record.budget, limit_s=limit_s, progress=progress)
            start = Start(enabled=frozenset(config.ladder.enabled()), devices=config.run.devices,
                          allow=frozenset(record.allow),
                          cpus=max(1, machine.usable_cpus() // config.run.devices))  # fmt: skip
            record.ascent = Ascent(bench, start, warmup=config.watch.warmup_steps, rows=before.get("rungs") or (),
                                   ceilings=before.get("ceilings_samples_per_s"),
                                   notes=before.get("ceilings_notes"), save=record.save)  # fmt: skip
            return _climbed(record, progress)
    finally:
        place.give_back()


class Record:
    """What a climb writes into its directory.

    Args:
        before: the ``climb.json`` of an earlier call, or nothing.
    """

    def __init__(self, place: Path, config: Config, allow: Sequence[str], budget_s: float,
                 before: Mapping[str, Any]) -> None:  # fmt: skip
        self.place, self.config = place, config
        self._recipe = recipe_fingerprint(config)  # as it is now: it may be edited meanwhile
        self.allow = sorted({*allow, *(before.get("allow") or ())})
        self._before_s, self.new = float(before.get("spent_s") or 0.0), not before
        self.budget = Budget(budget_s, before_s=self._before_s)
        self._budgets_s = float(before.get("budget_s") or 0.0) + budget_s
        self.ascent: Ascent | None = None
        self.stopped, self.partial = "", True
        self.confirmed: Mapping[str, Any] | None = None

    def content(self) -> dict[str, Any]:
        """Of ``climb.json``."""
        ascent = self.ascent
        assert ascent is not None
        naive, rates = ascent.naive, ascent.top()
        start = {"samples_per_s": naive and naive.samples_per_s, "step_ms": naive and naive.step_ms}
        top = {"samples_per_s": rates.pop("now"), "step_ms": ascent.costs.now_ms} if ascent.costs else start
        trials = [naive.trial] if naive is not None and naive.trial is not None else []
        return {
            "schema": files.SCHEMA, "run_dir": str(self.place), "name": self.config.name,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), "hardware": hardware(trials),
            "naive": start, "ceilings_samples_per_s": ascent.ceilings, "ceilings_top_samples_per_s": rates,
            "ceilings_notes": ascent.notes,
            "rungs": ascent.rows, "stack": {"rungs": dict(ascent.stack)}, "top": top,
            "stopped": self.stopped, "confirmed": _told(self.confirmed), "allow": self.allow,
            "config_sha256": fingerprint(self.config), "recipe_sha256": self._recipe, "budget_s": self._budgets_s,
            "spent_s": round(self._before_s + self.budget.spent_s(), 1), "partial": self.partial,
        }  # fmt: skip

    def save(self) -> None:
        """After each decision."""
        files.write(self.place, {NAME: files.dump(self.content())})

    def write(self) -> dict[str, Any]:
        """All of it, with the ladder and the reports."""
        content = self.content()
        files.write(self.place, {NAME: files.dump(content)})  # first: to draw the reports takes seconds
        files.write(self.place, {LADDER: staircase.ladder_yaml(content), **staircase.reports(content)})
        return content


def _climbed(record: Record, say: Progress) -> Answer:
    ascent = record.ascent
    assert ascent is not None
    record.save()
    try:
        try:
            record.stopped = ascent.climb()
            complete = True
        except Spent as spent:
            record.stopped, complete = f"the budget is spent; next would have been: {spent.what}", False
        try:
            record.confirmed = ascent.confirm() if ascent.costs is not None else None
            record.partial = not complete and record.confirmed is None
        except Spent as spent:
            record.stopped += f"; left: {spent.what}"
    except BaseFailed as base:
        raise _base_failed(record, base) from None
    except BaseException as error:
        with contextlib.suppress(Exception):  # it must not hide what happened
            record.stopped = record.stopped or "it was stopped"
            leave(error, record.write())
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            say(stands(record.place))
        raise
    if record.partial or not complete:
        record.stopped += f"; go on with --resume {record.place}"
    content = record.write()
    return Answer(text="\n".join(staircase.lines(content)), json=content, exit_code=_exit_code(content))


def _base_failed(record: Record, base: BaseFailed) -> Failed:
    """What to end with where the training as it is, or the stack there is, does not run."""
    trial = base.seen.trial
    record.stopped = f"failed: {base.seen.cause or 'the run was too short to measure a rate'}"
    ended = Failed("fastloop: the run was too short to measure a rate") if trial is None else failed(trial)
    with contextlib.suppress(Exception):  # it must not hide what happened
        leave(ended, record.write())
    if trial is not None and trial.code == 2 and record.new and not (record.ascent and record.ascent.rows):
        forget(trial.run_dir)
        for name in WRITTEN:
            (record.place / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            trial.run_dir.parent.rmdir()
    return ended


def _exit_code(content: Mapping[str, Any]) -> int:
    found = content["confirmed"]
    if found is None:
        return 4 if content["partial"] else 0
    if found["failures"]:
        return 1
    unproven = found["verdict"] == "faster" and found["parity"].get("undecided")  # as in compare.exit_code
    return 3 if found["parity"]["passed"] is False else 4 if unproven or found["verdict"] == "inconclusive" else 0


def _told(comparison: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The confirmation, from the ``comparison.json`` of its own directory."""
    if comparison is None:
        return None
    first = comparison["comparisons"][0]
    told = {key: first[key] for key in ("ratio", "ci95", "verdict", "why", "mde_pct", "runs", "parity")}
    return {**told, "run_dir": comparison["run_dir"], "failures": [each["cause"] for each in comparison["failures"]]}


def _check(config: Config, budget_s: float, allow: Sequence[str]) -> None:
    if config.recipe_file is None:
        raise ConfigError(got=config.name, do=f"write base: with one of {', '.join(sorted(shipped('recipes')))}",
                          why="neither it nor one of its bases is a recipe, so there is nothing to train")  # fmt: skip
    if budget_s <= 0:
        raise ConfigError(got=f"--budget {budget_s:g}", why="nothing can be done in that time",
                          do="write a time such as 20m")  # fmt: skip
    if unknown := [each for each in allow if each not in ALLOW]:
        raise ConfigError(got=f"--allow {unknown[0]}", why="there is nothing of that name to allow",
                          do=f"write {' or '.join(ALLOW)}")  # fmt: skip


def _earlier(place: Path, config: Config, resume: str | None) -> Mapping[str, Any]:
    """The ``climb.json`` to go on from. Of a new climb, there is none, and nothing is found again in its directory."""
    if resume is None:
        if (place / NAME).is_file():
            for trial in sorted(place.rglob(TRIAL)):
                forget(trial.parent)
        return {}
    before = read(place / NAME) or {}
    if before.get("config_sha256") != fingerprint(config):
        raise ConfigError(got=f"--resume {place}", why="it was begun with another configuration",
                          do="repeat the command as it was, or begin another climb")  # fmt: skip
    if before.get("recipe_sha256") not in (None, recipe_fingerprint(config)):  # an older climb knows nothing of it
        raise ConfigError(got=f"--resume {place}", why=f"since it began {config.recipe_file} was changed",
                          do="undo the change, or begin another climb")  # fmt: skip
    refuse_others(place, {trial.parents[1] for trial in place.rglob(TRIAL)})
    return before
