"""The runs behind a comparison: what each reached, which failed and how, and what their arms were set to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import median
from typing import Any

from fastloop.report.document import entries, part
from fastloop.report.readings import real
from fastloop.report.summary import short
from fastloop.report.tables import Table


def middle(arm: Mapping[str, Any]) -> float | None:
    """The median rate of an arm's runs, samples per second."""
    rates = [rate for rate in map(real, arm.get("samples_per_s") or ()) if rate is not None]
    return median(rates) if rates else None


def failed(arm: Mapping[str, Any]) -> str:
    """Why an arm has no runs to show; empty where it has."""
    return "" if not arm.get("failed") else str(arm["failed"])


def failures(content: Mapping[str, Any]) -> list[str]:
    """Each failed run in a line: cause, rank, last step."""
    found = []
    for failure in entries(content, "failures"):
        where = [f"{label} {failure[key]}" for label, key in (("rank", "rank"), ("last step", "last_step"))
                 if failure.get(key) is not None]  # fmt: skip
        run = "" if failure.get("run") is None else f", run {failure['run']}"
        found.append(", ".join([f"{failure.get('arm')}{run}: {failure.get('cause') or 'n/a'}", *where]))
    return found


def runs(content: Mapping[str, Any]) -> Table:
    """A row for each run that began, in the order they ran."""
    told: dict[int, tuple[str, str]] = {}
    for arm in entries(content, "arms"):
        places, rates, seeds = (list(arm.get(key) or ()) for key in ("places", "samples_per_s", "seeds"))
        for index, place in enumerate(places):
            rate = real(rates[index]) if index < len(rates) else None
            told[place] = (str(seeds[index]) if index < len(seeds) else "n/a", short(rate))
    rows = [(str(place + 1), str(name), *told.get(place, ("n/a", "no result")))
            for place, name in enumerate(content.get("order") or ())]  # fmt: skip
    return Table(title="Every run, in order", head=("place", "arm", "seed", "samples/s"), rows=tuple(rows),
                 numeric=(0, 2, 3), note="" if rows else "n/a: no run began.")  # fmt: skip


def changed(content: Mapping[str, Any]) -> Table:
    """What each arm is set to where the base is set otherwise."""
    rows = [(str(arm), str(key), _value(base), _value(other)) for arm, keys in part(content, "config_diff").items()
            for key, base, other in (entry for entry in keys or () if len(entry) == 3)]  # fmt: skip
    return Table(title="Configuration that differs", head=("arm", "key", "base", "arm's"), rows=tuple(rows),
                 note="" if rows else "Nothing differs: identical arms test the judge.")  # fmt: skip


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
