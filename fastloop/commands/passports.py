"""The numerics passports of the rungs: what the gates of past experiments on this machine said, newest first.

Kept below ``$XDG_CACHE_HOME/fastloop/passports`` (``~/.cache`` without it), one file per rung. A passport is a note,
never a condition: a cache that cannot be written or read is as good as none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastloop import parity
from fastloop.commands.readback import read
from fastloop.comparison import Outcome, Sample
from fastloop.report import files
from fastloop.report.gates import size

MOST = 20
SHOWN = 3


def folder() -> Path:
    """Where they are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastloop" / "passports"


def keep(rung: str, outcome: Outcome, hardware: Mapping[str, Any], sample: Sample, *, name: str = "",
         run_dir: Path | None = None) -> None:  # fmt: skip
    """Write down what came of a rung in an experiment of its own; what the same directory said before is replaced."""
    if not outcome.gates:
        return
    entry = {**parity.passport(rung, outcome, hardware), "runs": len(sample.samples_per_s),
             "name": name, "run_dir": None if run_dir is None else str(run_dir.absolute()),
             "date": datetime.now(timezone.utc).date().isoformat()}  # fmt: skip
    with contextlib.suppress(OSError):
        others = [each for each in of(rung) if run_dir is None or each.get("run_dir") != entry["run_dir"]]
        content = {"schema": files.SCHEMA, "rung": rung, "passports": [entry, *others][:MOST]}
        files.write(folder(), {f"{rung}.json": files.dump(content)})


def of(rung: str) -> list[dict[str, Any]]:
    """Those of a rung, newest first."""
    found = (read(folder() / f"{rung}.json") or {}).get("passports")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def lines(rung: str) -> list[str]:
    """The newest, for its manual page."""
    found = of(rung)
    if not found:
        return [f"Numerics: no experiment on this machine yet; fastloop ab CONF --vs {rung} writes a passport."]
    told = ["Numerics, as measured on this machine:"]
    for one in found[:SHOWN]:
        hardware = one.get("environment") or {}
        passed = {True: "passed", False: "FAILED", None: "undecided"}[one.get("passed")]
        told.append("  ".join(["", str(one.get("date")), str(one.get("name") or ""), f"{one.get('class')}, {passed}",
                               f"{hardware.get('device_name')}, torch {hardware.get('torch')}",
                               f"{one.get('runs')} runs"]))  # fmt: skip
        told += [f"    {gate.get('name')}: {gate.get('why')}" for gate in one.get("gates") or []]
        told.append(f"    {_figures(one)}")
    return told


def _figures(one: Mapping[str, Any]) -> str:
    """What was seen, what could have been, and by which versions."""
    seen = [f"{gate.get('name')} {size(gate, 'deviation')} ({size(gate, 'visible')})" for gate in one.get("gates") or []
            if not {size(gate, "deviation"), size(gate, "visible")} <= {"n/a"}]  # fmt: skip
    versions = one.get("environment") or {}
    by = ", ".join(f"{name} {versions.get(name) or 'n/a'}" for name in ("lightning", "fastloop", "driver"))
    return "; ".join([*([f"deviation (smallest visible): {', '.join(seen)}"] if seen else []), by])
