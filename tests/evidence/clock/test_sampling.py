"""Steps of which only some tell their phases: the others are split as those are, unless they are like none of them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from fastloop.evidence.clock.sampling import FIRST, Sampled

Step = tuple[dict[str, float], bool]
USUAL = {"forward": 3.0, "backward": 6.0, "optimizer": 1.0}


def means(steps: Iterable[Step]) -> tuple[dict[str, float], float]:
    """Seconds per step by phase, and what belongs to none."""
    sampled, count, total = Sampled(), 0, 0.0
    for phases, detailed in steps:
        for phase, seconds in phases.items():
            sampled.add(phase, seconds, detailed)
            total += seconds
        sampled.step_ends(detailed)
        count += 1
    found = sampled.means(count, 0)
    return found, total / count - sum(found.values())


def run(steps: int, far: dict[int, dict[str, float]] | None = None, every: int = 8) -> list[Step]:
    return [({**USUAL, **(far or {}).get(number, {})}, number < 8 or number % every == 0) for number in range(steps)]


def test_like_steps_are_split_alike() -> None:
    found, rest = means(run(100))
    assert found == pytest.approx(USUAL) and rest == pytest.approx(0)


def test_a_pause_that_nobody_saw_is_nobodys() -> None:
    """Were it split as the steps in detail are, the backward would have most of a pause of the forward's."""
    found, rest = means(run(100, {61: {"forward": 3000.0}}))
    assert rest == pytest.approx(30, rel=0.01) and found == pytest.approx(USUAL)


@pytest.mark.parametrize("at", [0, 3, 64])
def test_a_pause_that_was_seen_is_its_phases(at: int) -> None:
    found, rest = means(run(100, {at: {"forward": 3000.0}}))
    assert rest == pytest.approx(0, abs=1e-9)
    assert found == pytest.approx({**USUAL, "forward": 33.0}, rel=0.02)


def test_far_steps_that_come_again_are_split_as_those_that_were_seen() -> None:
    draw = random.Random(1)
    far = {number: {"optimizer": 61.0} for number in range(3, 2000, 10)}
    steps = [({**USUAL, **far.get(number, {})}, number < 8 or draw.random() < 1 / 8) for number in range(2000)]
    found, rest = means(steps)
    assert rest == pytest.approx(0, abs=1e-9) and found == pytest.approx({**USUAL, "optimizer": 7.0}, rel=0.1)


def test_one_far_step_does_not_speak_for_others() -> None:
    found, rest = means(run(100, {64: {"forward": 300.0}, 61: {"backward": 600.0}}))
    assert rest == pytest.approx(6, rel=0.05) and found["forward"] == pytest.approx(6, rel=0.05)


def test_few_steps_are_told_before_there_are_many() -> None:
    found, _ = means(run(FIRST - 1, {0: {"forward": 3000.0}}))
    assert found["forward"] == pytest.approx((3000 + 3 * (FIRST - 2)) / (FIRST - 1))
    assert means([(USUAL, False)]) == ({}, 10.0), "none in detail: no phase is known"


def test_work_between_steps_counts_where_it_was_seen() -> None:
    sampled = Sampled()
    for _ in range(4):
        sampled.add("forward", 2.0, True)
        sampled.step_ends(True)
        sampled.between("callbacks_logging", 1.0)
    assert sampled.means(4, 4) == pytest.approx({"forward": 2.0, "callbacks_logging": 1.0})
