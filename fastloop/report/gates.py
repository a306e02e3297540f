"""Parity in words and as a table: what each gate saw, what would have failed it, what it could have seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.report.document import entries, part
from fastloop.report.readings import real
from fastloop.report.tables import Table

_PASSED = {True: "passed", False: "FAILED", None: "could not tell"}
HEAD = ("gate", "result", "deviation", "limit", "smallest visible", "why")


def passed(parity: Mapping[str, Any]) -> bool | None:
    """Whether all gates held; None: not known, or not claimed."""
    found = parity.get("passed")
    return found if isinstance(found, bool) else None


def line(parity: Mapping[str, Any]) -> str:
    """Class, outcome and gates in one line; empty where nothing is known of parity."""
    kind, gates = parity.get("class"), entries(parity, "gates")
    if not kind and not gates:
        return ""
    claimless = kind == "changes-training" and passed(parity) is not False
    head = "not claimed" if claimless else f"{kind or 'n/a'}, {_PASSED[passed(parity)]}"
    said = ", ".join(_gate(gate) for gate in gates)
    reason = str(parity.get("why") or "").removeprefix("claims no parity: ") \
        if not said or passed(parity) is not True else ""
    notes = [part(gate, "detail").get("note") for gate in gates if passed(gate)]
    return ": ".join(filter(None, [head, "; ".join(str(each) for each in (said, reason, *notes) if each)]))


def _gate(gate: Mapping[str, Any]) -> str:
    """One gate in a few words: ``gradient 3.1e-3 (limit 5e-2)``."""
    name, outcome = str(gate.get("name") or "n/a"), passed(gate)
    seen, limit = size(gate, "deviation"), size(gate, "limit")
    if seen == "n/a":
        said = "equal" if outcome and name == "ledger" else _PASSED[outcome]
    else:
        said = f"{seen}{'' if limit == 'n/a' else f' (limit {limit})'}{'' if outcome else f' {_PASSED[outcome]}'}"
    return f"{name} {said}"


def size(gate: Mapping[str, Any], key: str) -> str:
    """A deviation in the unit of its gate: per cent of the loss, or a share of the gradient's norm."""
    value = real(gate.get(key))
    if value is None:
        return "n/a"
    if gate.get("name") != "loss":
        return share(value)
    return f"{value:{'+' if key == 'deviation' else ''}.2g} %"


def share(value: float) -> str:
    """A number of any size in a few letters: 0.25, 3.1e-3."""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.2g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def rows(parity: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row of texts for each gate."""
    return [(str(gate.get("name") or "n/a"), _PASSED[passed(gate)], size(gate, "deviation"), size(gate, "limit"),
             size(gate, "visible"), str(gate.get("why") or "")) for gate in entries(parity, "gates")]  # fmt: skip


def table(told: Sequence[tuple[str, Mapping[str, Any]]], whose: str = "arm") -> Table:
    """The gates of several arms or rungs; one whose gates did not run has a row that says why."""
    found = []
    for name, parity in told:
        nothing = [("none", _PASSED[passed(parity)], "n/a", "n/a", "n/a", str(parity.get("why") or ""))]
        kind = str(parity.get("class") or "n/a")
        found += [(f"{name} ({kind})", *row) for row in rows(parity) or nothing]
    note = ("Deviation, limit and smallest visible deviation share a unit: of the gradient, the norm of the difference"
            " over the norm of the base's gradient; of the loss, per cent of the base's loss. The ledger (samples of"
            " each step, backwards, optimizer steps, learning rates) is equal or it is not.")  # fmt: skip
    return Table(title="Parity", head=(f"{whose} (class)", *HEAD), rows=tuple(found), numeric=(3, 4, 5),
                 note=note if found else "n/a: no gate ran.")  # fmt: skip
