"""Tests of fastloop.numbers."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop import numbers


@pytest.mark.parametrize(
    ("value", "form", "unit", "text"),
    [
        (None, ",.1f", "ms", "n/a"),
        (0.0, ",.1f", "ms", "0.0 ms"),
        (1234.5, ",.1f", "", "1,234.5"),
        (7, ",d", "", "7"),
        (float("nan"), ",.1f", "ms", "n/a"),
        (float("inf"), ",.1f", "samples/s", "n/a"),
    ],
)
def test_numbers(value: Any, form: str, unit: str, text: str) -> None:
    assert numbers.format_number(value, form, unit) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (float("inf"), "n/a"),
        (0, "0"),
        (0.5774, "0.577"),
        (2.0, "2"),
        (13.04, "13"),
        (40.51, "40.5"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (2_000_000.0, "2,000,000"),
        (-0.25, "-0.25"),
        (1e-7, "0.0000001"),
    ],
)
def test_short_numbers(value: Any, text: str) -> None:
    assert numbers.format_short(value) == text
    assert numbers.format_short(value, "ms") == ("n/a" if text == "n/a" else f"{text} ms")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0345, "0.035"), (2.874, "2.9"), (28.7, "29"), (123.4, "123"), (1400.0, "1,400")]
)
def test_fewer_digits_never_need_an_exponent(value: float, text: str) -> None:
    assert numbers.format_short(value, "s", digits=2) == f"{text} s"


@pytest.mark.parametrize(
    ("rate", "said"),
    [(None, "n/a"), (0.00362, "3.62 GFLOP/s"), (36.2, "36.2 TFLOP/s"), (0.0, "0 GFLOP/s"), (float("nan"), "n/a")],
)
def test_rates_of_arithmetic(rate: float | None, said: str) -> None:
    assert numbers.format_flop_rate(rate) == said
