"""The energy counter: what two readings are worth."""

from __future__ import annotations

import pytest

from fastloop.evidence.gpu.series import EnergyCounter


def stepped(counter: EnergyCounter, seconds: float, watts: float, period: float, poll: float = 0.01) -> None:
    for tick in range(round(seconds / poll) + 1):
        at = tick * poll
        counter.add(at, int(watts * 1e3 * period * int(at / period + 1e-9)))


def test_joules_of_a_known_load() -> None:
    counter = EnergyCounter()
    stepped(counter, 20.0, watts=300.0, period=0.1)
    assert counter.joule() == pytest.approx(6000, rel=0.01)


def test_under_ten_seconds_there_is_no_figure() -> None:
    counter = EnergyCounter()
    stepped(counter, 9.9, watts=300.0, period=0.1)
    assert counter.joule() is None
    stepped(control := EnergyCounter(), 10.0, watts=300.0, period=0.1)
    assert control.joule() is not None


@pytest.mark.parametrize(
    "readings",
    [
        [(0.0, 5000), (12.0, 5000)],
        [(0.0, 5000), (6.0, 9000), (12.0, 100)],
        [(0.0, 5000), (6.0, 100), (12.0, 90000)],
        [(0.0, None), (12.0, 9000)],
        [(0.0, 5000), (6.0, None), (12.0, 9000)],
        [(0.0, 5000), (6.0, 7000), (12.0, None)],
        [],
    ],
    ids=["stands still", "fell", "fell and rose", "refused first", "refused between", "refused last", "never asked"],
)
def test_what_is_no_measurement_is_none(readings: list[tuple[float, int | None]]) -> None:
    counter = EnergyCounter()
    for at, millijoule in readings:
        counter.add(at, millijoule)
    assert counter.joule() is None
