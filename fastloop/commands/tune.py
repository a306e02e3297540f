"""fastloop tune: one search for the best number of one rung; prints a YAML patch."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from fastloop.commands.config import check_without_torch
from fastloop.commands.console import WATCHED, Answer, Request, attach
from fastloop.config.loading import Config
from fastloop.config.suggestions import find_nearest
from fastloop.errors import ConfigError
from fastloop.experiments.ab.arms import ConfigArm, Progress
from fastloop.experiments.trials.failures import make_failure, writing
from fastloop.experiments.trials.run_directories import claim
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import Job, allow_quick_starts, forget
from fastloop.experiments.tune.choice import list_tunables
from fastloop.experiments.tune.search import Search, Tuned
from fastloop.ladder import collect_cards
from fastloop.records import store
from fastloop.records.tuning import TuningFile
from fastloop.records.yaml_text import dump_yaml
from fastloop.report.drawing.html import draw_reports
from fastloop.report.experiments import tune_report

NAME, PATCH = "tune.json", "patch.yaml"


def tune(conf: str, what: str, asked: Request, progress: Progress) -> Answer:
    """Search for the best number of one rung.

    Args:
        what: a rung with a tunable number.

    Raises:
        ConfigError: nothing was trained, because of the configuration or the command line.
        Failed: the unchanged training failed. If all others failed, the exit code is 1.
    """
    job = Job(conf=conf, more=asked.more, overrides=(*asked.overrides, *WATCHED))
    _check_what(conf, what)
    config = job.config()
    check_without_torch(config)
    _check_devices(config, what)
    with claim(config.name, asked.out, force=asked.force) as path, writing(path):
        for name in (NAME, PATCH, "report.md", "report.html"):
            (path / name).unlink(missing_ok=True)
        with allow_quick_starts():
            tuned = Search(
                arm=ConfigArm(name=config.name, job=job),
                what=what,
                place=path,
                limits=Limits(total_s=asked.limit_s),
                progress=progress,
                stopped=partial(_write_partial, path),
            ).run()
        if tuned.failed is not None and not any(each.ok for each in tuned.points):
            if tuned.failed.code == 2:
                forget(tuned.failed.run_dir)
            failure = make_failure(tuned.failed)
            attach(failure, tuned)
            raise failure
        _write(path, tuned)
    lines = tune_report.write_lines(tuned)
    if tuned.patch is not None:
        lines += ["", dump_yaml(tuned.patch).rstrip("\n")]
    return Answer(text="\n".join(lines), json=store.to_json(tuned), exit_code=0 if tuned.failed is None else 1)


def _write_partial(where: Path, tuned: Tuned, error: BaseException) -> None:
    """Write the results of a search that was stopped."""
    attach(error, tuned)
    if tuned.points:
        with contextlib.suppress(Exception):  # an error here must not hide the first one
            _write(where, tuned)


def _write(where: Path, content: TuningFile) -> None:
    store.save(where, {NAME: content})  # first: drawing the reports takes seconds
    written = draw_reports(tune_report.make_document(content))
    if content.patch is not None:
        head = (f"fastloop tune {content.name} {content.what}", *content.why.splitlines())
        comment = "\n".join(f"# {line}" for line in head)
        written[PATCH] = f"{comment}\n{dump_yaml(content.patch)}"
    store.write(where, written)


def _check_what(conf: str, what: str) -> None:
    known = list_tunables()
    if conf in known and what not in known:
        do = f"write fastloop tune {what} {conf}"
        raise ConfigError(got=f"fastloop tune {conf} {what}", why="the configuration comes first", do=do)
    if what not in known:
        near, is_rung = find_nearest(what.removeprefix("rungs.").partition(".")[0], known), what in collect_cards()
        raise ConfigError(
            got=f"fastloop tune … {what}",
            why="it has no setting to tune" if is_rung else "there is no such rung",
            do=f"write {near}" if near else f"write one of {', '.join(known)}",
        )


def _check_devices(config: Config, what: str) -> None:
    """Raise ConfigError if there are too few devices to tune this rung."""
    least = list_tunables()[what].least_devices
    if config.run.devices < least:
        raise ConfigError(
            got=f"run.devices: {config.run.devices}",
            why="a single process exchanges no gradients",
            key="run.devices",
            do=f"write run.devices: {least} or more, or tune something else",
        )
