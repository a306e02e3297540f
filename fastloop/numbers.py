"""Formats numbers for people; an unmeasured value is n/a, never 0."""

from __future__ import annotations

import math
import re


def format_number(value: float | None, form: str = ",.1f", unit: str = "") -> str:
    """Format a number with its unit; an unmeasured value is n/a, never 0."""
    if value is None or not math.isfinite(value):
        return "n/a"
    text = format(value, form)
    text = text if re.search("[1-9]", text) else text.lstrip("-")  # no -0.0
    return f"{text} {unit}".rstrip()


def format_short(value: float | None, unit: str = "", *, digits: int = 3) -> str:
    """Format a number with that many digits, or more in front of the point: 0.577, 40.5, 2,697; never 2.7e+03."""
    if value is None or not math.isfinite(value):
        return "n/a"
    decimals = 0 if value == 0 else max(0, min(9, digits - 1 - math.floor(math.log10(abs(value)))))
    text = f"{value:,.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if decimals else text} {unit}".rstrip()


def format_s(seconds: float | None) -> str:
    """Format seconds: 41 s, 3.2 s."""
    return format_number(seconds, ",.1f" if seconds is not None and seconds < 10 else ",.0f", "s")


def format_flop_rate(value: float | None) -> str:
    """Format a rate in TFLOP/s with the unit that suits its size."""
    small = value is not None and value < 1
    return format_short(1000 * (value or 0.0), "GFLOP/s") if small else format_short(value, "TFLOP/s")
