"""fastloop report: show what a run directory holds."""

from __future__ import annotations

import json
from pathlib import Path

from fastloop.commands.answer import Answer
from fastloop.errors import ConfigError

PARTS = ("plan", "measurement", "verdicts", "findings")


def report(run_dir: str) -> Answer:
    """The report of a run directory as text, and its records as one object.

    Raises:
        ConfigError: the directory holds no run.
    """
    path = Path(run_dir)
    text = path / "report.md"
    if not text.is_file():
        raise ConfigError(got=str(path), why="it holds no report.md", do=_instead(path))
    content = {name: _read(path / f"{name}.json") for name in PARTS}
    return Answer(text=text.read_text(encoding="utf-8"), json={"schema": 1, "run_dir": str(path), **content})


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def _instead(path: Path) -> str:
    runs = sorted(path.rglob("report.md"), key=lambda found: found.stat().st_mtime) if path.is_dir() else []
    if runs:
        return f"write the directory of one run, such as {runs[-1].parent}"
    return "write the directory that fastloop run printed, below fastloop-runs/"
