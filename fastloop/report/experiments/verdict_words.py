"""A comparison in a word, and its ratio with as many digits as its interval needs.

Where parity failed, no ratio stands in a headline: another training may well be a faster one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from fastloop.records.experiment import ArmResult, Comparison, Gate, Hardware, Outcome, choose_digits
from fastloop.report.drawing.document import Table, printable
from fastloop.report.run.summary import join_lines

WORDS = ("FASTER", "NO DIFFERENCE", "INCONCLUSIVE", "INSUFFICIENT", "SLOWER", "PARITY FAILED", "FAILED")
"""The best first."""
ALPHA = 0.05
"""Of an experiment, as in `judge.statistics`."""
VERSIONS = ("torch", "lightning", "fastloop", "driver")


def describe_hardware(hardware: Hardware) -> tuple[str, ...]:
    """Devices and versions, short; n/a where nothing is known of the device."""
    named = hardware.device_name or "n/a"
    first = named if hardware.devices is None else f"{hardware.devices}x {named}"
    known = [(name, getattr(hardware, name)) for name in VERSIONS]
    return (first, *(f"{name} {version}" for name, version in known if version is not None))


MOST_LINES = 14


def lay_out(first: str, kinds: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """At most 14 lines: the first, and the texts of each kind under its name; where there are more, some share one."""
    shown = [(kind, [text for text in texts if text]) for kind, texts in kinds]
    join_lines(shown, MOST_LINES - 1)
    return put_on_one_line([first, *(f"{kind:<8} {text}" if kind else text for kind, texts in shown for text in texts)])


def put_on_one_line(lines: Iterable[str]) -> list[str]:
    """Each text on one line: a reason may be an exception's, which has several."""
    return [printable(" ".join(line.splitlines())).rstrip() for line in lines]


def word(comparison: Comparison, arm: ArmResult | None = None) -> str:
    """The verdict on one arm, from its comparison and its entry among the arms."""
    if comparison.parity.passed is False:
        return "PARITY FAILED"
    if comparison.ci95 is None:
        return "FAILED" if arm and arm.failed else "INSUFFICIENT"
    return comparison.verdict.replace("_", " ").upper()


def headline(comparison: Comparison, arm: ArmResult | None = None) -> str:
    """The word, with the ratio where one is claimed, and what is not known of parity where it counts."""
    verdict, parity = word(comparison, arm), comparison.parity
    if verdict not in ("FASTER", "SLOWER") or comparison.ratio is None:
        return verdict
    doubt = "" if verdict == "SLOWER" or parity.passed else ", PARITY NOT SHOWN"
    doubt = ", NO PARITY CLAIMED" if doubt and parity.parity_class == "changes-training" else doubt
    return f"{verdict} {times(comparison)}{doubt}"


def tone(headline: str) -> str:
    """good, bad or unknown, of a headline."""
    if headline.startswith(("SLOWER", "PARITY FAILED", "FAILED")):
        return "bad"
    return "good" if headline.startswith("FASTER") and "," not in headline else "unknown"


def times(comparison: Comparison) -> str:
    """The ratio: 1.32x."""
    return "n/a" if comparison.ratio is None else f"{comparison.ratio:.{choose_digits(comparison.ci95)}f}x"


def between(comparison: Comparison) -> str:
    """The interval of the ratio: 1.29 to 1.35."""
    ends, digits = comparison.ci95, choose_digits(comparison.ci95)
    return "n/a" if ends is None else f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"


def level(comparison: Comparison) -> str:
    """How often the interval covers the truth."""
    return f"{100 * (1 - comparison.alpha):.4g} %"


def together(comparisons: Sequence[Comparison]) -> str:
    """That several arms share one error rate; empty of a single one, and of an older file, where each had its own."""
    if len(comparisons) < 2 or sum(one.alpha for one in comparisons) > ALPHA * (1 + 1e-9):
        return ""
    return (
        f"{len(comparisons)} arms are judged together: each interval at {level(comparisons[0])}, so that all of them"
        f" hold at once at {100 * (1 - ALPHA):g} %"
    )


# -- parity in words and as a table: what each gate saw, what would have failed it, what it could have seen ------------

_PASSED = {True: "passed", False: "FAILED", None: "could not tell"}
HEAD = ("gate", "result", "deviation", "limit", "smallest visible", "why")


def line(parity: Outcome) -> str:
    """Class, outcome and gates in one line; empty where nothing is known of parity."""
    if parity == Outcome():
        return ""
    claimless = parity.parity_class == "changes-training" and parity.passed is not False
    promised = f"{parity.parity_class}, " if parity.gates else ""  # without a run there is no plan to know it from
    head = "not claimed" if claimless else f"{promised}{_PASSED[parity.passed]}"
    gates = ", ".join(_format_gate(gate) for gate in parity.gates)
    reason = "" if gates and parity.passed else parity.why.removeprefix("claims no parity: ")
    notes = [gate.detail.get("note") for gate in parity.gates if gate.passed]
    return ": ".join(filter(None, [head, "; ".join(str(each) for each in (gates, reason, *notes) if each)]))


def _format_gate(gate: Gate) -> str:
    """One gate in a few words: ``gradient 3.1e-3 (limit 5e-2)``."""
    seen, limit = size(gate, "deviation"), size(gate, "limit")
    if seen == "n/a":
        return f"{gate.name} {'equal' if gate.passed and gate.name == 'ledger' else _PASSED[gate.passed]}"
    outcome = "" if gate.passed else f" {_PASSED[gate.passed]}"
    return f"{gate.name} {seen}{'' if limit == 'n/a' else f' (limit {limit})'}{outcome}"


def size(gate: Gate, figure: Literal["deviation", "limit", "visible"]) -> str:
    """A deviation in the unit of its gate: per cent of the loss, or a share of the gradient's norm."""
    value = getattr(gate, figure)
    if value is None:
        return "n/a"
    if gate.name != "loss":
        return share(value)
    return f"{value:{'+' if figure == 'deviation' else ''}.2g} %"


def share(value: float) -> str:
    """A number of any size in a few letters: 0.25, 3.1e-3."""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.2g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def table(outcomes: Sequence[tuple[str, Outcome]], whose: str = "arm") -> Table:
    """The gates of several arms or rungs; one whose gates did not run has a row that says why."""
    found = list[tuple[str, ...]]()
    for name, parity in outcomes:
        whose_gates = f"{name} ({parity.parity_class})"
        for gate in parity.gates:
            figures = (size(gate, "deviation"), size(gate, "limit"), size(gate, "visible"))
            found.append((whose_gates, gate.name, _PASSED[gate.passed], *figures, gate.why))
        if not parity.gates:
            found.append((name, "none", _PASSED[parity.passed], "n/a", "n/a", "n/a", parity.why))
    note = (
        "Deviation, limit and smallest visible deviation share a unit: of the gradient, the norm of the difference"
        " over the norm of the base's gradient; of the loss, per cent of the base's loss. The ledger (samples of"
        " each step, backwards, optimizer steps, learning rates) is equal or it is not."
    )
    return Table(
        "Parity", (f"{whose} (class)", *HEAD), found, numeric=(3, 4, 5), note=note if found else "n/a: no gate ran."
    )
