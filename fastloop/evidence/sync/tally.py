"""Sums synchronizations per line and arranges them in the form of ``Measurement.syncs``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastloop.evidence.sync.call_site import CallSite, Cause
from fastloop.evidence.sync.table import ADVICE, OTHER_ADVICE, OUR_ADVICE, name_cause

MOST_KINDS = 3
"""Limit on the kinds listed for one line."""


@dataclass
class _Line:
    kinds: dict[str, float] = field(default_factory=dict)
    """Number of calls by kind."""
    seconds: float | None = None
    advice: tuple[float, str] = (-1.0, OTHER_ADVICE)
    """The cost and the advice of the most expensive kind."""


class Tally:
    """Synchronizations by place and kind. Any thread may add."""

    def __init__(self) -> None:
        self._seen: dict[tuple[CallSite, str, str | None], tuple[int, float | None]] = {}
        self._lock = threading.Lock()

    def add(self, site: CallSite, what: str, seconds: float | None, name: str | None = None) -> None:
        """Add one synchronization; `seconds`: how long the host was blocked, if known; `name`: the logged metric."""
        with self._lock:
            count, total = self._seen.get((site, what, name), (0, None))
            if seconds is not None:
                total = (total or 0.0) + seconds
            self._seen[site, what, name] = (count + 1, total)

    def rows(self, steps: int, logs: Mapping[str, str] | None = None) -> tuple[Mapping[str, Any], ...]:
        """Most expensive first, one row per line; Lightning's synchronizations for ``self.log`` count for its line.

        Args:
            steps: number of observed optimizer steps.
            logs: lines that log, by metric name.
        """
        lines: dict[str, _Line] = {}
        for (site, what, name), (count, seconds) in self._seen.items():
            where, label, advice = _attribute(site, what, name, logs or {})
            line = lines.setdefault(where, _Line())
            line.kinds[label] = line.kinds.get(label, 0) + count
            if seconds is not None:
                line.seconds = (line.seconds or 0.0) + seconds
            line.advice = max(
                line.advice, (seconds if seconds is not None else count / 1e9, advice), key=lambda entry: entry[0]
            )
        made = [_make_row(where, line, max(1, steps)) for where, line in lines.items()]
        return tuple(sorted(made, key=lambda row: (-(row["ms_per_step"] or 0.0), -row["per_step"], row["where"])))


def _make_row(where: str, line: _Line, steps: int) -> dict[str, Any]:
    kinds = sorted(line.kinds, key=lambda kind: -line.kinds[kind])
    return {
        "where": where,
        "what": ", ".join(kinds[:MOST_KINDS]),
        "per_step": sum(line.kinds.values()) / steps,
        "ms_per_step": None if line.seconds is None else 1e3 * line.seconds / steps,
        "instead": line.advice[1],
    }


def _attribute(site: CallSite, what: str, name: str | None, logs: Mapping[str, str]) -> tuple[str, str, str]:
    """Line, label and advice of one kind of synchronization."""
    where, label = site.where, what
    if site.ours:
        return where, label if site.inside is None else f"{label} in {site.inside}", OUR_ADVICE
    if site.cause is not None:
        what = label = name_cause(site.cause.kind, name or site.cause.name)
        logged_at = _find_log_line(site.cause, name, logs)
        if logged_at is not None and not site.users:
            where = logged_at
        elif site.cause.kind == "callback" and site.cause.name and not site.users:
            where = site.cause.name  # a line inside Lightning would not help the user
        elif (name or site.cause.name) and not site.users:
            label = f"{what} of {name or site.cause.name}"
    elif site.inside is not None:
        label = f"{what} in {site.inside}"
    return where, label, ADVICE.get(what, OTHER_ADVICE)


def _find_log_line(cause: Cause, name: str | None, logs: Mapping[str, str]) -> str | None:
    """The line that logs this metric. Lightning appends `_step`, `_epoch` and the loader's number to names."""
    full = name or cause.name or ""
    plain = full.partition("/dataloader_idx_")[0]
    return next(
        (logs[key] for key in (full, plain, plain.removesuffix("_step"), plain.removesuffix("_epoch")) if key in logs),
        None,
    )
