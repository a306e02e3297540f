"""fastloop tune: one search for the best number of one rung; prints a YAML patch."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastloop.commands.answer import Answer, leave
from fastloop.commands.arms import ConfigArm, Progress
from fastloop.commands.choosing import KEYS, TOLERANCE, Point, choose, grid
from fastloop.commands.disk import writing
from fastloop.commands.headspace import failed
from fastloop.commands.outdir import claim, hold
from fastloop.commands.recipe_keys import check_recipe_keys
from fastloop.commands.search import FIRST, Tuned, search
from fastloop.commands.supervise import Limits
from fastloop.commands.trial import Job, finished, forget
from fastloop.commands.verdict import hardware
from fastloop.config import Config
from fastloop.errors import ConfigError
from fastloop.report import files
from fastloop.shipped import shipped
from fastloop.yamlfile import dump_yaml

__all__ = ["Point", "Tuned", "choose", "grid", "search", "tune"]

NAME, PATCH = "tune.json", "patch.yaml"


def tune(conf: str, what: str, *, more: Sequence[str], overrides: Sequence[str], out: str | None, force: bool,
         limit_s: float, progress: Progress) -> Answer:  # fmt: skip
    """Search for the best number of one rung.

    Args:
        what: one of `KEYS`.
        limit_s: for each training.

    Raises:
        ConfigError: nothing was trained, because of the configuration or the command line.
        Failed: the training as it is failed. Where all others did, the exit code is 1.
    """
    job = Job(conf=conf, more=tuple(more), overrides=(*overrides, "watch.enabled=true", "watch.trace_steps=0"))
    _check_what(what)
    config = job.config()
    _check(config, what)
    check_recipe_keys(config)
    place, begun = claim(config.name, out, force=force), time.monotonic()
    try:
        with writing(place.path), hold(place.path):
            for name in (NAME, PATCH, "report.md", "report.html"):
                (place.path / name).unlink(missing_ok=True)
            tuned = search(ConfigArm(name=config.name, job=job), what, place.path, limits=Limits(total_s=limit_s),
                           progress=progress,
                           stopped=partial(_stopped, place.path, config.name, what, begun))  # fmt: skip
            if tuned.failed is not None and not any(each.ok for each in tuned.points):
                if tuned.failed.code == 2:
                    forget(tuned.failed.run_dir)
                raise failed(tuned.failed)
            content = told(place.path, config.name, what, tuned, time.monotonic() - begun)
            _write(place.path, content)
    finally:
        place.give_back()
    return Answer(text="\n".join(lines(content)), json=content, exit_code=0 if tuned.failed is None else 1)


def _stopped(where: Path, name: str, what: str, begun: float, tuned: Tuned, error: BaseException) -> None:
    """Write what a search had found when it was stopped."""
    if tuned.points:
        with contextlib.suppress(Exception):  # it must not hide what happened
            content = told(where, name, what, tuned, time.monotonic() - begun, ended=False)
            leave(error, content)
            _write(where, content)


def told(where: Path, name: str, what: str, tuned: Tuned, seconds: float, *, ended: bool = True) -> dict[str, Any]:
    """The content of ``tune.json``. Of a search that was stopped, nothing is chosen."""
    first = finished(where / FIRST)
    return {
        "schema": files.SCHEMA, "run_dir": str(where), "name": name, "what": what, "key": tuned.key,
        "hardware": hardware([] if first is None else [first]),
        "points": [dataclasses.asdict(each) for each in tuned.points], "as_it_is": tuned.as_it_is,
        "loaders": [{"value": value, "loader_ms": ms} for value, ms in tuned.loader_ms.items()],
        "rest_ms": tuned.rest_ms, "tolerance_pct": 100 * TOLERANCE[what], "yours": tuned.yours,
        "best": tuned.best if ended else None, "patch": tuned.patch if ended else None,
        "why": tuned.why if ended else "it was stopped", "seconds": seconds, "partial": not ended,
    }  # fmt: skip


def lines(content: dict[str, Any]) -> list[str]:
    """The answer for people, verdict first, the patch last."""
    from fastloop.report import curve

    said = curve.lines(content)
    patch = content["patch"]
    return said if patch is None else [*said, "", dump_yaml(patch).rstrip("\n")]


def _write(where: Path, content: dict[str, Any]) -> None:
    from fastloop.report import curve

    files.write(where, {NAME: files.dump(content)})  # first: to draw the reports takes seconds
    written = curve.reports(content)
    if content["patch"] is not None:
        comment = "\n".join(f"# {line}" for line in (f"fastloop tune {content['name']} {content['what']}",
                                                     *content["why"].splitlines()))  # fmt: skip
        written[PATCH] = f"{comment}\n{dump_yaml(content['patch'])}"
    files.write(where, written)


def _check_what(what: str) -> None:
    if what not in KEYS:
        close = difflib.get_close_matches(what.partition(".")[0], KEYS, n=1)
        raise ConfigError(got=f"fastloop tune … {what}", why="there is no search for it",
                          do=f"write {close[0]}" if close else f"write one of {', '.join(KEYS)}")  # fmt: skip


def _check(config: Config, what: str) -> None:
    """Refuse what no training could answer."""
    if config.recipe_file is None:
        raise ConfigError(got=config.name, do=f"write base: with one of {', '.join(sorted(shipped('recipes')))}",
                          why="neither it nor one of its bases is a recipe, so there is nothing to train")  # fmt: skip
    if what == "overlap" and config.run.devices < 2:
        raise ConfigError(got="run.devices: 1", why="one process exchanges no gradients", key="run.devices",
                          do="write run.devices: 2 or more, or tune something else")  # fmt: skip
