"""Adds up synchronisations per line and lays them out as ``Measurement.syncs`` holds them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastloop.evidence import synckinds
from fastloop.evidence.callsite import Cause, Site

MOST_KINDS = 3
"""Kinds named for one line."""


@dataclass(frozen=True, kw_only=True)
class LogSite:
    """A line that calls ``self.log``, and what it asks for."""

    where: str
    prog_bar: bool = False
    sync_dist: bool = False
    on_step: bool | None = None
    logger: bool | None = None


@dataclass
class _Line:
    kinds: dict[str, float] = field(default_factory=dict)
    """Calls by kind."""
    seconds: float | None = None
    advice: tuple[float, str] = (-1.0, synckinds.OTHER_ADVICE)
    """Of the kind that costs most."""


class Tally:
    """Synchronisations by place and kind. Any thread may add."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Site, str, str | None], tuple[int, float | None]] = {}
        self._lock = threading.Lock()

    def add(self, site: Site, what: str, seconds: float | None, name: str | None = None) -> None:
        """One synchronisation; `seconds` the host was blocked, where that is known; `name` of the logged metric."""
        with self._lock:
            count, total = self._seen.get((site, what, name), (0, None))
            if seconds is not None:
                total = (total or 0.0) + seconds
            self._seen[site, what, name] = (count + 1, total)

    def rows(self, steps: int, logs: Mapping[str, LogSite] | None = None) -> tuple[Mapping[str, Any], ...]:
        """Dearest first, one row per line; what Lightning does for a ``self.log`` counts for the line that calls it.

        Args:
            steps: optimizer steps that were watched.
            logs: lines that log, by the name of the metric.
        """
        lines: dict[str, _Line] = {}
        for (site, what, name), (count, seconds) in self._seen.items():
            where, label, advice = _blamed(site, what, name, logs or {})
            line = lines.setdefault(where, _Line())
            line.kinds[label] = line.kinds.get(label, 0) + count
            if seconds is not None:
                line.seconds = (line.seconds or 0.0) + seconds
            line.advice = max(line.advice, (seconds if seconds is not None else count / 1e9, advice),
                              key=lambda entry: entry[0])  # fmt: skip
        made = [_row(where, line, max(1, steps)) for where, line in lines.items()]
        return tuple(sorted(made, key=lambda row: (-(row["ms_per_step"] or 0.0), -row["per_step"], row["where"])))


def _row(where: str, line: _Line, steps: int) -> dict[str, Any]:
    kinds = sorted(line.kinds, key=lambda kind: -line.kinds[kind])
    return {"where": where, "what": ", ".join(kinds[:MOST_KINDS]), "per_step": sum(line.kinds.values()) / steps,
            "ms_per_step": None if line.seconds is None else 1e3 * line.seconds / steps,
            "instead": line.advice[1]}  # fmt: skip


def _blamed(site: Site, what: str, name: str | None, logs: Mapping[str, LogSite]) -> tuple[str, str, str]:
    """Line, label and advice of one kind of synchronisation."""
    where, label = site.where, what
    if site.cause is not None:
        what = label = synckinds.because(site.cause.kind, name or site.cause.name)
        found = _logging(site.cause, name, logs)
        if found is not None and not site.users:
            where = found.where
        elif site.cause.kind == "callback" and site.cause.name and not site.users:
            where = site.cause.name  # a line of Lightning's own tells its user nothing
        elif (name or site.cause.name) and not site.users:
            label = f"{what} of {name or site.cause.name}"
    elif site.inside is not None:
        label = f"{what} in {site.inside}"
    return where, label, synckinds.ADVICE.get(what, synckinds.OTHER_ADVICE)


def _logging(cause: Cause, name: str | None, logs: Mapping[str, LogSite]) -> LogSite | None:
    """The line that logs this metric. Lightning appends `_step`, `_epoch` and the loader's number to names."""
    full = name or cause.name or ""
    plain = full.partition("/dataloader_idx_")[0]
    return next((logs[key] for key in (full, plain, plain.removesuffix("_step"), plain.removesuffix("_epoch"))
                 if key in logs), None)  # fmt: skip
