"""Whether an experiment that goes on is where it began: rates of two machines, or of two versions, do not compare.

What is not known (``None``, as a driver where there is no GPU) differs from nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastloop import facts
from fastloop.commands.readback import read
from fastloop.commands.trial import TRIAL, finished
from fastloop.errors import ConfigError

VERSIONS = ("torch", "lightning", "fastloop", "driver")


def versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What of an ``env.json`` decides about numbers."""
    known = environment.get("versions") or {}
    return {**{name: known.get(name) for name in VERSIONS[:-1]}, "driver": environment.get("driver")}


def refuse_others(place: Path, folders: Iterable[Path]) -> None:
    """What finished has to be from this machine, with the versions that are here.

    Args:
        folders: of the arms, with a folder for each run.

    Raises:
        ConfigError: it is not.
    """
    now = facts.environment((), {})
    for folder in folders:
        for path in sorted(folder.glob(f"*/{TRIAL}")):
            trial = finished(path.parent)
            if trial is None or trial.measurement is None:
                continue
            before = read(path.parent / "env.json") or {}
            if found := _differing(before, now, on_gpu=trial.measurement.get("device") == "cuda"):
                raise ConfigError(got=f"--resume {place}", why=f"its runs are from {'; '.join(found)}",
                                  do="go on where they were made, or start another experiment here")  # fmt: skip


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], *, on_gpu: bool) -> list[str]:
    devices = (_gpus(before), _gpus(now) or "a machine without a GPU") if on_gpu else (_cpu(before), _cpu(now))
    pairs = [("", *devices), *((f"{name} ", versions(before)[name], versions(now)[name]) for name in VERSIONS)]
    return [f"{label}{old}, this is {new}" for label, old, new in pairs
            if old is not None and new is not None and old != new]  # fmt: skip


def _gpus(environment: Mapping[str, Any]) -> str | None:
    """The kinds there are; how many of each a machine has beside those that are trained on does not matter."""
    return ", ".join(sorted({str(gpu.get("name")) for gpu in _hardware(environment).get("gpus") or ()})) or None


def _cpu(environment: Mapping[str, Any]) -> str | None:
    return _hardware(environment).get("cpu_model")


def _hardware(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    return environment.get("hardware") or {}
