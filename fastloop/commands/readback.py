"""Records from the files of a run directory, of this version or an older one.

Older files lack keys, newer ones have more: what is missing gets its default, which says that it was not measured, and
what is unknown is left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastloop.measurement import Measurement
from fastloop.records import Change, Finding, Plan, Step, Verdict


def read(path: Path) -> dict[str, Any] | None:
    """An object from a JSON file; None where there is none or it is broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def measurement_from(content: Mapping[str, Any]) -> Measurement:
    """The record behind a ``measurement.json``. Pure; inverse of `files.measurement_json`."""
    blank = Measurement()
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Measurement)}
    kept: dict[str, Any] = {}
    for key, value in _known(Measurement, content).items():
        if _fits(value, kinds[key]):
            whole = getattr(blank, key)
            kept[key] = {**whole, **value} if isinstance(value, Mapping) and isinstance(whole, Mapping) else value
    return Measurement(**kept)


def plan_from(content: Mapping[str, Any]) -> Plan:
    """What of a plan its ``plan.json`` tells: all but the actions."""
    steps = []
    for row in _rows(content, "rungs"):
        change = Change(wants=row.get("wants") or {}, notes=tuple(row.get("notes") or ()),
                        parity=row.get("parity_class") or "exact")  # fmt: skip
        steps.append(Step(rung=str(row.get("rung")), status=row.get("status") or "planned", reason=row.get("reason"),
                          change=change))  # fmt: skip
    return Plan(steps=tuple(steps))


def verdicts_from(content: Mapping[str, Any]) -> tuple[Verdict, ...]:
    """The records behind a ``verdicts.json``."""
    return tuple(Verdict(**_known(Verdict, row)) for row in _rows(content, "verdicts"))


def findings_from(content: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The records behind a ``findings.json``."""
    rows = [{"bottleneck": "none", "share_pct": None, "why": "", **row} for row in _rows(content, "findings")]
    return tuple(Finding(**_known(Finding, row)) for row in rows)


def _rows(content: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = content.get(key)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _known(kind: type[Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record that the content has, lists as tuples."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in content.items() if key in names}


def _fits(value: Any, kind: str) -> bool:
    """Whether a value is of the kind that a record's field is annotated with: a file may be anybody's."""
    if value is None:
        return kind.endswith("| None")
    if isinstance(value, bool):
        return kind == "bool"
    kinds: dict[str, Any] = {"Mapping": Mapping, "tuple": tuple, "str": str, "int": (int, float), "float": (int, float)}
    return any(kind.startswith(name) and isinstance(value, known) for name, known in kinds.items())
