"""Where the loop waits for its device, in a line: what ``fastloop diagnose --syncs`` was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastloop.measurement import Measurement

MOST = 3
"""Places in the line; the report has all."""


def hunted_steps(seen: Measurement) -> int | None:
    """Steps in which every synchronisation was looked for; None where nobody asked for that."""
    found = (seen.evidence.get("syncs") or {}).get("hunted_steps")
    return None if found is None else int(found)


def lines(seen: Measurement) -> list[str]:
    """The dearest places, or that there are none, where they were looked for; empty where that is not known."""
    if not seen.syncs:
        return _none(hunted_steps(seen))
    places = [_place(sync, seen.device) for sync in seen.syncs[:MOST]]
    more = len(seen.syncs) - len(places)
    return ["; ".join([*places, *([f"{more} more in the report"] if more else [])])]


def _none(hunted: int | None) -> list[str]:
    if hunted is None:
        return []
    return [f"none found, in {hunted} steps" if hunted else "n/a: the training ended before they were looked for"]


def _place(sync: Mapping[str, Any], device: str) -> str:
    ms, often = sync.get("ms_per_step"), sync.get("per_step")
    if ms is not None:
        cost = f", {ms:.3g} ms a step"
    else:
        cost = ", no time on the CPU" if device == "cpu" else f", {often:.3g} a step" if often is not None else ""
    return f"{sync.get('where') or 'n/a'} {sync.get('what') or 'n/a'}{cost}"
