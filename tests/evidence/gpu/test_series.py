"""Readings over time in bounded memory."""

from __future__ import annotations

import itertools

import pytest

from fastloop.evidence.gpu.series import MOST_ROWS, Timeline


def test_means_are_weighted_by_time() -> None:
    line = Timeline()
    line.add(1.0, 1.0, {"watts": 100.0})
    line.add(4.0, 3.0, {"watts": 500.0})
    assert line.mean.values() == {"watts": pytest.approx(400.0)}
    assert [row["watts"] for row in line.rows()] == [100.0, 500.0]


def test_none_has_no_weight_and_only_none_is_none() -> None:
    line = Timeline()
    for second, value in enumerate([10.0, None, 30.0], start=1):
        line.add(float(second), 1.0, {"a": value, "b": None})
    assert line.mean.values() == {"a": 20.0, "b": None}
    assert [row["a"] for row in line.rows()] == [10.0, None, 30.0]


@pytest.mark.parametrize("readings", [599, 600, 601, 1200, 5000, 100_000])
def test_rows_are_bounded_even_and_lose_nothing(readings: int) -> None:
    line = Timeline()
    for second in range(1, readings + 1):
        line.add(float(second), 1.0, {"ramp": float(second)})
    rows = line.rows()
    assert MOST_ROWS // 2 <= len(rows) <= MOST_ROWS
    assert line.mean.values()["ramp"] == pytest.approx((readings + 1) / 2, abs=1e-3)
    times = [row["t_s"] or 0.0 for row in rows]
    assert times[-1] == readings and times == sorted(times)
    gaps = {late - early for early, late in itertools.pairwise(times[:-1])}
    assert gaps == {float(line.readings_per_row)}
    # Each row is the mean of a ramp over its own time.
    assert rows[0]["ramp"] == pytest.approx((1 + line.readings_per_row) / 2)
    assert line.readings_per_row == 1 if readings < MOST_ROWS else line.readings_per_row > 1


def test_a_merged_row_keeps_a_short_reading_short() -> None:
    line = Timeline()
    for second in range(1, MOST_ROWS):
        line.add(float(second), 1.0, {"x": 0.0})
    line.add(float(MOST_ROWS), 0.25, {"x": 100.0})
    assert line.readings_per_row == 2
    assert line.rows()[-1]["x"] == pytest.approx(20.0)


def test_nothing_read() -> None:
    assert Timeline().rows() == () and Timeline().mean.values() == {}
