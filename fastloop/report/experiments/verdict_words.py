"""Describes a comparison in a word, and its ratio with as many digits as its interval needs.

If parity failed, the headline has no ratio: a different training may well be faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from fastloop.records.experiment import ArmResult, Comparison, Gate, Hardware, Outcome, choose_digits
from fastloop.report.drawing.document import Table, strip_unprintable
from fastloop.report.run.summary import join_lines

WORDS = ("FASTER", "NO DIFFERENCE", "INCONCLUSIVE", "INSUFFICIENT", "SLOWER", "PARITY FAILED", "FAILED")
"""Verdicts, best first."""
ALPHA = 0.05
"""Error rate of an experiment, as in `judge.statistics`."""
VERSIONS = ("torch", "lightning", "fastloop", "driver")


def describe_hardware(hardware: Hardware) -> tuple[str, ...]:
    """Describe devices and versions briefly; n/a if the device is unknown."""
    named = hardware.device_name or "n/a"
    first = named if hardware.devices is None else f"{hardware.devices}x {named}"
    known = [(name, getattr(hardware, name)) for name in VERSIONS]
    return (first, *(f"{name} {version}" for name, version in known if version is not None))


MOST_LINES = 14


def lay_out(first: str, kinds: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Lay out at most 14 lines: the first, and each kind's texts after its name; if there are more, some share one."""
    shown = [(kind, [text for text in texts if text]) for kind, texts in kinds]
    join_lines(shown, MOST_LINES - 1)
    return put_on_one_line([first, *(f"{kind:<8} {text}" if kind else text for kind, texts in shown for text in texts)])


def put_on_one_line(lines: Iterable[str]) -> list[str]:
    """Put each text on one line: a reason may be an exception's message with several lines."""
    return [strip_unprintable(" ".join(line.splitlines())).rstrip() for line in lines]


def choose_word(comparison: Comparison, arm: ArmResult | None = None) -> str:
    """Return the verdict on one arm, from its comparison and its result."""
    if comparison.parity.passed is False:
        return "PARITY FAILED"
    if comparison.ci95 is None:
        return "FAILED" if arm and arm.failed else "INSUFFICIENT"
    return comparison.verdict.replace("_", " ").upper()


def write_headline(comparison: Comparison, arm: ArmResult | None = None) -> str:
    """Return the verdict, with the ratio if one is claimed, and a doubt about parity if it matters."""
    verdict, parity = choose_word(comparison, arm), comparison.parity
    if verdict not in ("FASTER", "SLOWER") or comparison.ratio is None:
        return verdict
    doubt = "" if verdict == "SLOWER" or parity.passed else ", PARITY NOT SHOWN"
    doubt = ", NO PARITY CLAIMED" if doubt and parity.parity_class == "changes-training" else doubt
    return f"{verdict} {format_ratio(comparison)}{doubt}"


def choose_tone(headline: str) -> str:
    """Return the tone of a headline: good, bad or unknown."""
    if headline.startswith(("SLOWER", "PARITY FAILED", "FAILED")):
        return "bad"
    return "good" if headline.startswith("FASTER") and "," not in headline else "unknown"


def format_ratio(comparison: Comparison) -> str:
    """Format the ratio: 1.32x."""
    return "n/a" if comparison.ratio is None else f"{comparison.ratio:.{choose_digits(comparison.ci95)}f}x"


def format_interval(comparison: Comparison) -> str:
    """Format the interval of the ratio: 1.29 to 1.35."""
    ends, digits = comparison.ci95, choose_digits(comparison.ci95)
    return "n/a" if ends is None else f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"


def format_level(comparison: Comparison) -> str:
    """Format the confidence level of the interval."""
    return f"{100 * (1 - comparison.alpha):.4g} %"


def describe_shared_error_rate(comparisons: Sequence[Comparison]) -> str:
    """Say that several arms share one error rate; empty for a single arm, and for older files with one rate per arm."""
    if len(comparisons) < 2 or sum(one.alpha for one in comparisons) > ALPHA * (1 + 1e-9):
        return ""
    return (
        f"with {len(comparisons)} arms, each interval is at {format_level(comparisons[0])},"
        f" so that all hold together with {100 * (1 - ALPHA):g} % confidence"
    )


# -- parity as text and as a table: each gate's deviation, its limit, and the smallest visible deviation ---------------

_PASSED = {True: "passed", False: "FAILED", None: "could not tell"}
HEAD = ("gate", "result", "deviation", "limit", "smallest visible", "why")


def describe_parity(parity: Outcome) -> str:
    """Describe class, outcome and gates in one line; empty if nothing is known about parity."""
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
    """Describe one gate in a few words: ``gradient 3.1e-3 (limit 5e-2)``."""
    seen, limit = format_figure(gate, "deviation"), format_figure(gate, "limit")
    if seen == "n/a":
        return f"{gate.name} {'equal' if gate.passed and gate.name == 'ledger' else _PASSED[gate.passed]}"
    outcome = "" if gate.passed else f" {_PASSED[gate.passed]}"
    return f"{gate.name} {seen}{'' if limit == 'n/a' else f' (limit {limit})'}{outcome}"


def format_figure(gate: Gate, figure: Literal["deviation", "limit", "visible"]) -> str:
    """Format a deviation in the unit of its gate: percent of the loss, or a share of the gradient's norm."""
    value = getattr(gate, figure)
    if value is None:
        return "n/a"
    if gate.name != "loss":
        return format_compact(value)
    return f"{value:{'+' if figure == 'deviation' else ''}.2g} %"


def format_compact(value: float) -> str:
    """Format a number of any size in a few characters: 0.25, 3.1e-3."""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.2g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def tabulate_gates(outcomes: Sequence[tuple[str, Outcome]], whose: str = "arm") -> Table:
    """Tabulate the gates of several arms or rungs; if an arm's gates did not run, a row says why."""
    found = list[tuple[str, ...]]()
    for name, parity in outcomes:
        whose_gates = f"{name} ({parity.parity_class})"
        for gate in parity.gates:
            figures = (format_figure(gate, "deviation"), format_figure(gate, "limit"), format_figure(gate, "visible"))
            found.append((whose_gates, gate.name, _PASSED[gate.passed], *figures, gate.why))
        if not parity.gates:
            found.append((name, "none", _PASSED[parity.passed], "n/a", "n/a", "n/a", parity.why))
    note = (
        "Deviation, limit and smallest visible deviation share a unit: for the gradient, the norm of the difference"
        " over the norm of the base's gradient; for the loss, percent of the base's loss. The ledger (samples of each"
        " step, backwards, optimizer steps, learning rates) either matches or does not."
    )
    return Table(
        "Parity", (f"{whose} (class)", *HEAD), found, numeric=(3, 4, 5), note=note if found else "n/a: no gate ran."
    )
