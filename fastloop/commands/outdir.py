"""The directory a command writes into: made for it, never somebody else's."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

from fastloop.errors import ConfigError
from fastloop.shipped import safe_name

ROOT = Path("fastloop-runs")


def claim(name: str, out: str | None, *, force: bool = False) -> Path:
    """Make the directory of a run: `out`, else ``fastloop-runs/<name>/<utc>``.

    Raises:
        ConfigError: it is there and not empty (and not `force`), or cannot be written.
    """
    path = Path(out) if out is not None else _fresh(ROOT / safe_name(name))
    try:
        if path.is_dir() and any(path.iterdir()) and not force:
            raise ConfigError(got=f"--out {path}", why="it is there already and not empty",
                              do="write another directory, or --force to write into this one")  # fmt: skip
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".fastloop-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(got=f"--out {path}", why=f"it cannot be written: {error.strerror or error}",
                          do="write --out with a directory of yours that has room") from None  # fmt: skip
    return path


def _fresh(folder: Path) -> Path:
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    names = (stamp, *(f"{stamp}-{count}" for count in range(2, 1000)))
    return next(folder / name for name in names if not (folder / name).exists())
