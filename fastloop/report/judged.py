"""A comparison in a word, and its ratio with as many digits as its interval needs.

Where parity failed, no ratio stands in a headline: another training may well be a faster one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.report import gates
from fastloop.report.document import part
from fastloop.report.readings import real

WORDS = ("FASTER", "NO DIFFERENCE", "INCONCLUSIVE", "INSUFFICIENT", "SLOWER", "PARITY FAILED", "FAILED")
"""The best first."""
ALPHA = 0.05
"""Of an experiment, as in `stats`, and of a comparison where the file does not say."""
BAND_PCT = 3.0
"""What nobody cares about, where the file does not say."""


def word(comparison: Mapping[str, Any], arm: Mapping[str, Any] | None = None) -> str:
    """The verdict on one arm, from its comparison and its entry among the arms."""
    if gates.passed(part(comparison, "parity")) is False:
        return "PARITY FAILED"
    if interval(comparison) is None:
        return "FAILED" if arm and arm.get("failed") else "INSUFFICIENT"
    said = str(comparison.get("verdict") or "insufficient").replace("_", " ").upper()
    return said if said in WORDS else "INSUFFICIENT"


def headline(comparison: Mapping[str, Any], arm: Mapping[str, Any] | None = None) -> str:
    """The word, with the ratio where one is claimed, and what is not known of parity where it counts."""
    said = word(comparison, arm)
    ratio = real(comparison.get("ratio"))
    if said in ("FASTER", "SLOWER") and ratio is not None:
        parity = part(comparison, "parity")
        doubt = "" if said == "SLOWER" or gates.passed(parity) else ", PARITY NOT SHOWN"
        doubt = ", NO PARITY CLAIMED" if doubt and parity.get("class") == "changes-training" else doubt
        return f"{said} {times(comparison)}{doubt}"
    return said


def tone(said: str) -> str:
    """good, bad or unknown, of a headline."""
    if said.startswith(("SLOWER", "PARITY FAILED", "FAILED")):
        return "bad"
    return "good" if said.startswith("FASTER") and "," not in said else "unknown"


def interval(comparison: Mapping[str, Any], key: str = "ci95") -> tuple[float, float] | None:
    """Both ends of an interval; None where either is not known."""
    found = comparison.get(key)
    ends = [real(end) for end in found] if isinstance(found, (list, tuple)) else []
    low, high = ends if len(ends) == 2 else (None, None)
    return None if low is None or high is None else (low, high)


def times(comparison: Mapping[str, Any]) -> str:
    """The ratio: 1.32x."""
    ratio = real(comparison.get("ratio"))
    return "n/a" if ratio is None else f"{ratio:.{_digits(comparison)}f}x"


def between(comparison: Mapping[str, Any]) -> str:
    """The interval of the ratio: 1.29 to 1.35."""
    ends, digits = interval(comparison), _digits(comparison)
    return "n/a" if ends is None else f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"


def level(comparison: Mapping[str, Any]) -> str:
    """How often the interval covers the truth."""
    alpha = real(comparison.get("alpha"))
    return f"{100 * (1 - (ALPHA if alpha is None else alpha)):.4g} %"


def together(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """That several arms share one error rate; empty of a single one, and of an older file, where each had its own."""
    spent = [real(one.get("alpha")) for one in comparisons]
    if len(spent) < 2 or sum(ALPHA if each is None else each for each in spent) > ALPHA * (1 + 1e-9):
        return ""
    return (f"{len(spent)} arms are judged together: each interval at {level(comparisons[0])}, so that all of them hold"
            f" at once at {100 * (1 - ALPHA):g} %")  # fmt: skip


def band_pct(content: Mapping[str, Any]) -> float:
    """Differences up to this one are called none."""
    found = real(content.get("band_pct"))
    return BAND_PCT if found is None else found


def _digits(comparison: Mapping[str, Any]) -> int:
    """Two, or more where rounding would make both ends one, or hide that 1 lies outside."""
    ends = interval(comparison)
    if ends is None:
        return 2
    outside = ends[0] > 1 or ends[1] < 1
    for digits in (2, 3):
        low, high = (f"{end:.{digits}f}" for end in ends)
        if low != high and not (outside and f"{1:.{digits}f}" in (low, high)):
            return digits
    return 4
