"""fastloop report: show the contents of a run directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fastloop.commands.console import Answer, read_text
from fastloop.errors import ConfigError
from fastloop.experiments.trials.run_directories import ROOT
from fastloop.records import store
from fastloop.records.run_files import load_run
from fastloop.records.store import is_file


def report(run_dir: str) -> Answer:
    """Return the report of a run directory as text, and its records as the object that the original command wrote.

    Raises:
        ConfigError: the directory holds no run.
    """
    path = Path(run_dir)
    if path.name in ("report.html", "report.md") and is_file(path):  # a run's last output line names one of them
        path = path.parent
    text = path / "report.md"
    if not is_file(text):
        there = os.path.isdir(path)  # noqa: PTH112 (Path's raises)
        why = "it contains no report.md" if there else "there is no such directory"
        raise ConfigError(got=f"run directory {run_dir}", why=why, do=_suggest_instead(path))
    of_experiment = next(filter(None, (store.read(path / name) for name in store.EXPERIMENTS)), None)
    content = {**of_experiment, "run_dir": str(path)} if of_experiment else store.to_json(load_run(path))
    return Answer(text=read_text(text).rstrip("\n"), json=content)


def to_open(run_dir: str) -> str:
    """Return the file to open for a run: its report if there is one, otherwise the directory."""
    return str(store.report_in(Path(run_dir)) or run_dir)


def _suggest_instead(path: Path) -> str:
    for folder in (path, ROOT / path):
        with contextlib.suppress(OSError):
            found = [path for depth in range(4) for path in folder.glob(f"{'*/' * depth}report.md")]
            runs = sorted(found, key=lambda path: path.stat().st_mtime)
            if runs:
                return f"write the directory of one run, such as {runs[-1].parent}"
    return f"write the directory that fastloop run printed, below {ROOT}/"
